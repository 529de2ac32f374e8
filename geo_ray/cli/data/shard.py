"""``geo-ray data shard``: a task's data, or a user's files, become shards of regions."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.data.options import is_default, read_options, reading
from geo_ray.cli.data.task import load_named_task, pairs_of
from geo_ray.cli.tables.data import print_table, progress_bar
from geo_ray.errors import ConfigError

if TYPE_CHECKING:
    from geo_ray.data.columns import Columns
    from geo_ray.data.files.options import ReadOptions
    from geo_ray.data.prepare.apply import Counts
    from geo_ray.data.prepare.config import Preparation
    from geo_ray.data.split import SplitConfig
    from geo_ray.tasks.base import Task


@dataclass(frozen=True)
class _Input:
    """The user's files and how their rows become those of the task."""

    source: str
    read: ReadOptions
    prepare: Path | None
    stats: Path | None
    heldout: float
    hint: str


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
    """Write a task's data as Parquet shards, each region's in its own directory or store."""
    from geo_ray.data.manifest import MANIFEST_NAME, save_manifest
    from geo_ray.data.prepare.saved import preparation_bytes, save_preparation
    from geo_ray.data.stores.base import open_store
    from geo_ray.data.stores.uri import join
    from geo_ray.data.write import write_shards

    names = [name.strip() for name in regions.split(",") if name.strip()]
    split = _split(kind, names, ratio, alpha)
    homes = dict.fromkeys(names, out) | pairs_of(stores, "--store")
    if unknown := sorted(set(homes) - set(names)):
        raise click.BadParameter(f"{unknown[0]!r} is not among --regions", param_hint="--store")
    if source is None:
        _refuse_without_input(heldout, prepare_file, read)
    if stats_file is not None and prepare_file is None:
        raise click.UsageError("--stats goes with --prepare, which says what it is for")
    if open_store(out).exists(MANIFEST_NAME) and not force:
        raise ConfigError(
            f"--out: {out} already has a manifest", fix="Choose another place, or add --force."
        )
    task = load_named_task(use, options)
    made: Preparation | None = None
    if source is None:
        parts = _own_data(task, use, seed)
    else:
        hint = f"geo-ray data inspect {shlex.quote(source)} --task {shlex.quote(use)}"
        given = _Input(
            source, read, prepare_file, stats_file, 0.1 if heldout is None else heldout, hint
        )
        parts, made = _from_files(given, task, seed)
    total = sum(len(next(iter(columns.values()))) for columns in parts.values())
    with progress_bar("Writing shards", total, unit="rows") as advance:
        manifest = write_shards(
            columns_by_split=parts,
            task_name=use,
            column_types=task.columns,
            label_column=task.label_column,
            split=split,
            regions=names,
            seed=seed,
            out=homes,
            rows_per_shard=rows_per_shard,
            on_shard=lambda written: advance(written.rows),
        )
    target = join(out, MANIFEST_NAME)
    if made is not None:
        ref = save_preparation(preparation_bytes(made), target)
        manifest = manifest.model_copy(update={"preparation": ref})
    save_manifest(manifest, target)
    print_table(manifest)
    click.echo(f"Manifest: {target.removeprefix('file://')}")


def _refuse_without_input(
    heldout: float | None, prepare_file: Path | None, read: ReadOptions
) -> None:
    if heldout is not None:
        raise click.UsageError("--heldout goes with --input; the task brings its own held-out rows")
    if prepare_file is not None or not is_default(read):
        raise click.UsageError(
            "--prepare and the options of reading files go with --input, which names your files"
        )


def _split(kind: str, regions: list[str], ratio: str | None, alpha: float | None) -> SplitConfig:
    from geo_ray.data.split import ByLabelSplit, DirichletSplit, IidSplit, RatioSplit

    if (ratio is not None) != (kind == "ratio"):
        raise click.UsageError("--ratio and --split ratio go together")
    if alpha is not None and kind != "dirichlet":
        raise click.UsageError("--alpha goes with --split dirichlet")
    if ratio is not None:
        return RatioSplit(ratios=_ratios(ratio, regions))
    if kind == "dirichlet":
        return DirichletSplit(alpha=0.3 if alpha is None else alpha)
    return ByLabelSplit() if kind == "by_label" else IidSplit()


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


def _own_data(task: Task, use: str, seed: int) -> dict[str, Columns]:
    from geo_ray.tasks.base import SelfContained

    if not isinstance(task, SelfContained):
        raise ConfigError(
            f"--task: {use} brings no data of its own", fix="Name your files with --input."
        )
    made = task.dataset(seed)
    return {"train": made.train, "heldout": made.heldout}


def _from_files(
    given: _Input, task: Task, seed: int
) -> tuple[dict[str, Columns], Preparation | None]:
    """Rows to train on and to hold out, and how they were prepared if the user said how."""
    from geo_ray.data.files.find import find_files
    from geo_ray.data.inputs import Complaint, gather_rows, hold_out
    from geo_ray.data.prepare.config import load_preparation
    from geo_ray.data.prepare.resolve import resolve
    from geo_ray.data.prepare.statistics import load_statistics

    preparation = None if given.prepare is None else load_preparation(given.prepare)
    statistics = None if given.stats is None else load_statistics(given.stats)
    resolved = resolve(preparation, task.columns, statistics)
    for note in resolved.notes:
        click.echo(note, err=True)
    found = find_files(given.source, given.read)
    complaint = Complaint(
        prepared=preparation is not None, draft=f"{given.hint} --draft prepare.yaml"
    )
    with reading("Reading files", len(found.files)) as on_read:
        gathered = gather_rows(found, resolved.preparation, complaint, on_read)
    if preparation is not None:
        _show_counts(gathered.counts)
    parts = hold_out(gathered.columns, given.heldout, seed)
    return parts, None if preparation is None else resolved.preparation


def _show_counts(counts: Counts) -> None:
    """What was done to the rows, so that nothing vanishes unseen."""
    lines = [f"{counts.rows:,} rows read, {counts.dropped:,} of them dropped"]
    for what, by_column in (
        ("dropped for want of", counts.dropped_by),
        ("filled in", counts.filled),
        ("of other words in", counts.other),
    ):
        found = {name: number for name, number in by_column.items() if number}
        lines += [f"  {number:,} {what} {name}" for name, number in found.items()]
    click.echo("\n".join(lines))
