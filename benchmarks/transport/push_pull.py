"""Gradient push and parameter pull between a worker and its parameter server on one node.

Two real processes. One exchange is what a worker waits for at every step: its gradient goes to the
server, the server's parameters come back. Measured on the product's own classes (`ShardLink` and
`LanClient` in the worker; `PrimaryShard`, `Server` and `Shard` behind a `LanServer` in the server):

  shared   through the memory that both share, as on one node; the gradient was computed into it
  inline   through the socket, as between nodes, with authenticated payloads
  plain    the same without the payloads' tag
  sealed   the same with encrypted payloads

each as the bare exchange, and with the SGD step on the server. Beside them `torch.distributed`
gloo: send the gradient, receive the parameters, the same SGD step between. All variants take turns
within one run, so that each pair of numbers was measured under the same load. A plain copy of the
same bytes (both directions, warm pages, one thread) is the yardstick.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import support
from geo_ray.base.types import StepReport
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import links_over, shared_bytes
from geo_ray.strategies.asgd import Asgd
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.optimizers import InnerOptimizer, Sgd
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard
from geo_ray.training.wire_format import read_answer, report_meta
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import LanClient, LanServer

SIZES_MB = (4, 40, 100)
NEVER = 10**9
TIMEOUT_S = 60.0
SERVER_RANK, WORKER_RANK = 0, 1
CONFIGS = {
    "shared": LanConfig(),
    "inline": LanConfig(shared_memory=False),
    "plain": LanConfig(shared_memory=False, digest_payload=False),
    "sealed": LanConfig(shared_memory=False, encrypt_payload=True),
}
TARGETS = {"shared": ">= 1", "inline": ">= 0.9", "sealed": ">= 0.6"}
Exchange = Callable[[bool], None]
"""One exchange; the argument says whether the server applies the gradient."""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    figures = []
    for size_mb in SIZES_MB:
        support.say(f"{size_mb} MB")
        rounds = max(7, (60 if options.quick else 400) // size_mb)
        figures += figures_of(size_mb, measure(size_mb * 250_000, rounds))
    support.finish("push_pull", machine, figures, options.out)


def measure(num_params: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per exchange by variant; entry i of every list is of round i."""
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/gloo"
        server = context.Process(target=serve, args=(there, num_params, key, store))
        server.start()
        try:
            addresses = here.recv()
            dist.init_process_group("gloo", init_method=store, rank=WORKER_RANK, world_size=2)
            exchanges: dict[str, Exchange] = {
                name: Worker(addresses[name], key, config, num_params).exchange
                for name, config in CONFIGS.items()
            }
            exchanges["gloo"] = GlooWorker(num_params).exchange
            return take_turns(exchanges, plain_copy(num_params), rounds)
        finally:
            if dist.is_initialized():
                dist.send(torch.tensor([-1]), SERVER_RANK)
                dist.destroy_process_group()
            server.join(timeout=10.0)
            server.kill()


def take_turns(
    exchanges: dict[str, Exchange], copy: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    """Time every variant once per round; three rounds before that only warm up."""
    times_s: dict[str, list[float]] = {}
    for number in range(-3, rounds):
        found = {"copy": timed(copy)}
        for name, exchange in exchanges.items():
            found[name] = timed(lambda exchange=exchange: exchange(False))
            found[f"{name}_sgd"] = timed(lambda exchange=exchange: exchange(True))
        if number >= 0:
            for name, value in found.items():
                times_s.setdefault(name, []).append(value)
    return times_s


def timed(action: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def plain_copy(num_params: int) -> Callable[[], None]:
    """Copy a gradient one way and parameters the other, on pages that are there already."""
    sources = [torch.ones(num_params) for _ in range(2)]
    targets = [torch.zeros(num_params) for _ in range(2)]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return copy


class Worker:
    """The product's worker without its computation."""

    def __init__(
        self, address: tuple[str, int], key: bytes, config: LanConfig, num_params: int
    ) -> None:
        hello = {"peer": "here/0", "role": "worker", "worker": 0, "attempt": 1}
        client = LanClient(
            address, key, hello, shared_bytes=shared_bytes(num_params), config=config
        )
        assert (client.shared is not None) == config.shared_memory
        _, grad_P, (self._link,) = links_over([client], num_params, TIMEOUT_S)
        grad_P.fill_(1e-6)
        self._answer = read_answer(0, self._link.exchange({"op": "join"}, push=False))

    def exchange(self, apply: bool) -> None:
        """Push and pull once."""
        span = self._answer.span
        assert span is not None
        # A refused gradient goes the whole way, but the server leaves its parameters as they are.
        report = StepReport(span, 0.0, 0.0, None if apply else "benchmark")
        self._answer = read_answer(0, self._link.exchange(report_meta(report), push=True))


class GlooWorker:
    """The same exchange with `torch.distributed`; a one-word message says whether to apply."""

    def __init__(self, num_params: int) -> None:
        self._grad_P = torch.full((num_params,), 1e-6)
        self._params_P = torch.zeros(num_params)
        self._words = {False: torch.tensor([0]), True: torch.tensor([1])}

    def exchange(self, apply: bool) -> None:
        """Push and pull once."""
        dist.send(self._words[apply], SERVER_RANK)
        dist.send(self._grad_P, SERVER_RANK)
        dist.recv(self._params_P, SERVER_RANK)


def serve(parent: Connection, num_params: int, key: bytes, store: str) -> None:
    """The parameter server's process: a `PrimaryShard` per variant, and gloo in the main thread."""
    torch.set_num_threads(1)
    servers, primaries, addresses = [], [], {}
    for name, config in CONFIGS.items():
        primary = build_primary(torch.zeros(num_params))
        lan = LanServer("127.0.0.1", key, primary.handle, on_close=primary.on_close, config=config)
        servers.append(lan)
        primaries.append(primary)
        addresses[name] = lan.address
    parent.send(addresses)
    dist.init_process_group("gloo", init_method=store, rank=SERVER_RANK, world_size=2)
    serve_gloo(torch.zeros(num_params))
    dist.destroy_process_group()
    for lan, primary in zip(servers, primaries, strict=True):
        lan.close()
        primary.close()


def serve_gloo(params_P: Tensor) -> None:
    optimizer = InnerOptimizer(Sgd(lr=0.1), params_P)
    grad_P = torch.zeros_like(params_P)
    word = torch.tensor([0])
    while True:
        dist.recv(word, WORKER_RANK)
        if word.item() < 0:
            return
        dist.recv(grad_P, WORKER_RANK)
        if word.item():
            optimizer.apply(grad_P)
        dist.send(params_P, WORKER_RANK)


def build_primary(params_P: Tensor) -> PrimaryShard:
    """A region of one worker that is alone, as `PrimaryActor` builds it."""
    shard = Shard(params_P, Sgd(lr=0.1), Asgd(), alone=True)
    plan = ServerPlan("here", num_workers=1, batch_size=1, steps=NEVER)
    server = Server.over([shard], params_P.numel(), plan, WirePlan())
    event_buffer = EventBuffer("here", time.time())
    held = HeldShard(shard, "here", 0, str(Path.cwd()))
    return PrimaryShard(server, held, (), None, event_buffer, TIMEOUT_S)


def figures_of(size_mb: int, times_s: dict[str, list[float]]) -> list[support.Figure]:
    """GB/s counts both directions; ratios are of speeds, so above 1 is faster."""
    gigabytes = 2 * size_mb / 1000

    def speed(name: str) -> list[float]:
        return [gigabytes / value for value in times_s[name]]

    def named(what: str) -> str:
        return f"{what}_{size_mb}mb"

    copy = speed("copy")
    figures = [support.median(named("copy_gbps"), copy, "GB/s")]
    for name in [*CONFIGS, "gloo"]:
        for variant in (name, f"{name}_sgd"):
            figures.append(support.median(named(f"{variant}_gbps"), speed(variant), "GB/s"))
        figures.append(support.ratio(named(f"{name}_over_copy"), speed(name), copy))
    for name in CONFIGS:
        target = TARGETS.get(name)
        for tail in ("", "_sgd"):
            label = named(f"{name}{tail}_over_gloo{tail}")
            pair = speed(f"{name}{tail}"), speed(f"gloo{tail}")
            figures.append(support.ratio(label, *pair, target))
    return figures


if __name__ == "__main__":
    main()
