"""What ``geo-ray data`` shows: a table on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from geo_ray.data.manifest import DataShard, Manifest

_MOST_LABELS = 12
_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 10.0


class Advance(Protocol):
    """Moves a progress bar by ``amount``."""

    def __call__(self, amount: float) -> None:
        """Move the bar."""


@contextmanager
def progress_bar(title: str, total: float, unit: str) -> Iterator[Advance]:
    """Progress on stderr while the block runs: a bar, or lines where that is no terminal.

    Args:
        title: what is being done.
        total: how much there is.
        unit: of what.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, total, unit)
        return
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
            click.echo(f"{self._title}: {share:.0%}{of_all}", err=True)
            self._next_s = time.monotonic() + _LINE_EVERY_S


def shown_time(seconds: float) -> str:
    """A time of statistics, in UTC; a date if it is midnight."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}".removesuffix(" 00:00")
    except (ValueError, OverflowError, OSError):  # beyond the years 1 to 9999
        return f"{seconds:.6g} s"


def print_table(
    manifest: Manifest, region: str | None = None, bad: frozenset[str] = frozenset()
) -> None:
    """One line per region and split: shards, rows, bytes and labels.

    Args:
        manifest: what to show.
        region: only this one, or None for all.
        bad: paths of shards that must not be used.
    """
    table = Table(title=f"{manifest.task}, seed {manifest.seed}")
    for heading in ("region", "split"):
        table.add_column(heading, no_wrap=True)
    for heading in ("shards", "bad", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("label:rows")
    groups: dict[tuple[str, str], list[DataShard]] = {}
    for shard in manifest.shards:
        if region is None or shard.region == region:
            groups.setdefault((shard.region, shard.split), []).append(shard)
    for (home, split), shards in groups.items():
        wrong = sum(shard.path in bad for shard in shards)
        table.add_row(
            home,
            split,
            f"{len(shards):,}",
            f"[red]{wrong:,}[/red]" if wrong else "0",
            f"{sum(shard.rows for shard in shards):,}",
            f"{sum(shard.bytes for shard in shards):,}",
            _labels(shards),
        )
    Console().print(table)


def _labels(shards: list[DataShard]) -> str:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.labels)
    ordered = sorted(counts, key=lambda label: int(label) if label.lstrip("-").isdigit() else 0)
    shown = " ".join(f"{label}:{counts[label]:,}" for label in ordered[:_MOST_LABELS])
    more = len(ordered) - _MOST_LABELS
    return f"{shown} and {more:,} more" if more > 0 else shown or "-"
