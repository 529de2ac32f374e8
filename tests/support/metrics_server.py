"""Serves the metrics of a run's events as its driver does: `metrics_server.py ADDRESS RUN`.

A process of its own, since Ray sets up its metrics once in a process. Prints where the nodes of
the cluster serve theirs, then waits for its input to end.
"""

from __future__ import annotations

import sys

from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import connect
from geo_ray.runtime.run_context import RayMetrics
from tests.support.observe_support import events, small_run, started, wan

FAULTS = [
    ("worker_lost", 5.0, {"region": "east", "worker": 0, "cause": "x"}),
    ("worker_replaced", 6.0, {"region": "east", "worker": 0, "attempt": 1}),
    ("step_refused", 7.0, {"region": "east", "step": 3, "cause": "nan"}),
    ("checkpoint", 8.0, {"id": "1", "step": 4, "bytes": 99}),
]


def main(address: str, run: str) -> None:
    """Feed them, and stay."""
    config = ExistingClusterConfig(address=address)
    with connect(config, (), namespace=f"metrics-{run}"):
        metrics = RayMetrics()
        rows = [started(run=run), *small_run()[1:], *FAULTS, wan("east", "west", 9.0, reply=9999)]
        for event in events(rows):
            metrics.feed(event)
        nodes = [
            f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            for node in ray_internals.nodes()
            if node["Alive"]
        ]
        print(" ".join(nodes), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
