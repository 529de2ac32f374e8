"""Runs in the WAN lab: each is judged alone, repeated alone, and kept in a file as it ends.

The file lies beside the result (``FILE.runs.jsonl``). An interrupted benchmark, or one in which
some run was late at every attempt, is resumed by the same command: accepted runs are not measured
again. Rejected runs stay in the file, with their numbers and why. Once all is there, the result has
them under ``lab_runs`` and the file is removed.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common import support
from geo_ray.base.errors import LabLateError
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats

T = TypeVar("T")
ATTEMPTS = 5
WIDTH = 120  # of the table, also where a terminal's is not known
Entry = dict[str, Any]


def _same(value: Any) -> Any:
    return value


class LabRuns:
    """The runs of one benchmark, by name; threads may take several at once.

    Args:
        path: the file; made if it is not there.
        subject: what was measured how; a file about another subject is refused.

    Raises:
        SystemExit: the file is that of other sources, options or another machine.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        if path.exists():
            # what follows the last line's end was cut off by an interruption
            first, *lines = path.read_text("utf-8").split("\n")[:-1] or ["{}"]
            if json.loads(first) != {"subject": subject}:
                raise SystemExit(
                    f"{path} has runs of other sources, options or another machine: move it away"
                )
            self._entries = [json.loads(line) for line in lines]
            kept = sum(entry["accepted"] for entry in self._entries)
            support.say(f"resumed: {kept} accepted runs are in {path.name}")
        self._rewrite(subject)

    def has(self, name: str) -> bool:
        """Whether a run of this name was accepted."""
        return self._accepted(name) is not None

    def take(
        self,
        name: str,
        measure: Callable[[], tuple[Any, LabStats | None]],
        revive: Callable[[Any], T] = _same,
        attempts: int = ATTEMPTS,
    ) -> T | None:
        """Return an accepted run: from the file, or measured until one is.

        Args:
            name: of the run; another run has another.
            measure: its result as JSON values, and the lab's counters of just that time; None for
                them means that there was no lab, and accepts.
            revive: makes the result of JSON values.
            attempts: how often it is measured at most.

        Returns:
            None if the relay was late each time.
        """
        for _ in range(attempts):
            if self.has(name):
                break
            self._note(name, *measure())
        entry = self._accepted(name)
        return None if entry is None else revive(entry["value"])

    def need(
        self,
        name: str,
        measure: Callable[[], tuple[Any, LabStats | None]],
        revive: Callable[[Any], T] = _same,
        attempts: int = ATTEMPTS,
    ) -> T:
        """As `take`, for a benchmark that cannot go on without.

        Raises:
            LabLateError: the relay was late each time; what was measured is in the file.
        """
        found = self.take(name, measure, revive, attempts)
        if found is None:
            raise LabLateError(f"'{name}' was late each time; the same command resumes")
        return found

    def finish(self) -> list[Entry]:
        """Show all runs and return them; the file stays if a run was never accepted."""
        wide = max(WIDTH, Console(stderr=True).width)
        Console(stderr=True, width=wide).print(self._table())
        names = {entry["name"] for entry in self._entries}
        if missing := sorted(name for name in names if not self.has(name)):
            support.say(f"never in time: {', '.join(missing)}; the same command tries them again")
        else:
            self._path.unlink()
        return self._entries

    def _accepted(self, name: str) -> Entry | None:
        with self._lock:
            found = (e for e in self._entries if e["name"] == name and e["accepted"])
            return next(found, None)

    def _note(self, name: str, value: Any, stats: LabStats | None) -> None:
        entry: Entry = {
            "name": name,
            "accepted": stats is None or not stats.was_late,
            "why": [] if stats is None else list(stats.verdict.why),
            "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "value": value,
            "lab": None if stats is None else stats.record(),
        }
        with self._lock:
            self._entries.append(json.loads(json.dumps(entry)))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        if stats is not None:
            verdict = "in time" if entry["accepted"] else "REJECTED: " + "; ".join(entry["why"])
            support.say(f"{name}: {verdict}; {stats.relay}")

    def _rewrite(self, subject: str) -> None:
        """Write the file anew, without a line that an interruption has cut off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"subject": subject}, *self._entries]
        new = self._path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        new.replace(self._path)

    def _table(self) -> Table:
        """One row for every run, rejected ones included."""
        shown = Table(title="lab runs", box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for heading in ("run", "", "late", "mean/bound", "held up", "own", "stolen", "run queue"):
            shown.add_column(heading, no_wrap=True)
        for entry in self._entries:
            if (lab := entry["lab"]) is None:
                continue
            relay = lab["relay"]
            waited = "-" if relay["run_queue_s"] is None else f"{relay['run_queue_s']:.3f} s"
            shown.add_row(
                entry["name"],
                "in time" if entry["accepted"] else f"[red]rejected ({relay['cause']})",
                f"{lab['late_fraction']:.1%}",
                f"{lab['mean_late_over_bound']:.2f}",
                f"{relay['late_s']:.3f} s",
                f"{relay['own_s']:.3f} s",
                f"{relay['stolen_fraction']:.1%}",
                waited,
            )
        return shown


@contextmanager
def lab_runs(out: Path) -> Iterator[LabRuns]:
    """The runs whose result goes to ``out``; closed with `LabRuns.finish` by whoever finishes."""
    machine = f"{platform.machine()} {support.hardware()['cpu']}"
    words = [Path(word).name for word in sys.argv]
    subject = json.dumps([words, machine, source_digest()])
    runs = LabRuns(out.with_suffix(".runs.jsonl"), subject)
    try:
        yield runs
    except LabLateError as error:
        runs.finish()
        raise SystemExit(f"no result: {error.message}") from error


def judged(lab: Lab, action: Callable[[], T]) -> tuple[T, LabStats]:
    """What an action returned, and the lab's counters of just that time."""
    lab.reset()
    value = action()
    return value, lab.stats()


def source_digest() -> str:
    """A digest of all that was measured and of what measures it."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("geo_ray", "benchmarks"):
        for path in sorted((support.REPOSITORY / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
