"""``geo-ray data``: look at files, write shards for regions, check them, merge manifests."""

from __future__ import annotations

import click

from geo_ray.cli.data.inspect import inspect
from geo_ray.cli.data.shard import shard
from geo_ray.cli.data.stats import merge_stats, stats
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say
from geo_ray.cli.tables.data import print_table

# The work is imported by each verb: `geo-ray --help` must not load Arrow and PyTorch.


@click.group(short_help="Write and check training data, a shard set per region.")
def data() -> None:
    """Write training data as one shard set per region, and check it."""


for verb in (inspect, stats, merge_stats, shard):
    data.add_command(verb)


@data.command()
@click.argument("manifest_uri", metavar="MANIFEST")
@click.option("--region", help="Only this region's shards, read from within that region.")
def check(manifest_uri: str, region: str | None) -> None:
    """Verify every shard of MANIFEST.

    Its size, hash, schema and rows.
    """
    loading()
    import geo_ray
    from geo_ray.data.prepare.saved import label_words

    found = geo_ray.check_data(manifest_uri, region, progress=True)
    bad = frozenset(verdict.shard.path for verdict in found.bad)
    print_table(found.manifest, label_words(manifest_uri), region, bad)
    for verdict in found.bad:
        say(str(verdict.error), err=True)
    if found.bad and found.bad[0].error is not None:
        click.echo(f"{len(found.bad)} of {len(found.verdicts)} shards are bad.", err=True)
        raise click.exceptions.Exit(found.bad[0].error.exit_code)
    click.echo(f"All {len(found.verdicts)} shards are whole.")


@data.command()
@click.argument("manifests", nargs=-1, required=True)
@click.option("--out", required=True, metavar="FILE_OR_URI", help="The merged manifest.")
def merge(manifests: tuple[str, ...], out: str) -> None:
    """Make one manifest of several MANIFESTS.

    They were written apart, each in its own region.
    """
    loading()
    import geo_ray
    from geo_ray.data.prepare.saved import label_words

    print_table(geo_ray.merge_data(manifests, out).manifest, label_words(out))
    click.echo(f"Manifest: {out}")
