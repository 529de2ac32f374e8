"""The table of `geo-ray prices show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console

from geo_ray.cli.say import say
from geo_ray.clouds.price import ANYWHERE, PriceRecord
from geo_ray.clouds.price_book import PriceBook
from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.text import age_text

_PIPE_WIDTH: Final = 200


def print_prices(book: PriceBook, now_unix_s: float) -> None:
    """A line per price, then the sources that the last column numbers, and the exchange rates."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)  # a line stays a line for who reads it with grep
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
    if record.stock is not None:
        yield "sold out" if record.stock == "none" else f"stock {record.stock}"
    for age in record.age_tiers:
        yield f"x{age.factor:.3g} after {age.after_h:g} h"
    for volume in record.volume_tiers:
        yield f"{volume.amount:.5g} above {volume.above:,.0f}"
