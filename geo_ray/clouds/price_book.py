"""All known prices: found by what they are of, renewed without losing what could not be read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from geo_ray.clouds.currency import ExchangeRate, usd_per_unit
from geo_ray.clouds.price import ANYWHERE, Market, PriceRecord
from geo_ray.clouds.tiers import billed_hours, volume_cost
from geo_ray.config.base import Model
from geo_ray.errors import PriceBookError, PriceUnknownError

_MOST_BYTES: Final = 64 * 1024 * 1024
_SNAPSHOTS: Final = "snapshots"


class PriceBook(Model):
    """Prices and exchange rates; the file is this as JSON."""

    version: Literal[1] = 1
    records: tuple[PriceRecord, ...] = ()
    rates: tuple[ExchangeRate, ...] = ()

    @cached_property
    def _by_key(self) -> dict[tuple[str | None, ...], PriceRecord]:
        return {record.key: record for record in sorted(self.records, key=lambda r: r.fetched_at)}

    def instance(
        self, cloud: str, region: str, type_: str, market: Market = "on_demand"
    ) -> PriceRecord:
        """The price of an instance type; of the cheapest zone if only zones have prices.

        Raises:
            PriceUnknownError: there is none.
        """
        whole = self._by_key.get((cloud, region, None, "instance", type_, None, market))
        if whole is not None:
            return whole
        zones = [
            r
            for r in self._by_key.values()
            if (r.cloud, r.region, r.item, r.type, r.market)
            == (cloud, region, "instance", type_, market)
        ]
        if not zones:
            raise PriceUnknownError(f"no {market} price of {cloud} {type_} in {region}")
        return min(zones, key=lambda r: r.amount)

    def disk(self, cloud: str, region: str, type_: str) -> PriceRecord:
        """The price of a GB of disk for a month.

        Raises:
            PriceUnknownError: there is none.
        """
        return self._find((cloud, region, None, "disk", type_, None, "on_demand"), "disk")

    def egress(self, cloud: str, src: str, dst: str) -> PriceRecord:
        """The price of a GB from ``src`` to ``dst``: of that pair, else to anywhere.

        Raises:
            PriceUnknownError: there is none.
        """
        for to in (dst, ANYWHERE):
            found = self._by_key.get((cloud, src, None, "egress", None, to, "on_demand"))
            if found is not None:
                return found
        raise PriceUnknownError(f"no price of {cloud} egress from {src} to {dst}")

    def _find(self, key: tuple[str | None, ...], what: str) -> PriceRecord:
        found = self._by_key.get(key)
        if found is None:
            raise PriceUnknownError(f"no price of {what} {key[4]} of {key[0]} in {key[1]}")
        return found

    def usd_of_hours(self, record: PriceRecord, hours: float, age_h: float = 0.0) -> float:
        """US dollars for an instance that is kept for ``hours``.

        Raises:
            CurrencyError: its currency has no rate.
        """
        each = record.amount * usd_per_unit(record.currency, self.rates)
        return each * billed_hours(hours, record.age_tiers, age_h)

    def usd_of_volume(self, record: PriceRecord, units: float, used: float = 0.0) -> float:
        """US dollars for ``units`` (GB) in a month in which ``used`` were used before.

        Raises:
            CurrencyError: its currency has no rate.
        """
        cost = volume_cost(units, record.amount, record.volume_tiers, used)
        return cost * usd_per_unit(record.currency, self.rates)

    def renewed(self, fresh: Iterable[PriceRecord]) -> PriceBook:
        """The book with ``fresh`` in place of what it had; what is not in ``fresh`` stays."""
        merged = self._by_key | {record.key: record for record in fresh}
        order = sorted(merged, key=lambda key: tuple(part or "" for part in key))
        return PriceBook(records=tuple(merged[key] for key in order), rates=self.rates)

    def joined(self, other: PriceBook) -> PriceBook:
        """Both books in one; where both have a price or a rate, that of ``other``."""
        book = self.renewed(other.records)
        rates = {(rate.currency, rate.on): rate for rate in (*self.rates, *other.rates)}
        return PriceBook(records=book.records, rates=tuple(rates[key] for key in sorted(rates)))


def shipped_book() -> PriceBook:
    """The dated snapshots that come with this release."""
    book = PriceBook()
    folder = resources.files("geo_ray.clouds") / _SNAPSHOTS
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            book = book.joined(parse_book(file.read_bytes(), file.name))
    return book


def parse_book(data: bytes, name: str) -> PriceBook:
    """A book from JSON.

    Raises:
        PriceBookError: it is not valid; names what is wrong.
    """
    try:
        return PriceBook.model_validate_json(data)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)[:5]
        ]
        raise PriceBookError(f"prices {name} are not valid: {'; '.join(wrong)}") from None


def load_book(path: Path) -> PriceBook:
    """Read a book from a file.

    Raises:
        PriceBookError: there is none, or it is not valid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise PriceBookError(f"prices {path} cannot be read: {error.strerror or error}") from None
    if len(data) > _MOST_BYTES:
        raise PriceBookError(f"prices {path} are larger than {_MOST_BYTES} bytes")
    return parse_book(data, str(path))
