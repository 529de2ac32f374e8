"""What a checkpoint to an object store costs those who train: 51.2 M parameters with AdamW.

`geo-ray train` as users run it, one region with one worker, `checkpoint.store` at an S3 server
(moto) over loopback; and the same with checkpoints in the run's directory. The server runs at the
lowest priority (Linux's idle class): it stands for a machine of its own. Nothing is emulated.

With ``--pin`` the worker has a core for itself, and server, uploads and store share the others:
compute that leaves a core idle. With ``--step_s`` a step takes at least so long
(``emulate.step_s``), whatever it computes, and one row a step is enough.

  step_delay_most     how much longer a step took beside a checkpoint than the median of steps
                      apart from them, as a share of that; of the step that was held up most
  step_delay_mean     the same of all steps beside checkpoints together
  step_noise_most     the same of the slowest step apart from checkpoints: what of the delays is
                      this machine's own
  checkpoint_s        from the beginning of a checkpoint until it counts; median
  checkpoint_mb_per_s its bytes over that
  resumed_bit_equal   1 if the run that goes on from its last checkpoint but one comes to the digest
                      of the uninterrupted one

A step beside a checkpoint is one in whose time the checkpoint was taken, written or committed. The
first steps, which make the optimizer's state, are left out.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.common import support
from benchmarks.common.command import Run, command, geo_ray
from geo_ray.storage.bucket import Bucket, RequestLimits
from geo_ray.storage.uri import parse_s3, s3_uri

WARM_UP_STEPS: Final = 2
BUCKET: Final = "checkpoints"
START_S: Final = 60.0
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
CONFIG = """
name: store-checkpoints
task: {use: bytelm, options: {size: 50M, max_bytes: 50_000}}
data: {generate: {rows_per_shard: 1024}, batch_size: 4}
regions: [{name: here}]
strategy: {kind: sma}
optimizer: {kind: adamw, lr: 1.0e-4}
train: {eval_every: 0, step_timeout_s: 300}
"""


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--pin", action="store_true", help="a core for the worker alone")
    parser.add_argument("--step_s", type=float, help="least seconds of a step")
    parser.add_argument("--kinds", default="store,directory", help="what to measure")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    machine = support.hardware()
    os.environ.update(CREDENTIALS)
    found: dict[str, list[float]] = {}
    with s3_server() as endpoint:
        uri = s3_uri(BUCKET, "runs", endpoint_url=endpoint, region="us-east-1")
        Bucket(parse_s3(uri), RequestLimits()).ask("make", BUCKET, "create_bucket")
        for kind, store in (("store", uri), ("directory", None)):
            if kind not in kinds:
                continue
            support.say(f"checkpoints in a {kind}")
            with pinned() if options.pin else nullcontext():
                measured = measure(store, options.step_s, quick=options.quick)
            for name, value in measured.items():
                found.setdefault(f"{name}_{kind}", []).append(value)
    figures = [
        support.median("step_delay_most", found["most_store"], "ratio", "<= 0.02"),
        support.median("step_delay_mean", found["mean_store"], "ratio"),
        support.median("step_noise_most", found["noise_store"], "ratio"),
        support.median("checkpoint_s", found["checkpoint_s_store"], "s"),
        support.median("checkpoint_mb_per_s", found["mb_per_s_store"], "MB/s"),
        support.median("resumed_bit_equal", found["equal_store"], "ratio", ">= 1"),
    ]
    if "directory" in kinds:
        figures += [
            support.median("step_delay_most_directory", found["most_directory"], "ratio"),
            support.median("step_delay_mean_directory", found["mean_directory"], "ratio"),
            support.median("step_noise_most_directory", found["noise_directory"], "ratio"),
            support.median("checkpoint_s_directory", found["checkpoint_s_directory"], "s"),
        ]
    support.finish("store_checkpoints", machine, figures, options.out)


def measure(store: str | None, step_s: float | None, *, quick: bool) -> dict[str, float]:
    """The figures of one training, and of one that goes on from a checkpoint of it."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "store.yaml"
        config.write_text(CONFIG, "utf-8")
        sets: dict[str, object] = {
            "train.steps": 16 if quick else 24,
            "data.batch_size": 1 if quick or step_s else 4,
            "checkpoint.every_s": 6 if quick else 45,
            "checkpoint.store": "null" if store is None else f"'{store}'",
        }
        if step_s:
            sets["emulate.step_s"] = step_s
        run = geo_ray("train", config, sets, config.parent / "runs")
        figures = delays(run) | costs(run)
        if store is not None:
            before = run.summary["digest"]
            figures["equal"] = float(resumed_digest(run) == before)
        return figures


def delays(run: Run) -> dict[str, float]:
    """See the module's docstring."""
    saved_s = [(event["start_s"], event["t_s"]) for event in run.events("checkpoint")]
    steps = list(run.events("step"))
    beside, apart = [], []
    for before, step in pairwise(steps):
        if step["step"] <= WARM_UP_STEPS:
            continue
        begin_s, end_s = before["t_s"], step["t_s"]
        is_beside = any(begin_s < until and end_s > since for since, until in saved_s)
        (beside if is_beside else apart).append(end_s - begin_s)
    support.say(f"steps beside: {', '.join(f'{s:.2f}' for s in beside)} s")
    support.say(f"steps apart:  {', '.join(f'{s:.2f}' for s in apart)} s")
    if not beside or not apart:
        raise RuntimeError("all steps, or none, were beside a checkpoint: nothing to compare")
    usual_s = statistics.median(apart)
    return {
        "most": max(beside) / usual_s - 1,
        "mean": statistics.mean(beside) / usual_s - 1,
        "noise": max(apart) / usual_s - 1,
    }


def costs(run: Run) -> dict[str, float]:
    """How long checkpoints took that were written while training went on."""
    taken = list(run.events("checkpoint"))
    beside = taken[:-1] or taken  # the last one is taken when nobody trains any more
    seconds = [event["t_s"] - event["start_s"] for event in beside]
    support.say(f"checkpoints of {beside[0]['bytes'] / 1e6:.0f} MB: {seconds} s")
    return {
        "checkpoint_s": statistics.median(seconds),
        "mb_per_s": beside[0]["bytes"] / 1e6 / statistics.median(seconds),
    }


def resumed_digest(run: Run) -> Any:
    """The digest of the run when it goes on from its last checkpoint but one."""
    ids = [event["id"] for event in run.events("checkpoint")]
    if len(ids) < 2:
        raise RuntimeError("the run took one checkpoint only: nothing to go on from")
    support.say(f"resuming from checkpoint {ids[-2]}")
    command("train", "--resume", str(run.directory), "--from", str(ids[-2]), "--plain")
    return run.summary["digest"]


@contextmanager
def pinned() -> Iterator[None]:
    """Gives the first core to workers alone as they start, and the others to all else."""
    first, *others = sorted(os.sched_getaffinity(0))
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.2):
            for pid in descendants(os.getpid()):
                cores = {first} if b"WorkerActor" in _command_line(pid) else set(others)
                for thread in _listed(f"/proc/{pid}/task"):
                    with suppress(OSError):
                        os.sched_setaffinity(int(thread), cores)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def descendants(pid: int) -> list[int]:
    """Processes that ``pid``, or one of them, has started and that are there."""
    found: list[int] = []
    for thread in _listed(f"/proc/{pid}/task"):
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def _listed(directory: str) -> list[str]:
    try:
        return [path.name for path in Path(directory).iterdir()]
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def s3_server() -> Iterator[str]:
    """A real S3 server in a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _await(port)
        yield endpoint
    finally:
        process.terminate()
        process.wait(START_S)


def _await(port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), START_S).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
