"""`geo-ray prices`: what instances and traffic cost, and asking the clouds anew."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.say import say_json

_CLOUDS = ("aws", "tencent")
_file_type = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.pass_context
def prices(context: click.Context) -> None:
    """Show the known prices, or ask a cloud for its present ones.

    Without a verb it is `show`.
    """
    if context.invoked_subcommand is None:
        context.invoke(show)


@prices.command()
@click.option("--cloud", help="Only of this cloud.")
@click.option("--region", help="Only of this region.")
@click.option("--type", "type_", help="Only of this instance type.")
@click.option("--stale", is_flag=True, help="Only those that are older than they are believed.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=_file_type,
    help="Your prices, JSON or YAML; of several the later count more.  "
    "[default: those in GEO_RAY_PRICES, else prices.json]",
)
@click.option("--json", "as_json", is_flag=True, help="As a file that --file takes.")
def show(
    cloud: str | None,
    region: str | None,
    type_: str | None,
    stale: bool,
    files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show the known prices.

    Those of your own files, and those that came with this release.
    """
    import geo_ray
    from geo_ray.cli.tables.prices import print_prices
    from geo_ray.clouds.price_book import dump_book

    found = geo_ray.prices(files, cloud=cloud, region=region, machine=type_, stale=stale)
    if as_json:
        say_json(dump_book(found.book).decode(), nl=False)
    elif found.book.records:
        print_prices(found.book, found.at_unix_s)
    else:
        click.echo("none of these prices is stale")


@prices.command()
@click.option("--cloud", required=True, type=click.Choice(_CLOUDS))
@click.option(
    "--regions", metavar="LIST", help="Separated by commas.  [default: those with known prices]"
)
@click.option(
    "--types",
    metavar="LIST",
    help="Instance types, separated by commas.  [default: those with a known price in the region]",
)
@click.option(
    "--file",
    "file",
    type=_file_type,
    help="Where they go, JSON; what else is in it stays.  "
    "[default: the first JSON file in GEO_RAY_PRICES, else prices.json]",
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="[SERVICE=]URL",
    help="Ask there instead: ec2 and pricing of aws, cvm of tencent.",
)
@click.option("--currency", metavar="CODE", help="tencent: what you are billed in.  [default: CNY]")
@click.option("--tries", default=5, show_default=True, type=click.IntRange(1, 20), help="Per call.")
def refresh(
    cloud: str,
    regions: str | None,
    types: str | None,
    file: Path | None,
    endpoints: tuple[str, ...],
    currency: str | None,
    tries: int,
) -> None:
    """Ask a cloud for its present prices and keep them in a file.

    What cannot be read keeps its old price. Credentials come from where the cloud's own tools take
    them; reading prices costs nothing and starts nothing.
    """
    import geo_ray

    done = geo_ray.refresh_prices(
        cloud,
        regions=_split(regions),
        types=_split(types),
        file=file,
        endpoints=endpoints,
        currency=currency,
        tries=tries,
        progress=True,
    )
    failed = f", {len(done.failed)} questions failed" if done.failed else ""
    click.echo(f"prices   {done.path}, {len(done.records)} read{failed}")


def _split(text: str | None) -> tuple[str, ...]:
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))
