"""Runs the trials of a sweep in a pool of processes or one at a time, and records them in a file.

`run_trials` continues an interrupted sweep: it gives recorded trials from the `TrialsFile` and
runs the others. Searches record their trials in the same file; their back end is Ray Tune
(`ray_tune`).

``python -m geo_ray.sweep.runner`` is a process of the pool: it reads trials as JSON lines and
writes outcomes. `multiprocessing` would run the user's script again in each process, which would
start the sweep again in a script without a guard; a notebook has no script to run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, JsonValue, ValidationError

from geo_ray.base.canonical import canonical_json
from geo_ray.base.errors import GeoRayError, RunDirectoryError, RunError, from_code
from geo_ray.base.files import unwritable
from geo_ray.base.model import StrictModel
from geo_ray.base.threads import LOOK_S
from geo_ray.sweep.trial import Outcome, RealTrial, TrialSpec, validated

TRIALS_FILE: Final = "trials.jsonl"
_log = logging.getLogger(__name__)


class TrialRecord(StrictModel):
    """A finished trial."""

    values: dict[str, JsonValue] = Field(description="what distinguishes it from other trials")
    reports: tuple[dict[str, JsonValue], ...] = Field(
        min_length=1, description="its reports in order; the last one is its result"
    )

    @property
    def key(self) -> str:
        """The key of the trial in `TrialsFile.read`."""
        return key_of(self.values)


def key_of(values: Mapping[str, Any]) -> str:
    """Return a text that is equal for trials with equal values."""
    return canonical_json(plain(values)).decode()


def plain(value: Any) -> Any:
    """Convert NumPy numbers, which Ray Tune samples, to Python numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True, slots=True)
class TrialsFile:
    """File of finished trials: a JSON line for each.

    Attributes:
        path: the file; may be missing.
    """

    path: Path

    def add(self, values: Mapping[str, Any], reports: Collection[Mapping[str, Any]]) -> None:
        """Append a trial; an incomplete last line of an earlier process affects only its own trial.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        line = json.dumps({"values": plain(values), "reports": list(reports)}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                is_torn = file.read() not in (b"", b"\n")
                file.write((f"\n{line}" if is_torn else line).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error

    def read(self, names: Collection[str]) -> dict[str, TrialRecord]:
        """Give the recorded trials by key; damaged lines are skipped.

        Args:
            names: names of a trial's values. Trials with other names are skipped.

        Raises:
            RunDirectoryError: the file cannot be read.
        """
        try:
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be read: {error.strerror}",
                fix="Check the permissions of the file.",
            ) from error
        found: dict[str, TrialRecord] = {}
        for number, line in enumerate(lines, 1):
            try:
                trial = TrialRecord.model_validate_json(line)
            except ValidationError:
                _log.warning(
                    "line %d of %s is not a trial; that trial is repeated", number, self.path
                )
                continue
            if set(trial.values) == set(names):
                found[trial.key] = trial
        return found


def run_trials(
    trials: Sequence[TrialSpec], file: TrialsFile, jobs: int | None
) -> Iterator[Outcome]:
    """Give the outcomes of all trials: recorded ones first, then the others as they end.

    Args:
        trials: trials to run. A recorded trial counts if its configuration is the same.
        file: receives each finished trial.
        jobs: parallel simulated trials; None: they train on real actors, one after another.

    Raises:
        RunDirectoryError: the file cannot be read or written.
        GeoRayError: a configuration, the task or the data are invalid.
    """
    recorded = file.read(trials[0].values.keys()) if trials else {}
    todo: dict[tuple[str, float, int], TrialSpec] = {}
    for trial in trials:
        known = recorded.get(key_of(trial.values))
        outcome = None if known is None else _outcome_in(known)
        if outcome is None:
            todo[trial.label, trial.rate, trial.experiment.seed] = trial
        else:
            yield outcome
    left = list(todo.values())
    running = (each.measure(RealTrial()) for each in left) if jobs is None else pooled(left, jobs)
    with closing(running) as outcomes:
        for outcome in outcomes:
            trial = todo[outcome.label, outcome.rate, outcome.seed]
            file.add(trial.values, [json.loads(outcome.model_dump_json())])
            yield outcome


def pooled(trials: Sequence[TrialSpec], jobs: int) -> Generator[Outcome, None, None]:
    """Simulate trials in a pool of processes; closing this ends all processes.

    Args:
        trials: trials to run.
        jobs: parallel trials.

    Raises:
        GeoRayError: as for `run_trials`.
    """
    if not trials:
        return
    count = min(jobs, len(trials))
    with _Processes() as processes, ThreadPoolExecutor(count) as threads:
        try:
            waiting = {threads.submit(processes.run, trial) for trial in trials}
            while waiting:
                done, waiting = wait(waiting, LOOK_S, FIRST_COMPLETED)
                for each in sorted(done, key=lambda trial: trial.exception() is not None):
                    yield each.result()  # an error comes after all results that are there
        finally:
            processes.kill()  # a process that continued would keep its thread
            threads.shutdown(cancel_futures=True)


def _outcome_in(record: TrialRecord) -> Outcome | None:
    try:
        return Outcome.model_validate_json(json.dumps(record.reports[-1]))
    except ValidationError:
        return None


def progress_text(done: int, wanted: int, spent_s: float, fresh: int, what: str) -> str:
    """Describe the progress of a sweep in a line.

    Args:
        done: finished trials.
        wanted: all trials.
        spent_s: seconds since the sweep started.
        fresh: trials that finished in that time.
        what: describes the last finished trial.
    """
    left_s = spent_s / fresh * (wanted - done)
    left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
    return f"{done}/{wanted}{left}: {what}"


def default_jobs() -> int:
    """Return the default number of parallel simulated trials: the number of cores."""
    return max(1, len(os.sched_getaffinity(0)))


class _Processes:
    """A process per thread that runs trials; all end with the block."""

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
        """Kill all processes; later trials are rejected."""
        with self._lock:
            self._closed = True
            for process in self._all:
                process.kill()
            for process in self._all:
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(OSError):  # a request that it never read
                            pipe.close()
            self._all.clear()

    def run(self, trial: TrialSpec) -> Outcome:
        """Simulate a trial in the process of this thread.

        Raises:
            GeoRayError: the process raised it, or died.
        """
        answer = self._ask(_request(trial))
        if not answer:
            raise RunError(
                f"the process that simulated {trial.label} died",
                fix="Exhausted memory is the usual cause: use fewer --jobs.",
            )
        answered = json.loads(answer)
        if "code" in answered:
            raise from_code(answered["code"], answered["message"], answered["fix"])
        return Outcome.model_validate_json(answered["outcome"])

    def _ask(self, line: str) -> str:
        process = self._process()
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except (OSError, ValueError):  # it died, or another thread has killed it
            return ""

    def _process(self) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self._closed:
                    raise RunError("the sweep has ended", fix="Repeat the command.")
                process = self._own.process = subprocess.Popen(
                    [sys.executable, "-m", "geo_ray.sweep.runner"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # Tasks in packages must be importable there as well.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                self._all.append(process)
        return process


def _request(trial: TrialSpec) -> str:
    return json.dumps(
        {
            "label": trial.label,
            "rate": trial.rate,
            "experiment": trial.experiment.model_dump(mode="json"),
            "base_dir": str(trial.base_dir.absolute()),
            "is_saved": trial.is_saved,
        }
    )


def _answer_to(line: str) -> str:
    """Decode the answer of a pool process: an outcome, or an error by its code."""
    given = json.loads(line)
    base_dir = Path(given["base_dir"])
    try:
        experiment = validated(given["experiment"], base_dir)
        trial = TrialSpec(given["label"], given["rate"], experiment, base_dir, given["is_saved"])
        return json.dumps({"outcome": trial.measure().model_dump_json()})
    except GeoRayError as error:
        return json.dumps({"code": error.code, "message": error.message, "fix": error.fix})


def _serve() -> None:
    """Answer every line on standard input; end with it."""
    # The user's process handles Ctrl-C, and kills this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task may print
        for line in sys.stdin:
            answers.write(_answer_to(line) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
