"""An exchange of a joined run over loopback, next to bare sockets that move the same bytes.

Two regions of two ranks; each rank holds half of a vector of 125 M fp32 parameters (FSDP2), and a
fifth process has the averager. In turns, the five processes make an exchange of DiLoCo with
geo_ray, and one over bare sockets: every rank subtracts, sends 250 MB in pieces of 1 MiB with the
tags of geo_ray's frames (AES-GMAC, no TLS), the fifth process takes the mean and the outer step of
each half, and every rank receives the answer and merges it. A barrier comes before each exchange.
An exchange lasts from the first rank's begin until the last rank has merged.

  ratio      seconds of bare sockets over those of geo_ray, median over the pairs
  cpu        processor seconds of all five processes in an exchange, which load changes little
  PART, s    where a rank's time goes: medians over ranks and exchanges
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.common import support
from benchmarks.runs.bare_exchange import _dial, _receive, _send
from geo_ray.base.memory import ReusedMemory
from geo_ray.joining import rank, site
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import JoinService
from geo_ray.strategies.outer import OuterNesterov, outer_round
from geo_ray.strategies.state import AveragerState, Update
from geo_ray.training.parameters import square_norm
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.certs import Authority

REGIONS: Final = ("eu", "us")
RANKS: Final = 2
WIDTH: Final = 1000
QUICK: Final = 10


def main() -> None:
    """Measure pairs with and without TLS."""
    options = support.parse(__doc__)
    machine, figures = support.hardware(), []
    layers = QUICK if options.quick else 125
    for tls in ("required", "off"):
        found = measure(layers, 3 if options.quick else 7, tls)
        support.say(f"TLS {tls}: {json.dumps(found)}")
        pairs = list(zip(found["bare"], found["joined"], strict=True))[1:]
        figures += [
            support.median(f"bare sockets, s, TLS {tls}", [bare for bare, _ in pairs], "s"),
            support.median(f"geo_ray, s, TLS {tls}", [joined for _, joined in pairs], "s"),
            support.median(f"ratio, TLS {tls}", [bare / own for bare, own in pairs], "ratio"),
        ]
        for kind in ("bare", "joined"):
            cpu = found[f"{kind}_cpu"][1:]
            figures.append(support.median(f"cpu, {kind}, TLS {tls}", cpu, "s"))
        parts = found["parts"].items()
        figures += [support.median(f"{part}, s, TLS {tls}", each, "s") for part, each in parts]
    machine["load_after"] = round(os.getloadavg()[0], 2)
    support.finish("joining.exchange", machine, figures, options.out)


def measure(layers: int, pairs: int, tls: str) -> dict[str, Any]:
    """Return seconds of each exchange, and of its parts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.joining.exchange"])
    barrier = context.Barrier(len(REGIONS) * RANKS + 1)
    with tempfile.TemporaryDirectory() as text:
        folder, authority, key = Path(text), Authority.create("benchmark"), secrets.token_bytes(32)
        for each in (*REGIONS, SERVER):
            JoinCredentials(each, "run", key, authority.issue(each)).write(folder / f"{each}.pem")
        pipes = {name: context.Pipe() for name in (SERVER, *_names())}
        ports = [_free_port() for _ in REGIONS]
        shape = (layers, pairs, tls, str(folder))
        server = context.Process(target=_serve, args=(*shape, barrier, pipes[SERVER][1]))
        server.start()
        address, bare = pipes[SERVER][0].recv()
        ranks = [
            context.Process(
                target=_be_rank,
                args=(*shape, name, ports[index // RANKS], bare[name], address, barrier),
                kwargs={"result": pipes[name][1]},
            )
            for index, name in enumerate(_names())
        ]
        for process in ranks:
            process.start()
        found = [pipes[name][0].recv() for name in _names()]
        pipes[SERVER][0].send("end")
        served, server_cpu = pipes[SERVER][0].recv()
        for process in (*ranks, server):
            process.join()
    parts: dict[str, list[float]] = defaultdict(list)
    for each in found:
        for name, seconds in each["parts"].items():
            parts[name] += seconds[1:]
    parts["averager, in the fifth process"] = served[1:]
    result: dict[str, Any] = {"parts": parts}
    for kind in ("bare", "joined"):
        of_all = zip(*(each[f"{kind}_cpu"] for each in (*found, server_cpu)), strict=True)
        result[f"{kind}_cpu"] = [sum(each) for each in of_all]
        spans = zip(*(each[kind] for each in found), strict=True)
        result[kind] = [max(e for _, e in span) - min(b for b, _ in span) for span in spans]
    return result


def _names() -> list[str]:
    return [f"{region}.{number}" for region in REGIONS for number in range(RANKS)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Parts:
    """Seconds that functions take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Measure a method of a class from now on."""
        before: Callable[..., Any] = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return before(*args, **kwargs)
            finally:
                self.seconds[name].append(time.perf_counter() - began_s)

        setattr(owner, method, measured)


def _be_rank(
    layers: int,
    pairs: int,
    tls: str,
    folder: str,
    name: str,
    port: int,
    bare_port: int,
    address: str,
    barrier: Any,
    *,
    result: Connection,
) -> None:
    torch.set_num_threads(1)
    region, _, number = name.partition(".")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(number), world_size=RANKS
    )
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(layers)])
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    own = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    size = sum(each.numel() for each in own)
    anchor_S, update_S, room_S = torch.randn(size), torch.empty(size), torch.empty(size)
    params_S = anchor_S.clone()
    sock = _dial(bare_port)
    parts = Parts()
    parts.watch(rank.RankExchange, "encoded", "encode")
    parts.watch(site._Exchanger, "_receive_answers", "wait for the answers, and decode")
    parts.watch(rank.RankExchange, "on_replies", "merge")
    spans: dict[str, list[tuple[float, float]]] = {"bare": [], "joined": []}
    clock = Processor(barrier)
    credentials = Path(folder) / f"{region}.pem"
    with (
        site.join(
            address,
            region=region,
            credentials=credentials,
            group=dist.group.WORLD,
            transport=TransportConfig(tls=tls),
        ) as joined,
        joined.training(model) as sync,
    ):
        parts.seconds.clear()
        for turn in range(pairs):
            for kind in _order(turn):
                with torch.no_grad():
                    for each in own:
                        each.mul_(0.999)
                params_S.mul_(0.999)
                clock.start(kind)
                began_s = time.time()
                if kind == "joined":
                    sync.step(rows=1)
                else:
                    torch.sub(anchor_S, params_S, out=update_S)
                    _send(sock, update_S)
                    anchor_S.sub_(_receive(sock, room_S))
                    params_S.copy_(anchor_S)
                spans[kind].append((began_s, time.time()))
                clock.stop()
    result.send({**spans, **clock.seconds, "parts": dict(parts.seconds)})
    sock.close()
    dist.destroy_process_group()


class Processor:
    """Processor seconds of this process between the barriers around each exchange.

    Args:
        barrier: that of all processes.
    """

    def __init__(self, barrier: Any) -> None:
        self._barrier, self._kind, self._began_s = barrier, "", 0.0
        self.seconds: dict[str, list[float]] = {"bare_cpu": [], "joined_cpu": []}

    def start(self, kind: str) -> None:
        """Wait for all processes before an exchange."""
        self._barrier.wait()
        self._kind, self._began_s = kind, time.process_time()

    def stop(self) -> None:
        """Wait for all processes after it."""
        self._barrier.wait()
        self.seconds[f"{self._kind}_cpu"].append(time.process_time() - self._began_s)


def _order(turn: int) -> tuple[str, str]:
    """Return which exchange of a pair comes first."""
    return ("bare", "joined") if turn % 2 else ("joined", "bare")


def _serve(
    layers: int,
    pairs: int,
    tls: str,
    folder: str,
    barrier: Any,
    result: Connection,
) -> None:
    torch.set_num_threads(1)
    values = {
        "name": "benchmark",
        "regions": REGIONS,
        "steps": pairs,
        "strategy": {"kind": "diloco", "interval": 1},
    }
    terms = JoinTerms.model_validate_json(json.dumps(values))
    parts = Parts()
    parts.watch(JoinService, "_take", "take")
    credentials = JoinCredentials.read(Path(folder) / f"{SERVER}.pem")
    server = JoinServer(terms, credentials, transport=TransportConfig(tls=tls))
    halves = [Half(layers * WIDTH * WIDTH // RANKS) for _ in range(RANKS)]
    bare = {}
    for name in _names():
        region, _, number = name.partition(".")
        listener = socket.create_server(("127.0.0.1", 0))
        bare[name] = int(listener.getsockname()[1])
        arguments = (region, listener, pairs)
        threading.Thread(target=halves[int(number)].serve, args=arguments, daemon=True).start()
    result.send(("geo-ray://{}:{}".format(*server.address), bare))
    clock = Processor(barrier)
    for turn in range(pairs):
        for kind in _order(turn):
            clock.start(kind)
            clock.stop()
    result.recv()
    # A round's first region only waits; its second one has the mean and the outer step.
    taken = parts.seconds["take"]
    own_s = [a + b for a, b in zip(taken[::2], taken[1::2], strict=True)]
    result.send((own_s, clock.seconds))
    server.close()


class Half:
    """The averager of one half of the vector, over bare sockets.

    Args:
        size: elements.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._averager = AveragerState(REGIONS, allocate=ReusedMemory().tensor)
        self._updates: dict[str, Tensor] = {}
        self._answer_S = torch.empty(0)
        self._all_here = threading.Barrier(len(REGIONS), action=self._average)

    def serve(self, region: str, listener: socket.socket, rounds: int) -> None:
        """Answer the rank of a region that has this half, and close the listener."""
        with listener:
            sock = listener.accept()[0]
        room_S = torch.empty(self._size)
        for _ in range(rounds):
            self._updates[region] = _receive(sock, room_S)
            self._all_here.wait()
            _send(sock, self._answer_S)

    def _average(self) -> None:
        updates = [Update(region, self._updates[region], 1) for region in REGIONS]
        for each in updates:
            square_norm(each.payload_P)  # it is finite
        replies = outer_round(self._averager, updates, "uniform", OuterNesterov())
        self._answer_S = replies[0].payload_P


if __name__ == "__main__":
    main()
