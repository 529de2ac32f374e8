"""``geo-ray data``: write shards for regions, check them, merge manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geo_ray.cli.tables.data import print_table, progress_bar
from geo_ray.errors import ConfigError

if TYPE_CHECKING:
    from geo_ray.data.columns import Columns
    from geo_ray.data.split import SplitConfig
    from geo_ray.tasks.base import Task

# The work is imported by each verb: `geo-ray --help` must not load Arrow and PyTorch.


@click.group()
def data() -> None:
    """Write training data as one shard set per region, and check it."""


@data.command()
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
@click.option("--input", "source", metavar="DIR_OR_URI", help="Your own *.parquet files.")
@click.option(
    "--heldout",
    type=click.FloatRange(0, 1, max_open=True),
    help="With --input: the fraction of rows kept for evaluation.  [default: 0.1]",
)
@click.option(
    "--store", "stores", multiple=True, metavar="REGION=URI", help="A region's own store."
)
@click.option("--force", is_flag=True, help="Replace a manifest that is already there.")
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
    heldout: float | None,
    stores: tuple[str, ...],
    force: bool,
) -> None:
    """Write a task's data as Parquet shards, each region's in its own directory or store."""
    from geo_ray.data.manifest import MANIFEST_NAME, save_manifest
    from geo_ray.data.stores.base import open_store
    from geo_ray.data.stores.uri import join
    from geo_ray.data.write import write_shards

    names = [name.strip() for name in regions.split(",") if name.strip()]
    split = _split(kind, names, ratio, alpha)
    homes = dict.fromkeys(names, out) | _pairs(stores, "--store")
    if unknown := sorted(set(homes) - set(names)):
        raise click.BadParameter(f"{unknown[0]!r} is not among --regions", param_hint="--store")
    if source is None and heldout is not None:
        raise click.UsageError("--heldout goes with --input; the task brings its own held-out rows")
    if open_store(out).exists(MANIFEST_NAME) and not force:
        raise ConfigError(
            f"--out: {out} already has a manifest", fix="Choose another place, or add --force."
        )
    task = _load_task(use, options)
    parts = _columns(task, use, source, 0.1 if heldout is None else heldout, seed)
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
    save_manifest(manifest, target)
    print_table(manifest)
    click.echo(f"Manifest: {target.removeprefix('file://')}")


@data.command()
@click.argument("manifest_uri", metavar="MANIFEST")
@click.option("--region", help="Only this region's shards, read from within that region.")
def check(manifest_uri: str, region: str | None) -> None:
    """Verify size, hash, schema and rows of every shard of MANIFEST."""
    from geo_ray.data.check import check_shards, shards_to_check
    from geo_ray.data.manifest import load_manifest

    manifest = load_manifest(manifest_uri)
    total = sum(shard.bytes for shard in shards_to_check(manifest, region))
    verdicts = []
    with progress_bar("Checking shards", total, unit="bytes") as advance:
        for verdict in check_shards(manifest, region):
            verdicts.append(verdict)
            advance(verdict.shard.bytes)
    bad = {v.shard.path: v.error for v in verdicts if v.error is not None}
    print_table(manifest, region, frozenset(bad))
    for error in bad.values():
        click.echo(str(error), err=True)
    if bad:
        click.echo(f"{len(bad)} of {len(verdicts)} shards are bad.", err=True)
        raise click.exceptions.Exit(next(iter(bad.values())).exit_code)
    click.echo(f"All {len(verdicts)} shards are whole.")


@data.command()
@click.argument("manifests", nargs=-1, required=True)
@click.option("--out", required=True, metavar="FILE_OR_URI", help="The merged manifest.")
def merge(manifests: tuple[str, ...], out: str) -> None:
    """Make one manifest of MANIFESTS that were written apart, each in its own region."""
    from geo_ray.data.manifest import load_manifest, merge_manifests, save_manifest

    merged = merge_manifests([load_manifest(uri) for uri in manifests])
    save_manifest(merged, out)
    print_table(merged)
    click.echo(f"Manifest: {out}")


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


def _pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        pairs[key] = value
    return pairs


def _load_task(use: str, options: tuple[str, ...]) -> Task:
    from geo_ray.tasks.load import TaskConfig, load_task

    values = {key: _scalar(text) for key, text in _pairs(options, "--task-option").items()}
    return load_task(TaskConfig(use=use, options=values), Path.cwd())


def _scalar(text: str) -> Any:
    """A JSON number, true, false or null; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (list, dict)) else value


def _columns(
    task: Task, use: str, source: str | None, heldout: float, seed: int
) -> dict[str, Columns]:
    if source is None:
        dataset = getattr(task, "dataset", None)
        if dataset is None:
            raise ConfigError(
                f"--task: {use} brings no data of its own", fix="Name your files with --input."
            )
        made = dataset(seed)
        return {"train": made.train, "heldout": made.heldout}
    from geo_ray.data.inputs import hold_out, read_parquet_files

    with progress_bar("Reading input", None, unit="files") as advance:
        columns = read_parquet_files(source, task.columns, lambda done, total: advance(1, total))
    return hold_out(columns, heldout, seed)
