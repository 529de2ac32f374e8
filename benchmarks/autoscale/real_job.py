"""A job on a real Ray cluster that computes nothing: who holds machines, and goes by the clock.

An actor takes all of each node of the job's regions, as soon as it is there, and leaves when the
node is drained. The job's regions wait for each other: it goes as fast as the region that has least
of what it needs, as the job of the simulated days does
(`geo_ray/cloud/backtest/simulated_cloud.py`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from geo_ray.cloud.autoscaler.target import REGION_LABEL, TYPE_LABEL, ClusterTarget
from geo_ray.ray_cluster import ray_internals

_LOOK_S = 0.2


def held(node: dict[str, Any]) -> Any:
    """Take all of a node."""

    class Holder:
        def is_there(self) -> bool:
            return True

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options: dict[str, Any] = {
        "num_cpus": node["Resources"].get("CPU", 1.0),
        "scheduling_strategy": strategy,
    }
    return ray.remote(Holder).options(**options).remote()


@dataclass
class PacedJob:
    """See the module; `with` lets it work.

    Attributes:
        target: what it needs.
        work_s: that it takes with that.
        most_speed: more machines make it this many times as fast at most.
        is_begun: whether work counts.
        done_s: work that is done.
        finished_unix_s: when all was; None: it is not.
    """

    target: ClusterTarget
    work_s: float
    most_speed: float = 2.0
    is_begun: bool = False
    done_s: float = 0.0
    finished_unix_s: float | None = None
    _holders: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _ready: dict[str, tuple[str, str]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PacedJob:
        self._thread = threading.Thread(target=self._work, name="job")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def speed(self) -> float:
        """Return how fast it goes now, beside the target's machines."""
        shares = []
        ready = list(self._ready.values())
        for region in self.target.regions:
            speeds = {kind.type: kind.rows_per_s for kind in region.kinds}
            mine = [type_ for name, type_ in ready if name == region.name]
            shares.append(sum(speeds[type_] for type_ in mine) / region.rows_per_s)
        return min(self.most_speed, *shares)

    def _work(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(_LOOK_S):
            now_s = time.monotonic()
            if self.is_begun and self.finished_unix_s is None:
                self.done_s += (now_s - before_s) * self.speed()
                if self.done_s >= self.work_s:
                    self.finished_unix_s = time.time()
            before_s = now_s
            self._look()
        for node_id in list(self._holders):
            self._leave(node_id)

    def _look(self) -> None:
        leaving = set(ray_internals.draining_nodes())
        names = {region.name for region in self.target.regions}
        nodes = {node["NodeID"]: node for node in ray_internals.nodes() if node["Alive"]}
        for node_id in list(self._holders):
            if node_id in leaving or node_id not in nodes or self.finished_unix_s is not None:
                self._leave(node_id)
        if self.finished_unix_s is not None:
            return
        for node_id, node in nodes.items():
            region = node["Labels"].get(REGION_LABEL)
            if region in names and node_id not in leaving and node_id not in self._holders:
                actor = held(node)
                self._holders[node_id] = (actor, actor.is_there.remote())
        for node_id, (_, answer) in self._holders.items():
            if node_id not in self._ready and ray.wait([answer], timeout=0)[0]:
                try:
                    ray.get(answer)
                except RayError:  # its node has just ended
                    continue
                labels = nodes[node_id]["Labels"]
                self._ready[node_id] = (labels[REGION_LABEL], labels[TYPE_LABEL])

    def _leave(self, node_id: str) -> None:
        self._ready.pop(node_id, None)
        actor, _ = self._holders.pop(node_id)
        ray.kill(actor)
