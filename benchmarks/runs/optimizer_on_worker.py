"""What it saves that a worker keeps parameters and optimizer, for a model of about 10 M parameters.

One region, whose parameter server and worker are two processes of one machine, without Ray. AdamW.
They share memory; with the suffix ``apart``, as on two machines, all bytes go through a socket.
With `train.optimizer_on: worker`, the worker sends its state every 16 steps, as for an exchange.
Runs of all cases alternate. The lower quartile of steps counts, since others use the machine, too.

  step_s_*      seconds from one step to the next
  state_s_*     the same where the worker sends its state
  idle_s_*      seconds of a step in which the worker computes no gradient; on a worker, the
                optimizer's step counts as computing
  cpu_s_*       CPU seconds of both processes per step, after the first four
  memory_*      peak of both processes together over the size of the model
  startup_s_*   from the start of both processes until the first step begins
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.common import support
from benchmarks.common.memory import memory_peak
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import build_server, build_shard, build_worker, model_start, use_one_thread
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.runs.evaluation import EvalSetting
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import dial_shards, links_over
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.transport.lan import LanServer

KEY: Final = bytes(32)
EVERY: Final = 16
SIDES: Final = ("server", "worker", "server_apart", "worker_apart")
FIRST: Final = 4  # steps that are left out: they make the optimizer's state
WAIT_S: Final = 600.0
CONFIG: Final[dict[str, Any]] = {
    "name": "optimizer-on-worker",
    "task": {"use": "bytelm", "options": {"size": "10M", "context": 32, "max_bytes": 50_000}},
    "data": {"generate": {"rows_per_shard": 4096}, "batch_size": 2},
    "regions": [{"name": "here"}],
    "strategy": {"kind": "diloco"},
    "optimizer": {"kind": "adamw", "lr": 1e-4},
    "cluster": {"kind": "existing"},
}


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    found: dict[str, list[float]] = {}
    for number in range(2 if options.quick else 7):
        for side in SIDES:
            support.say(f"run {number + 1}, optimizer on the {side}")
            for name, value in measure(side, EVERY * (3 if options.quick else 6)).items():
                found.setdefault(f"{name}_{side}", []).append(value)
    figures = [
        support.median(name, values, "ratio" if name.startswith("memory") else "s")
        for name, values in sorted(found.items())
    ]
    support.finish("optimizer_on_worker", machine, figures, options.out)


def experiment_of(side: str, steps: int) -> Experiment:
    """The region's run."""
    on, _, apart = side.partition("_")
    train = {"steps": steps, "eval_every": 0, "optimizer_on": on, "state_every": EVERY}
    lan = {"shared_memory": not apart}
    return Experiment.model_validate_json(json.dumps(CONFIG | {"train": train, "lan": lan}))


def measure(side: str, steps: int) -> dict[str, float]:
    """The figures of one training."""
    experiment, context = experiment_of(side, steps), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        task = load_task(experiment.task, Path(directory))
        prepare_manifest(experiment, task, Path(directory), Path(directory) / "data")
        here, there = context.Pipe()
        began_s = time.time()
        with memory_peak() as peak:
            server = context.Process(target=serve, args=(experiment, directory, there))
            server.start()
            address = here.recv()
            worker = context.Process(target=work, args=(experiment, directory, address, there))
            worker.start()
            worker.join()
            here.send("end")
            served = {}
            while not served.keys() >= {"model", "cpu_s"}:
                served |= here.recv()
            server.join()
    ends_s, waits_s = served["ends_s"], served["waits_s"]
    lengths = [(n, b - a) for n, (a, b) in enumerate(pairwise(ends_s), 2) if n > FIRST]
    quiet = [seconds for n, seconds in lengths if n % EVERY]
    return {
        "step_s": quartile(quiet),
        "state_s": quartile([seconds for n, seconds in lengths if n % EVERY == 0]),
        "idle_s": quartile(
            [wait_s for n, wait_s in enumerate(waits_s, 1) if n > FIRST and (n - 1) % EVERY]
        ),
        "cpu_s": (served["cpu_s"] + served["worker_cpu_s"]) / (steps - FIRST),
        "memory": peak.bytes / served["model"],
        "startup_s": served["first_s"] - began_s,
    }


def quartile(values: list[float]) -> float:
    """The lower one."""
    return statistics.quantiles(values, n=4)[0]


def serve(experiment: Experiment, directory: str, pipe: Connection) -> None:
    """The process of the parameter server."""
    use_one_thread()
    (region,) = experiment.regions
    start = model_start(load_task(experiment.task, Path(directory)), experiment.seed)
    num_params = start.params_P.numel()
    held = HeldShard(
        build_shard(experiment, region, 0, start, given=True),
        region.name,
        0,
        CheckpointPlaces(f"{directory}/checkpoints"),
    )
    start = start.without_parameters()
    server = build_server(experiment, region, [held.shard], num_params, start=start)
    events = Times(region.name, time.time())
    primary = PrimaryShard(server, held, [], None, events, WAIT_S)
    lan = LanServer(
        "127.0.0.1", KEY, primary.handle, on_close=primary.on_close, config=experiment.lan
    )
    pipe.send(lan.address)
    pipe.recv()
    steps = [event for event in events.take(100_000) if event["kind"] == "step"]
    pipe.send(
        {
            "ends_s": [event["start_s"] + event["compute_s"] for event in steps],
            "waits_s": [event["wait_s"] for event in steps],
            "first_s": events.origin_s + steps[0]["start_s"],
            "cpu_s": time.process_time() - events.cpu_s,
            "model": 4 * num_params,
        }
    )
    primary.close()
    lan.close()


class Times(EventBuffer):
    """Events, with the CPU seconds of the process after the first steps."""

    def __init__(self, region: str, origin_s: float) -> None:
        super().__init__(region, origin_s)
        self.origin_s, self.cpu_s = origin_s, 0.0

    def add(self, kind: str, **about: Any) -> None:
        """See `EventBuffer.add`."""
        if kind == "step" and about["step"] == FIRST:
            self.cpu_s = time.process_time()
        super().add(kind, **about)


def work(
    experiment: Experiment, directory: str, address: tuple[str, int], pipe: Connection
) -> None:
    """The process of the worker."""
    use_one_thread()
    task = load_task(experiment.task, Path(directory))
    manifest, _ = prepare_manifest(experiment, task, Path(directory), Path(directory) / "data")
    num_params = model_start(task, experiment.seed).params_P.numel()
    hello = {"peer": "here/0", "role": "worker", "worker": 0, "attempt": 1}
    clients = dial_shards([address], KEY, hello, num_params, config=experiment.lan)
    params_P, grad_P, links = links_over(clients, num_params, WAIT_S)
    worker = build_worker(experiment, "here", task, params_P, grad_P)
    train, heldout = open_readers(experiment, manifest, "here")
    marks: list[float] = []

    def mark(_: object) -> float:
        marks.append(time.process_time())
        return 0.0

    loop = WorkerLoop(worker, links, train, heldout, rank=0, evals=EvalSetting(2), step_s=mark)
    loop.run()
    pipe.send({"worker_cpu_s": marks[-1] - marks[FIRST - 1]})
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
