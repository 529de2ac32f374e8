"""``geo-ray data shard``: a task's data, or a user's files, become shards of regions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geo_ray.cli.data.options import is_default, read_options
from geo_ray.cli.data.task import named_task, pairs_of
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say
from geo_ray.cli.tables.data import MOST_LEFT_OUT, left_out_lines, print_table

if TYPE_CHECKING:
    from collections import Counter

    from geo_ray import ReadOptions
    from geo_ray.data.prepare.apply import Counts

_MOST_WORDS = 10


@click.command()
@click.option("--task", "use", required=True, help="Built-in task, or path/to/file.py:Class.")
@click.option("--task-option", "options", multiple=True, metavar="K=V", help="Option of the task.")
@click.option("--out", required=True, metavar="DIR_OR_URI", help="Where manifest and shards go.")
@click.option("--regions", required=True, help="Comma-separated, e.g. us-east,eu-west,ap-south.")
@click.option(
    "--split",
    "kind",
    type=click.Choice(["iid", "ratio", "dirichlet", "by_label"]),
    default="iid",
    show_default=True,
    help="How rows are shared out.",
)
@click.option("--ratio", help="For --split ratio: a share per region, e.g. 2,1,1.")
@click.option(
    "--alpha",
    type=click.FloatRange(min=0, min_open=True),
    help="For --split dirichlet: 0.1 is strong label skew, 100 nearly none.",
)
@click.option(
    "--rows-per-shard", type=click.IntRange(min=1), default=8192, show_default=True, help="At most."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--input",
    "source",
    metavar="DIR_OR_URI",
    help="Your own files: CSV, JSON lines, Parquet or Arrow.",
)
@click.option(
    "--prepare",
    "prepare_file",
    type=click.Path(path_type=Path),
    help="With --input: a preparation file, which says how the columns are made of yours.",
)
@click.option(
    "--stats",
    "stats_file",
    type=click.Path(path_type=Path),
    help="With --prepare: statistics of all regions, from `geo-ray data merge-stats`.",
)
@click.option(
    "--heldout",
    type=click.FloatRange(0, 1, max_open=True),
    help="With --input: the fraction of rows kept for evaluation.  [default: 0.1]",
)
@click.option(
    "--store", "stores", multiple=True, metavar="REGION=URI", help="A region's own store."
)
@click.option("--force", is_flag=True, help="Replace a manifest that is already there.")
@read_options
def shard(
    use: str,
    options: tuple[str, ...],
    out: str,
    regions: str,
    kind: str,
    ratio: str | None,
    alpha: float | None,
    rows_per_shard: int,
    seed: int,
    source: str | None,
    prepare_file: Path | None,
    stats_file: Path | None,
    heldout: float | None,
    stores: tuple[str, ...],
    force: bool,
    read: ReadOptions,
) -> None:
    """Write a task's data as Parquet shards.

    Each region's in its own directory or store.
    """
    loading()
    import geo_ray
    from geo_ray.data.prepare.saved import label_words

    names = [name.strip() for name in regions.split(",") if name.strip()]
    split = _split(kind, names, ratio, alpha)
    own = pairs_of(stores, "--store")
    if unknown := sorted(set(own) - set(names)):
        raise click.BadParameter(f"{unknown[0]!r} is not among --regions", param_hint="--store")
    if stats_file is not None and prepare_file is None:
        raise click.UsageError("--stats goes with --prepare, which says what it is for")
    files = None
    if source is None:
        _refuse_without_input(heldout, prepare_file, read)
    else:
        part = 0.1 if heldout is None else heldout
        files = geo_ray.SourceFiles(source, read, prepare_file, stats_file, part)
    made = geo_ray.shard_data(
        named_task(use, options),
        {name: own.get(name, out) for name in names} if own else names,
        out,
        files=files,
        split=split,
        rows_per_shard=rows_per_shard,
        seed=seed,
        force=force,
        progress=True,
    )
    for line in left_out_lines(made.left_out, MOST_LEFT_OUT):
        say(line, err=True)
    if made.counts is not None:
        _show_counts(made.counts)
    print_table(made.manifest, label_words(made.path))
    click.echo(f"Manifest: {made.path}")


def _refuse_without_input(
    heldout: float | None, prepare_file: Path | None, read: ReadOptions
) -> None:
    if heldout is not None:
        raise click.UsageError("--heldout goes with --input; the task brings its own held-out rows")
    if prepare_file is not None or not is_default(read):
        raise click.UsageError(
            "--prepare and the options of reading files go with --input, which names your files"
        )


def _split(kind: str, regions: list[str], ratio: str | None, alpha: float | None) -> dict[str, Any]:
    if (ratio is not None) != (kind == "ratio"):
        raise click.UsageError("--ratio and --split ratio go together")
    if alpha is not None and kind != "dirichlet":
        raise click.UsageError("--alpha goes with --split dirichlet")
    if ratio is not None:
        return {"kind": kind, "ratios": _ratios(ratio, regions)}
    if kind == "dirichlet":
        return {"kind": kind, "alpha": 0.3 if alpha is None else alpha}
    return {"kind": kind}


def _ratios(text: str, regions: list[str]) -> dict[str, float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != len(regions) or not all(0 < share < float("inf") for share in shares):
        raise click.BadParameter(
            f"{text!r} is not one positive number per region ({len(regions)} regions)",
            param_hint="--ratio",
        )
    return dict(zip(regions, shares, strict=True))


def _show_counts(counts: Counts) -> None:
    """What was done to the rows, so that nothing vanishes unseen."""
    lines = [f"{counts.rows:,} rows read, {counts.dropped:,} of them dropped"]
    for what, by_column in (
        ("dropped for want of", counts.dropped_by),
        ("filled in", counts.filled),
        ("of other words in", counts.other),
    ):
        found = {name: number for name, number in by_column.items() if number}
        words = counts.other_words if by_column is counts.other else {}
        lines += [
            f"  {number:,} {what} {name}{_frequent(words.get(name))}"
            for name, number in found.items()
        ]
    say("\n".join(lines))


def _frequent(words: Counter[str] | None) -> str:
    """The most frequent words that a vocabulary lacks."""
    if not words:
        return ""
    from geo_ray.data.nearby import printable

    shown = ", ".join(
        f"{printable(word)} {rows:,}" for word, rows in words.most_common(_MOST_WORDS)
    )
    more = len(words) - _MOST_WORDS
    return f": {shown}" + (f" and {more:,} more words" if more > 0 else "")
