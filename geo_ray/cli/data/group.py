"""``geo-ray data``: look at files, write shards for regions, check them, merge manifests."""

from __future__ import annotations

import click

from geo_ray.cli.data.inspect import inspect
from geo_ray.cli.data.shard import shard
from geo_ray.cli.data.stats import merge_stats, stats
from geo_ray.cli.tables.data import print_table, progress_bar

# The work is imported by each verb: `geo-ray --help` must not load Arrow and PyTorch.


@click.group()
def data() -> None:
    """Write training data as one shard set per region, and check it."""


for verb in (inspect, stats, merge_stats, shard):
    data.add_command(verb)


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
    from geo_ray.data.manifest import load_manifest, manifest_file, merge_manifests, save_manifest
    from geo_ray.data.prepare.saved import read_preparation_bytes, save_preparation

    merged = merge_manifests([load_manifest(uri) for uri in manifests])
    if merged.preparation is not None:
        made = read_preparation_bytes(merged.preparation, manifest_file(manifests[0]))
        ref = save_preparation(made, out)
        merged = merged.model_copy(update={"preparation": ref})
    save_manifest(merged, out)
    print_table(merged)
    click.echo(f"Manifest: {out}")
