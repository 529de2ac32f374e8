"""How far a piece of work is: a bar on standard error, lines where that is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from geo_ray.api.watch import RunWatch, ShowProgress, console_of_progress

_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 10.0

Advance: TypeAlias = Callable[[float], None]
"""Moves the work's end nearer by an amount."""


@contextmanager
def progress_bar(
    title: str, total: float, unit: str, shown: ShowProgress = True
) -> Iterator[Advance]:
    """Show progress while the block runs.

    Args:
        title: what is being done.
        total: how much there is.
        unit: of what.
        shown: as for `geo_ray.train`.
    """
    console = console_of_progress()
    if not shown:
        yield _nothing
    elif shown == "plain" or not console.is_terminal:
        yield _Lines(title, total, unit)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} " + unit),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(title, total=total)
            yield lambda amount: progress.update(bar, advance=amount)


@contextmanager
def reading_files(files: int, shown: ShowProgress) -> Iterator[Callable[[float, int], None]]:
    """Progress while files are read; gives what readers call with (files read, rows)."""
    done = 0.0
    with progress_bar("Reading files", files, "files", shown) as advance:

        def on_read(files_done: float, rows: int) -> None:
            nonlocal done
            advance(max(0.0, files_done - done))
            done = max(done, files_done)

        yield on_read
        advance(files - done)


class _Lines:
    """Progress as lines: nothing for what is done quickly."""

    def __init__(self, title: str, total: float, unit: str) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._next_s = time.monotonic() + _FIRST_LINE_S

    def __call__(self, amount: float) -> None:
        self._done += amount
        if time.monotonic() >= self._next_s:
            share = self._done / self._total if self._total else 1.0
            of_all = f" of {self._total:,.0f} {self._unit}" if self._total > 1 else ""
            RunWatch(progress=True).tell(f"{self._title}: {share:.0%}{of_all}")
            self._next_s = time.monotonic() + _LINE_EVERY_S


def _nothing(amount: float) -> None:
    pass
