"""Seeds of random histories in parts: what came of a part, and a file that keeps it.

The file has one JSON object a line: first which code it is about, then the parts that are done, in
the order in which they were. Whoever goes on reads it and does what is missing.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common.support import REPOSITORY
from benchmarks.membership.histories import History, ViolationError

MOST_CPU_S = 600.0  # a history takes a tenth of a second
_CODE = ("geo_ray", "benchmarks/membership")


@dataclass(frozen=True, slots=True)
class Part:
    """What came of some seeds.

    Attributes:
        first: the first seed.
        count: how many follow each other.
        violations: what was wrong, by seed.
        counts: events by kind.
        cpu_s: seconds of the processor that they took.
    """

    first: int
    count: int
    violations: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0


def run_part(first: int, count: int, directory: Path) -> Part:
    """Simulate the histories of these seeds; in a process's main thread, for its timer.

    Args:
        first: the first seed.
        count: how many follow each other.
        directory: for data, which all histories share.
    """
    violations: dict[int, str] = {}
    counts: Counter[str] = Counter()
    before = signal.signal(signal.SIGPROF, _has_not_ended)
    began_s = time.process_time()
    try:
        for seed in range(first, first + count):
            history = History(seed, directory)
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
            try:
                history.run()
            except Exception as error:  # whatever it is: the seed tells how to see it again
                violations[seed] = repr(error)
            counts.update(history.counts)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    return Part(first, count, violations, dict(counts), time.process_time() - began_s)


def _has_not_ended(signum: int, frame: FrameType | None) -> None:
    raise ViolationError(f"the history has not ended in {MOST_CPU_S:g} s of the processor")


class PartsFile:
    """The parts that are done.

    Attributes:
        parts: by first seed and count.

    Args:
        path: the file, which may be there.

    Raises:
        SystemExit: it is of other code than this.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[tuple[int, int], Part] = {}
        code = code_digest()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"code": code}) + "\n", "utf-8")
            return
        text = path.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]  # who was killed may have left half a line
        head, *lines = map(json.loads, whole.splitlines() or ["{}"])
        if head.get("code") != code:
            raise SystemExit(f"{path} is about other code: move it away, and all seeds are run")
        for line in lines:
            self._note(_loaded(line))
        path.write_text(whole, "utf-8")

    def add(self, part: Part) -> None:
        """A part is done."""
        self._note(part)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(part)) + "\n")

    def _note(self, part: Part) -> None:
        self.parts[part.first, part.count] = part


def cuts(first: int, count: int, most: int) -> list[tuple[int, int]]:
    """Parts of so many seeds, as first seed and count."""
    end = first + count
    return [(at, min(most, end - at)) for at in range(first, end, most)]


def code_digest() -> str:
    """SHA-256 of what histories are made by: what one version does is not known of another."""
    found = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            found.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _loaded(line: dict[str, Any]) -> Part:
    by_seed = {int(seed): what for seed, what in line["violations"].items()}
    return Part(**{**line, "violations": by_seed})
