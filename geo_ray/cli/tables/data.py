"""The table of ``geo-ray data``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from geo_ray.observe.fitted_table import FittedTable

if TYPE_CHECKING:
    from geo_ray.data.files.find import LeftOut
    from geo_ray.data.manifest import DataShard, Manifest

MOST_LEFT_OUT = 6
"""Names per reason of what was left out, for verbs other than ``inspect``, which names all."""

_MOST_LABELS = 12


def shown_time(seconds: float) -> str:
    """A time of statistics, in UTC; a date if it is midnight."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}".removesuffix(" 00:00")
    except (ValueError, OverflowError, OSError):  # beyond the years 1 to 9999
        return f"{seconds:.6g} s"


def left_out_lines(left_out: Sequence[LeftOut], most: int | None = None) -> list[str]:
    """What was not read, a line per reason; ``most`` names of each, None for all."""
    paths: dict[str, list[str]] = {}
    for one in left_out:
        paths.setdefault(one.reason, []).append(one.path)
    lines = []
    for reason, names in paths.items():
        shown = ", ".join(names[:most])
        more = len(names) - len(names[:most])
        also = f" and {more:,} more" if more else ""
        lines.append(f"Left out: {shown}{also}: {reason}")
    return lines


def print_table(
    manifest: Manifest,
    words: Mapping[str, str],
    region: str | None = None,
    bad: frozenset[str] = frozenset(),
) -> None:
    """One line per region and split: shards, rows, bytes and labels.

    Args:
        manifest: what to show.
        words: label -> its word, where that is known.
        region: only this one, or None for all.
        bad: paths of shards that must not be used.
    """
    table = FittedTable(title=f"{manifest.task}, seed {manifest.seed}", box=SIMPLE)
    for heading in ("region", "split"):
        table.add_column(heading, no_wrap=True)
    for heading in ("shards", "bad", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("label:rows", min_width=len("label:rows"), overflow="fold")
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
            Text(f"{wrong:,}", "red") if wrong else "0",
            f"{sum(shard.rows for shard in shards):,}",
            f"{sum(shard.bytes for shard in shards):,}",
            _labels(shards, words),
        )
    Console().print(table)


def _labels(shards: list[DataShard], words: Mapping[str, str]) -> str:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.labels)
    ordered = sorted(counts, key=lambda label: int(label) if label.lstrip("-").isdigit() else 0)
    shown = " ".join(
        f"{words.get(label, label)}:{counts[label]:,}" for label in ordered[:_MOST_LABELS]
    )
    more = len(ordered) - _MOST_LABELS
    return f"{shown} and {more:,} more" if more > 0 else shown or "-"
