"""One region in a process of its own, without Ray: what `dgt.py` starts for each region.

Reads one JSON object per line from its standard input and answers with one. The first line says
who it is; keys come that way and not as arguments, which others could read.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from geo_ray.base.types import Span
from geo_ray.data.manifest import load_manifest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import (
    ModelStart,
    build_averager,
    build_server,
    build_shard,
    initial_parameters,
    use_one_thread,
)
from geo_ray.runs.data import open_readers
from geo_ray.runs.evaluation import EvalSetting
from geo_ray.runtime.bridge import open_bridge
from geo_ray.runtime.exchange.build import PathSetting
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import dial_shards, links_over
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.config import operation_s
from geo_ray.training.worker import Worker
from geo_ray.transport.lan import LanClient, LanServer
from geo_ray.transport.security.tls import TlsBytes
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import EndpointIdentity

WAIT_S = 60.0
HERE = Path(__file__).resolve().parent


class Region:
    """Bridge, parameter server and worker of one run.

    Args:
        hello: who this process is.
        order: the run: experiment, manifest, number, address to listen on, when its clock began.
    """

    def __init__(self, hello: dict[str, Any], order: dict[str, Any]) -> None:
        name, key = hello["region"], base64.b64decode(hello["key"])
        experiment = Experiment.model_validate_json(json.dumps(order["experiment"]))
        self.averager_region, self.name = experiment.averager_region, name
        task = load_task(experiment.task, HERE)
        params_P = initial_parameters(task, experiment.seed)
        num_params = params_P.numel()
        timeout_s = operation_s(experiment.train, num_params)
        (region,) = [r for r in experiment.regions if r.name == name]
        self.event_buffer = EventBuffer(name, order["origin_unix_s"])
        own = build_averager(experiment, num_params, {}) if name == self.averager_region else None
        setting = PathSetting(experiment, num_params, own, self.event_buffer, os.devnull, timeout_s)
        certificate = hello["certificate"]
        self.bridge = open_bridge(
            EndpointIdentity(order["run"], name, 1, key),
            setting,
            order["host"],
            order["port"],
            certificate and TlsBytes(*map(base64.b64decode, certificate)),
        )
        self.endpoint = self.bridge.endpoint
        hello_lan: Meta = {"peer": f"{name}/primary", "role": "primary"}
        self.bridge_lan = LanServer("127.0.0.1", key, self.bridge.handle)
        bridge_client = LanClient(self.bridge_lan.address, key, hello_lan)
        shard = build_shard(experiment, region, 0, ModelStart(params_P))
        self.server = build_server(experiment, region, [shard], num_params)
        self.primary = PrimaryShard(
            self.server,
            HeldShard(shard, name, 0, os.devnull),
            [],
            bridge_client,
            self.event_buffer,
            timeout_s,
        )
        self.lan = LanServer("127.0.0.1", key, self.primary.handle, on_close=self.primary.on_close)
        hello_worker: Meta = {"peer": f"{name}/0", "role": "worker", "worker": 0, "attempt": 1}
        clients = dial_shards([self.lan.address], key, hello_worker, num_params)
        self.clients = [bridge_client, *clients]
        flat_P, grad_P, links = links_over(clients, num_params, timeout_s)
        worker = Worker(task, flat_P, grad_P, region=name, seed=experiment.seed)
        train, heldout = open_readers(experiment, load_manifest(order["manifest"]), name)

        def pace(span: Span) -> float:
            return experiment.push_s(name, 0, span.start, span.count) or 0.0

        self.loop = WorkerLoop(
            worker,
            links,
            train,
            heldout,
            rank=0,
            evals=EvalSetting(experiment.train.eval_batch_size),
            step_s=pace,
        )
        self.address = self.endpoint.advertised

    def connect(self, address: list[Any]) -> dict[str, Any]:
        """Connect to the averager's region."""
        if self.name != self.averager_region:
            place = (str(address[0]), int(address[1]))
            self.bridge.connect(self.averager_region, place)
            self.endpoint.wait_connected([self.averager_region], WAIT_S)
        return {}

    def train(self) -> dict[str, Any]:
        """Train to the end; what happened."""
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self.loop.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]
        events = self.event_buffer.take(1_000_000)
        return {
            "steps": [[e["step"], e["start_s"], e["t_s"]] for e in events if e["kind"] == "step"],
            "stats": [
                [e["step"], e["stats"]["correct"][0], e["rows"]]
                for e in events
                if e["kind"] == "stats"
            ],
            "status": self.bridge.status(),
        }

    def close(self) -> dict[str, Any]:
        """Leave nothing behind."""
        self.bridge.close()
        for client in self.clients:
            client.close()
        self.primary.close()
        self.lan.close()
        self.bridge_lan.close()
        self.endpoint.close(1.0)
        return {}


def main() -> None:
    use_one_thread()
    torch.manual_seed(0)
    hello = json.loads(sys.stdin.readline())
    region: Region | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        answer: dict[str, Any]
        if do == "open":
            region = Region(hello, order)
            answer = {"address": list(region.address)}
        else:
            assert region is not None
            answer = getattr(region, do)(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
