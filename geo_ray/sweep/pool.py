"""Simulated runs side by side, each in a process of its own that is told what to do in JSON.

Not `multiprocessing`: its processes run the user's script once more, which without a guard starts
the whole comparison again, and a notebook has no script to run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from geo_ray.base.errors import GeoRayError, NonFiniteError, RunError, from_code
from geo_ray.base.user_section import context
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.simulator.run import simulate
from geo_ray.sweep.outcome import Outcome, failed_outcome, outcome_of, save_outcome


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """One run to simulate.

    Attributes:
        label: of its variant.
        rate: factor on the learning rate.
        experiment_json: its configuration.
        directory: where it goes; what lies there is removed.
        base_dir: where relative paths of the configuration start.
    """

    label: str
    rate: float
    experiment_json: str
    directory: str
    base_dir: str


def simulate_all(cases: Sequence[SimulatedCase], jobs: int) -> Generator[Outcome, None, None]:
    """Simulate every case; gives the outcomes as they come, and ends all processes when closed.

    Args:
        cases: what to do.
        jobs: how many at once.

    Raises:
        GeoRayError: whatever is wrong with a configuration, the task or the data.
    """
    with _Processes() as processes, ThreadPoolExecutor(min(jobs, len(cases))) as threads:
        try:
            waiting = [threads.submit(processes.run, case) for case in cases]
            for done in as_completed(waiting):
                yield done.result()
        finally:
            processes.kill()  # whoever goes on would keep the threads
            threads.shutdown(cancel_futures=True)


def run_case(case: SimulatedCase) -> Outcome:
    """Simulate one run in this process and keep its outcome in its directory.

    Raises:
        GeoRayError: as for `simulate_all`.
    """
    where = context(Path(case.base_dir))
    experiment = Experiment.model_validate_json(case.experiment_json, context=where)
    directory = Path(case.directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        run = rundir.create(experiment, Path(case.base_dir))
        summary = simulate(experiment, run, lambda _: None)
        outcome = outcome_of(case.label, case.rate, experiment, summary, run.path)
        shutil.rmtree(run.data, ignore_errors=True)
    except NonFiniteError as error:
        outcome = failed_outcome(case.label, case.rate, experiment, str(error))
    save_outcome(outcome, directory)
    return outcome


class _Processes:
    """One process per thread that asks; all end with the block."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._all: list[subprocess.Popen[str]] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all of them, now; later runs are refused."""
        with self._lock:
            self._closed = True
            for process in self._all:
                process.kill()
            for process in self._all:
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(OSError):  # what it never read
                            pipe.close()
            self._all.clear()

    def run(self, case: SimulatedCase) -> Outcome:
        """Simulate one case in the process of this thread.

        Raises:
            GeoRayError: as told by the process, or it died.
        """
        answer = self._ask(json.dumps(asdict(case)))
        if not answer:
            raise RunError(
                f"the process that simulated {case.label} died",
                fix="Out of memory is the usual cause: give fewer --jobs.",
            )
        told = json.loads(answer)
        if "code" in told:
            raise from_code(told["code"], told["message"], told["fix"])
        return Outcome.model_validate_json(told["outcome"])

    def _ask(self, line: str) -> str:
        process = self._process()
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except (OSError, ValueError):  # it died, or was ended from another thread
            return ""

    def _process(self) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self._closed:
                    raise RunError("the comparison has ended", fix="Type the command again.")
                process = self._own.process = subprocess.Popen(
                    [sys.executable, "-m", "geo_ray.sweep.simulate_cases"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # What can be imported here can be imported there: tasks in packages.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                self._all.append(process)
        return process


def answer_to(line: str) -> str:
    """What a process says to one request: an outcome, or an error of the tree."""
    try:
        return json.dumps(
            {"outcome": run_case(SimulatedCase(**json.loads(line))).model_dump_json()}
        )
    except GeoRayError as error:
        return json.dumps({"code": error.code, "message": error.message, "fix": error.fix})
