"""`geo-ray prices`: prices of instances and traffic, and refreshing them from the clouds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console

from geo_ray.base.tables import FittedTable
from geo_ray.base.text import age_text
from geo_ray.cli.say import say, say_json
from geo_ray.prices.price import ANYWHERE, PriceRecord
from geo_ray.prices.price_book import PriceBook

_PIPE_WIDTH: Final = 200


def print_prices(book: PriceBook, now_unix_s: float) -> None:
    """Print a line per price, then the numbered sources, and the exchange rates."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)  # one line per record, for grep
    table = FittedTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("place", "what", "market"):
        table.add_column(heading, no_wrap=True)
    table.add_column("price", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("source and remarks")
    sources: dict[str, int] = {}
    for record in book.records:
        number = sources.setdefault(record.source, len(sources) + 1)
        table.add_row(
            f"{record.cloud} {record.zone or record.region}",
            _what(record),
            "" if record.item == "egress" else record.market.replace("_", "-"),
            _price(record),
            age_text(record.age_s(now_unix_s)),
            f"({number}) {', '.join(_remarks(record, now_unix_s))}",
        )
    console.print(table)
    for source, number in sources.items():
        say(f"({number}) {source}")
    for rate in book.rates:
        say(f"1 {rate.currency} = {rate.usd:g} USD on {rate.on} ({rate.source})")


def _what(record: PriceRecord) -> str:
    if record.item == "egress":
        return f"to {'other regions' if record.to == ANYWHERE else record.to}"
    return str(record.type)


def _price(record: PriceRecord) -> str:
    low = "" if record.lowest is None else f"{record.lowest:.5g}-"
    return f"{low}{record.amount:.5g} {record.currency}/{record.unit}"


def _remarks(record: PriceRecord, now_unix_s: float) -> Iterator[str]:
    if record.is_stale(now_unix_s):
        yield "STALE"
    if record.availability is not None:
        yield "sold out" if record.availability == "none" else f"availability {record.availability}"
    for age in record.age_tiers:
        yield f"x{age.factor:.3g} after {age.after_h:g} h"
    for volume in record.volume_tiers:
        yield f"{volume.amount:.5g} above {volume.above:,.0f}"


_CLOUDS = ("aws", "tencent")
_file_type = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.pass_context
def prices(context: click.Context) -> None:
    """Show the known prices, or fetch the current ones from a cloud.

    The default verb is `show`.
    """
    if context.invoked_subcommand is None:
        context.invoke(show)


@prices.command()
@click.option("--cloud", help="Show only prices of this cloud.")
@click.option("--region", help="Show only prices of this region.")
@click.option("--type", "type_", help="Show only prices of this instance type.")
@click.option("--stale", is_flag=True, help="Show only outdated prices.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=_file_type,
    help="Price file, JSON or YAML; later files override earlier ones.  "
    "[default: those in GEO_RAY_PRICES, else prices.json]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a file in the format of --file.")
def show(
    cloud: str | None,
    region: str | None,
    type_: str | None,
    stale: bool,
    files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show the known prices.

    They come from your own files and from this release.
    """
    import geo_ray
    import geo_ray.api.prices
    from geo_ray.prices.price_book import dump_book

    found = geo_ray.api.prices.prices(files, cloud=cloud, region=region, machine=type_, stale=stale)
    if as_json:
        say_json(dump_book(found.book).decode(), nl=False)
    elif found.book.records:
        print_prices(found.book, found.at_unix_s)
    else:
        click.echo("none of these prices is stale")


@prices.command()
@click.option("--cloud", required=True, type=click.Choice(_CLOUDS))
@click.option(
    "--regions", metavar="LIST", help="Comma-separated.  [default: regions with known prices]"
)
@click.option(
    "--types",
    metavar="LIST",
    help="Instance types, comma-separated.  [default: types with a known price in the region]",
)
@click.option(
    "--file",
    "file",
    type=_file_type,
    help="JSON file to update; its other records stay.  "
    "[default: the first JSON file in GEO_RAY_PRICES, else prices.json]",
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="[SERVICE=]URL",
    help="Use another endpoint: ec2 and pricing of aws, cvm of tencent.",
)
@click.option("--currency", metavar="CODE", help="tencent: billing currency.  [default: CNY]")
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
    """Fetch the current prices of a cloud and store them in a file.

    A price that cannot be read keeps its old value. Credentials are those of the cloud's own
    tools; reading prices costs nothing and starts nothing.
    """
    from geo_ray.api.prices import refresh_prices

    done = refresh_prices(
        cloud,
        regions=_split(regions),
        types=_split(types),
        file=file,
        endpoints=endpoints,
        currency=currency,
        tries=tries,
        progress=True,
    )
    failed = f", {len(done.failed)} requests failed" if done.failed else ""
    click.echo(f"prices   {done.path}, {len(done.records)} read{failed}")


def _split(text: str | None) -> tuple[str, ...]:
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))
