"""Updates that share the way to the averager: all at once, in turns, summed; and a lost averager.

  batch      n equal updates that are ready at the same moment, on a bottleneck that all share
             (virtual time: the runtime's scheduler, fluid flows, max-min fair sharing)
  steady     regions that compute, send and wait for their answer, for a minute of virtual time
  sockets    real bridges over real sockets; all of them reach the averager through one relay that
             passes a fixed rate in all
  takeover   real bridges; the averager's is closed in mid-run: the longest pause of the others
  standby    what keeping a standby costs an exchange, on links that the transport shapes

All at once is what happens without `transfers:`. Ratios are of mean completion times, from an
update being ready until the averager has it; above 1 is faster than all at once.
"""

from __future__ import annotations

import logging
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import support
from benchmarks.network_models.bottleneck import Bottleneck, Site
from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.bridge import Bridge, open_bridge
from geo_ray.runtime.exchange.build import PathSetting, dials
from geo_ray.runtime.exchange.direct import DirectPath
from geo_ray.strategies.state import AveragerState
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import LogOutcome, Op
from geo_ray.training.messages import UpdateMessage
from geo_ray.training.wire_format import payload_bytes, update_meta
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.uploads import TransfersConfig
from geo_ray.transport.wire.message import EndpointIdentity

HUB, KEY, LIMIT_MBPS = "hub", bytes(32), 100.0
WAYS: dict[str, dict[str, Any] | None] = {
    "at_once": None,
    "fifo": {"order": "fifo"},
    "ordered": {},
    "summed": {"aggregate": True},
}


def way(name: str, averager_mbps: float = LIMIT_MBPS) -> dict[str, Any] | None:
    """The ``transfers`` section of one of `WAYS`."""
    options = WAYS[name]
    return None if options is None else {"averager_mbps": averager_mbps, "small_bytes": 0} | options


# ---------------------------------------------------------------------- virtual time


def simulated(name: str, sites: dict[str, Site], horizon_s: float, seed: int) -> Bottleneck:
    """A line of senders on a bottleneck of 100 Mbit/s, 20 ms away."""
    options = way(name)
    config = None if options is None else TransfersConfig(**options)
    line = Bottleneck(
        sites, LIMIT_MBPS, config, 0.02, measured=True, seed=seed, horizon_s=horizon_s
    )
    line.run()
    return line


def completion_s(line: Bottleneck) -> float:
    """Mean time from ready to taken in."""
    return statistics.mean(c.taken_s - c.ready_s for c in line.committed)


def batches(quick: bool) -> list[support.Figure]:
    """So many equal updates of 4 MB at the same moment."""
    figures = []
    for number in (8,) if quick else (4, 8, 16, 32):
        sites = {f"r{i}": Site(1e-9, 4_000_000, 1000.0) for i in range(number)}
        mean_s = {name: completion_s(simulated(name, sites, 1e-6, 0)) for name in WAYS}
        for name in ("fifo", "ordered", "summed"):
            label = f"batch_{number}_at_once_over_{name}"
            figures.append(support.ratio(label, [mean_s["at_once"]], [mean_s[name]]))
    return figures


def steady(quick: bool) -> list[support.Figure]:
    """12 regions, 4 MB, 1 s of computing, paths of 50 to 1000 Mbit/s: the bottleneck is busy."""
    figures = []
    lines: dict[str, list[Bottleneck]] = {name: [] for name in WAYS}
    for seed in range(1 if quick else 5):
        rates = [50.0, 100.0, 200.0, 1000.0]
        sites = {f"r{i}": Site(1.0, 4_000_000, rates[i % 4]) for i in range(12)}
        for name in WAYS:
            lines[name].append(simulated(name, sites, 60.0, seed))
    mean_s = {name: [completion_s(line) for line in found] for name, found in lines.items()}
    for name in ("fifo", "ordered", "summed"):
        label = f"steady_at_once_over_{name}"
        figures.append(support.ratio(label, mean_s["at_once"], mean_s[name]))
    for name in WAYS:
        per_s = [len(line.committed) / 60.0 for line in lines[name]]
        figures.append(support.median(f"steady_commits_{name}", per_s, "1/s"))
        stale = [statistics.mean(c.staleness for c in line.committed) for line in lines[name]]
        figures.append(support.median(f"steady_staleness_{name}", stale, "commits"))
    return figures


# ---------------------------------------------------------------------- real sockets


class Relay:
    """Passes connections on to one address; what goes there shares a fixed rate, in turns.

    Args:
        target: where to.
        mbps: towards the target, over all connections; the other way is free.
    """

    def __init__(self, target: tuple[str, int], mbps: float) -> None:
        self._target, self._mbps = target, mbps
        self._free_s, self._lock = 0.0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, shaped: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if shaped:
                    with self._lock:
                        self._free_s = max(self._free_s, time.monotonic())
                        self._free_s += len(data) * 8e-6 / self._mbps
                        due_s = self._free_s
                    time.sleep(max(0.0, due_s - time.monotonic()))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class Bridges:
    """The bridges of a run without anything behind them; use as a context manager.

    Args:
        names: regions; the first hosts the averager.
        num_params: P.
        relay_mbps: what the averager's region receives in all; None connects directly.
        sections: of the configuration.
    """

    def __init__(
        self, names: list[str], num_params: int, relay_mbps: float | None = None, **sections: Any
    ) -> None:
        tree: dict[str, Any] = {
            "name": "transfers",
            "task": {"use": "digits"},
            "data": {"generate": {}},
            "regions": [{"name": name} for name in names],
            "strategy": {"kind": "asgd_ga", "combine": "sum"},
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "train": {"steps": 1, "step_timeout_s": 120.0},
        }
        experiment = Experiment.model_validate(tree | sections, strict=False)
        self.num_params, self.stack = num_params, ExitStack()
        self.taken_s: dict[tuple[str, int], float] = {}
        self.bridges: dict[str, Bridge] = {}
        self.endpoints: dict[str, Endpoint] = {}
        parts = self.stack.enter_context(TemporaryDirectory())
        for name in names:

            def make() -> Averager:
                members = AveragerState(tuple(sorted(names)))
                return Averager(experiment.strategy, num_params, members)

            averager = make() if name in (names[0], experiment.first_standby) else None
            events = EventBuffer(name, time.time())
            setting = PathSetting(experiment, num_params, averager, events, parts, 120.0, make=make)
            bridge = open_bridge(EndpointIdentity("transfers", name, 1, KEY), setting)
            self.bridges[name], self.endpoints[name] = bridge, bridge.endpoint
        self._note(self.bridges[names[0]])
        address = self.endpoints[names[0]].advertised
        if relay_mbps is not None:
            relay = Relay(address, relay_mbps)
            self.stack.callback(relay.close)
            address = relay.address
        for name in names[1:]:
            self.endpoints[name].connect(names[0], address)
        for name, peer in dials(experiment):
            self.endpoints[name].connect(peer, self.endpoints[peer].advertised)
        for name in names[1:]:
            self.endpoints[name].wait_connected([names[0]], 30.0)

    def _note(self, bridge: Bridge) -> None:
        """Write down when the averager there took what in."""
        local = bridge.path._local if isinstance(bridge.path, DirectPath) else None
        if local is None:
            return  # it has a standby; nobody asks then
        execute = local.execute

        def noting(op: Op) -> LogOutcome:
            outcome = execute(op)
            now_s = time.monotonic()
            self.taken_s |= {(reply.to, reply.seq): now_s for reply in outcome.replies}
            return outcome

        local.execute = noting  # type: ignore[method-assign]

    def exchange(self, name: str, seq: int) -> float:
        """One update of a region, to its answer; when it was ready."""
        update = UpdateMessage(name, 1, seq, 0, 1, torch.ones(self.num_params))
        meta = {"op": "update", **update_meta(update)}
        ready_s = time.monotonic()
        self.bridges[name].handle(None, meta, payload_bytes(update))  # type: ignore[arg-type]
        return ready_s

    def pool(self, names: list[str], seq: int) -> list[float]:
        """One update of each region, all at the same moment; how long each took."""
        ready_s: dict[str, float] = {}
        start = threading.Barrier(len(names))

        def one(name: str) -> None:
            start.wait()
            ready_s[name] = self.exchange(name, seq)

        threads = [threading.Thread(target=one, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [self.taken_s[name, seq] - ready_s[name] for name in names]

    def __enter__(self) -> Bridges:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.bridges:
            self.bridges[name].close()
            self.endpoints[name].close(0.0)
        self.stack.close()


def sockets(quick: bool) -> list[support.Figure]:
    """8 regions, 2 MB each at the same moment, through a relay of 100 Mbit/s."""
    names = [HUB, *[f"r{i}" for i in range(8)]]
    rounds = 2 if quick else 12
    mean_s: dict[str, list[float]] = {}
    for name in WAYS:
        with Bridges(names, 500_000, LIMIT_MBPS, transfers=way(name)) as bridges:
            for seq in range(1, 3):  # rates are learned
                bridges.pool(names[1:], seq)
            found = [bridges.pool(names[1:], seq) for seq in range(3, 3 + rounds)]
        mean_s[name] = [statistics.mean(times_s) for times_s in found]
        support.say(f"sockets, {name}: {statistics.median(mean_s[name]):.3f} s")
    figures = [
        support.ratio(f"sockets_at_once_over_{name}", mean_s["at_once"], mean_s[name])
        for name in ("fifo", "ordered", "summed")
    ]
    return [support.median("sockets_at_once", mean_s["at_once"], "s"), *figures]


# ---------------------------------------------------------------------- a standby


def pause_s(failover_s: float, *, seen: bool) -> float:
    """The longest pause between answers of two regions around the loss of the averager's bridge."""
    names = [HUB, "standby", "third"]
    averager = {"standby": "standby", "failover_s": failover_s, "rejoin_s": 60.0}
    pauses: dict[str, float] = {}
    enough, stop = threading.Semaphore(0), threading.Event()

    def go_on(bridges: Bridges, name: str) -> None:
        seq, last_s, longest_s = 0, time.monotonic(), 0.0
        while not stop.is_set():
            seq += 1
            bridges.exchange(name, seq)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            enough.release()
        pauses[name] = longest_s

    with Bridges(names, 25_000, averager=averager) as bridges:
        threads = [threading.Thread(target=go_on, args=(bridges, name)) for name in names[1:]]
        for thread in threads:
            thread.start()
        for _ in range(40):
            enough.acquire()
        closing = threading.Thread(target=bridges.endpoints[HUB].close, args=(0.0,))
        closing.start()  # closing takes its time, dying does not
        if seen:
            bridges.bridges["standby"].path.report_dead(HUB)
        for _ in range(40):
            enough.acquire()
        stop.set()
        for thread in [*threads, closing]:
            thread.join()
    return max(pauses.values())


def takeovers(quick: bool) -> list[support.Figure]:
    """Time lost at a takeover, with `averager.failover_s` of 1 s and with a witness."""
    runs = 2 if quick else 5
    waited = [pause_s(1.0, seen=False) for _ in range(runs)]
    told = [pause_s(600.0, seen=True) for _ in range(runs)]
    return [
        support.median("takeover_pause_after_1s", waited, "s"),
        support.median("takeover_pause_with_witness", told, "s"),
    ]


def standby_costs(quick: bool) -> list[support.Figure]:
    """An exchange of 0.4 MB on links of 100 Mbit/s and 20 ms, with and without a standby."""
    names, rounds = [HUB, "standby", "third"], 5 if quick else 20
    emulate = {"link": {"rate_mbps": 100.0, "delay_s": 0.02}}
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "bound_0": {"standby": "standby"},
        "bound_large": {"standby": "standby", "max_divergence": 1e9},
    }
    took_s: dict[str, list[float]] = {}
    for kind, averager in kinds.items():
        with Bridges(names, 100_000, averager=averager, emulate=emulate) as bridges:
            took_s[kind] = []
            for seq in range(1, rounds + 3):
                ready_s = bridges.exchange("third", seq)
                took_s[kind].append(time.monotonic() - ready_s)
    plain = took_s["none"][2:]
    return [
        support.median("standby_none_exchange", plain, "s"),
        support.ratio("standby_bound_0_over_none", took_s["bound_0"][2:], plain),
        support.ratio("standby_bound_large_over_none", took_s["bound_large"][2:], plain),
    ]


def main() -> None:
    """Measure and write the result."""
    arguments = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # regions are lost on purpose
    parts: list[Callable[[bool], list[support.Figure]]] = [
        batches,
        steady,
        sockets,
        takeovers,
        standby_costs,
    ]
    figures = []
    for part in parts:
        support.say((part.__doc__ or "").splitlines()[0])
        figures += part(arguments.quick)
    support.finish("transfers", machine, figures, arguments.out)


if __name__ == "__main__":
    main()
