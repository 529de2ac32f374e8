"""One step of a worker with a parameter server of one shard, and with one of four, for 100 MB.

Every shard is a process of its own; the worker is another. A step is what a worker waits for: its
gradient goes to all shards, each applies its slice (SGD), the parameters come back from all. The
product's own classes: `ShardLinks` in the worker, `PrimaryShard` and `ShardServer` behind a
`LanServer` in the others.

  shared   through memory that both ends share, as on one node
  inline   through sockets, as between nodes, with authenticated payloads

All variants take turns within one run. Beside them, for inline payloads, four shards that are asked
one after the other, which is what the shards of earlier releases did. What four processes can gain
depends on the cores that there are for them: five processes want to work at once, and the worker
has four threads then.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import support
from geo_ray.base.threads import ThreadPoolMap, in_turn
from geo_ray.base.types import StepReport
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import (
    RemoteShard,
    ShardLinks,
    ShardServer,
    dial_shards,
    links_over,
)
from geo_ray.strategies.asgd import Asgd
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.optimizers import Sgd
from geo_ray.training.parameters import split_sizes
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard
from geo_ray.training.wire_format import read_answer, report_meta
from geo_ray.transport.lan import LanClient, LanServer

SIZE_MB, SHARDS = 100, 4
NEVER = 10**9
TIMEOUT_S = 60.0
TARGET = ">= 1.5"


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    rounds = 7 if options.quick else 25
    times_s = measure(SIZE_MB * 250_000, rounds)
    support.finish("shards", machine, figures_of(times_s), options.out)


def measure(num_params: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step by variant; entry i of every list is of round i."""
    key = secrets.token_bytes(32)
    regions = [Region(count, key, num_params) for count in (1, SHARDS)]
    try:
        for region in regions:
            region.connect()
        steps: dict[str, Callable[[], None]] = {}
        for region in regions:
            for name in ("shared", "inline"):
                worker = Worker(region, key, num_params, shared=name == "shared")
                steps[f"{name}_{region.count}"] = worker.step
                if region.count > 1 and name == "inline":
                    steps["inline_in_turn"] = worker.step_in_turn
        found: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(-2, rounds):
            for name, step in steps.items():
                began_s = time.perf_counter()
                step()
                if number >= 0:
                    found[name].append(time.perf_counter() - began_s)
        return found
    finally:
        for region in regions:
            region.close()


class Region:
    """The processes of a parameter server with so many shards, of workers 0 and 1."""

    def __init__(self, count: int, key: bytes, num_params: int) -> None:
        context = multiprocessing.get_context("fork")  # there are no threads yet
        self.count = count
        self._ends: list[tuple[Connection, BaseProcess]] = []
        for index in range(count):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, num_params, count, index, key))
            process.start()
            self._ends.append((here, process))

    def connect(self) -> None:
        """Wait for the processes; the primary shard is told where the others are."""
        (primary, _), *rest = self._ends
        others = [here.recv() for here, _ in rest]
        primary.send(others)
        self.addresses = [primary.recv(), *others]

    def close(self) -> None:
        """End the processes, the primary shard's first."""
        for here, process in self._ends:
            here.send(None)
            process.join(timeout=10.0)
            process.kill()


def serve(parent: Connection, num_params: int, count: int, index: int, key: bytes) -> None:
    """One shard's process."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    piece = split_sizes(num_params, count)[index]
    shard = Shard.from_slice(torch.zeros(num_params), piece, Sgd(lr=0.1), Asgd(), alone=True)
    held = HeldShard(shard, "here", index, str(Path.cwd()))
    if index:
        lan = LanServer("127.0.0.1", key, ShardServer(held).handle)
        parent.send(lan.address)
        parent.recv()
        lan.close()
        return
    pool = ThreadPoolMap(count, "shards")
    hello: dict[str, Any] = {"peer": "here/primary", "role": "primary"}
    clients = [LanClient(address, key, hello) for address in parent.recv()]
    ports = [shard, *[RemoteShard(client, TIMEOUT_S) for client in clients]]
    plan = ServerPlan("here", num_workers=2, batch_size=1, steps=NEVER, mode="async")
    server = Server.over(ports, num_params, plan, WirePlan(), pool)
    primary = PrimaryShard(server, held, (), None, EventBuffer("here", time.time()), TIMEOUT_S)
    lan = LanServer("127.0.0.1", key, primary.handle, on_close=primary.on_close)
    parent.send(lan.address)
    parent.recv()
    lan.close()
    primary.close()
    for client in clients:
        client.close()
    pool.close()


class Worker:
    """The product's worker without its computation; it pushes by mode ``async``, alone."""

    def __init__(self, region: Region, key: bytes, num_params: int, *, shared: bool) -> None:
        rank = 0 if shared else 1
        hello = {"peer": f"here/{rank}", "role": "worker", "worker": rank, "attempt": 1}
        clients = dial_shards(region.addresses, key, hello, num_params, shared=shared)
        assert all((client.shared is not None) == shared for client in clients)
        _, grad_P, links = links_over(clients, num_params, TIMEOUT_S)
        grad_P.fill_(1e-6)
        self._pool = ThreadPoolMap(len(links), "links")
        self._links = ShardLinks(links, rank, self._pool)
        self._one_by_one = ShardLinks(links, rank, in_turn)
        self._rank = rank
        self._answer = read_answer(rank, self._links.ask({"op": "join"}, push=False))

    def step(self) -> None:
        """Push and pull once."""
        self._step(self._links)

    def step_in_turn(self) -> None:
        """The same, one shard after the other."""
        self._step(self._one_by_one)

    def _step(self, links: ShardLinks) -> None:
        span = self._answer.span
        assert span is not None
        report = StepReport(span, 0.0, 0.0, None)
        self._answer = read_answer(self._rank, links.ask(report_meta(report), push=True))


def figures_of(times_s: dict[str, list[float]]) -> list[support.Figure]:
    """GB/s counts both directions; ratios are of speeds, so above 1 is faster."""
    gigabytes = 2 * SIZE_MB / 1000
    speed = {name: [gigabytes / value for value in values] for name, values in times_s.items()}
    figures = [
        support.median(f"{name}_{SIZE_MB}mb_gbps", values, "GB/s") for name, values in speed.items()
    ]
    many = [f"shared_{SHARDS}", f"inline_{SHARDS}"]
    for name in many:
        one = name.replace(str(SHARDS), "1")
        label = f"{name}_over_1_{SIZE_MB}mb"
        figures.append(support.ratio(label, speed[name], speed[one], TARGET))
    pair = speed[f"inline_{SHARDS}"], speed["inline_in_turn"]
    figures.append(support.ratio(f"inline_{SHARDS}_over_in_turn_{SIZE_MB}mb", *pair))
    return figures


if __name__ == "__main__":
    main()
