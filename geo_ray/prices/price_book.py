"""The price book: all known prices by item, and the hardware of the instance types in it.

`known_book` reads the shipped snapshots, the user's file and GEO_RAY_PRICES. A refresh never drops
prices that could not be read. Hardware (accelerators, memory, sustained network) is known only for
the types of the shipped prices.

Source of hardware: AWS instance type pages, as of 2026, undated. Sizes are nominal, with a GB of
10^9 bytes, which is conservative. Values in a configuration take precedence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from geo_ray.base.errors import ConfigError, PriceBookError, PriceUnknownError
from geo_ray.base.load import complaints
from geo_ray.base.model import StrictModel
from geo_ray.base.yaml import parse_yaml
from geo_ray.prices.price import (
    ANYWHERE,
    GB_PER_MBPS_MONTH,
    INTERNET,
    UNITS,
    ExchangeRate,
    Market,
    PriceRecord,
    billed_hours,
    usd_per_unit,
    volume_cost,
)

VARIABLE: Final = "GEO_RAY_PRICES"
DEFAULT_FILE: Final = "prices.json"
YAML_SUFFIXES: Final = (".yaml", ".yml")

_MOST_BYTES: Final = 64 * 1024 * 1024
_SNAPSHOTS: Final = "snapshots"


class PriceBook(StrictModel):
    """Prices and exchange rates; a price file holds this class as JSON."""

    version: Literal[1] = Field(1, description="version of the format")
    records: tuple[PriceRecord, ...] = Field(
        (), description="prices; the newest record of an item counts"
    )
    rates: tuple[ExchangeRate, ...] = Field(
        (), description="exchange rates; the newest of a currency counts"
    )

    @cached_property
    def _by_key(self) -> dict[tuple[str | None, ...], PriceRecord]:
        return {record.key: record for record in sorted(self.records, key=attrgetter("fetched_at"))}

    @cached_property
    def _instances(self) -> dict[tuple[str | None, ...], list[PriceRecord]]:
        found: dict[tuple[str | None, ...], list[PriceRecord]] = {}
        for r in self._by_key.values():
            if r.item == "instance":
                found.setdefault((r.cloud, r.region, r.type, r.market), []).append(r)
        return found

    def instance(
        self, cloud: str, region: str, type_: str, market: Market = "on_demand"
    ) -> PriceRecord:
        """Return the price of an instance type in a region.

        It is the price of the whole region, unless prices of its zones are newer: then the price of
        the most expensive zone, since zones are not chosen. A sold-out zone counts only if all are
        sold out.

        Raises:
            PriceUnknownError: the price is unknown.
        """
        found = self._instances.get((cloud, region, type_, market))
        if not found:
            raise PriceUnknownError(f"no {market} price of {cloud} {type_} in {region}")
        newest = max(record.fetched_at for record in found)
        whole = next((record for record in found if record.zone is None), None)
        if whole is not None and whole.fetched_at == newest:
            return whole
        zones = [record for record in found if record.zone is not None]
        return min(zones, key=_last_choice)

    def disk(self, cloud: str, region: str, type_: str) -> PriceRecord:
        """Return the monthly price of a GB of disk.

        Raises:
            PriceUnknownError: the price is unknown.
        """
        key = (cloud, region, None, "disk", type_, None, "on_demand", "GB-month")
        found = self._by_key.get(key)
        if found is None:
            raise PriceUnknownError(f"no price of disk {type_} of {cloud} in {region}")
        return found

    def egress(self, cloud: str, src: str, dst: str) -> PriceRecord:
        """Return the price of traffic from ``src`` to ``dst``, or else to any other region.

        Per GB if there is such a price, else per Mbit/s and month.

        Args:
            cloud: cloud of the source, which is billed.
            src: source region.
            dst: another region of the same cloud, or 'internet' for everything else.

        Raises:
            PriceUnknownError: the price is unknown. Traffic inside a region has no price, and '*'
                excludes the internet.
        """
        elsewhere = () if dst in (INTERNET, src) else (ANYWHERE,)
        for to in (dst, *elsewhere):
            for unit in UNITS["egress"]:
                found = self._by_key.get((cloud, src, None, "egress", None, to, "on_demand", unit))
                if found is not None:
                    return found
        raise PriceUnknownError(f"no price of {cloud} egress from {src} to {dst}")

    def usd_of_hours(self, record: PriceRecord, hours: float, age_h: float = 0.0) -> float:
        """Return the cost of an instance for ``hours`` in US dollars.

        Args:
            record: its price.
            hours: billed hours.
            age_h: age of the instance at their start.

        Raises:
            CurrencyError: its currency has no exchange rate.
        """
        each = record.amount * usd_per_unit(record.currency, self.rates)
        return each * billed_hours(hours, record.age_tiers, age_h)

    def usd_of_volume(self, record: PriceRecord, units: float, used: float = 0.0) -> float:
        """Return the cost of ``units`` GB in a month with ``used`` GB so far, in US dollars.

        Prices per Mbit/s and month are converted for constant traffic; bursts cost more.

        Raises:
            CurrencyError: its currency has no exchange rate.
        """
        per_gb = 1.0 / GB_PER_MBPS_MONTH if record.unit == "Mbps-month" else 1.0
        cost = volume_cost(units * per_gb, record.amount, record.volume_tiers, used * per_gb)
        return cost * usd_per_unit(record.currency, self.rates)

    def renewed(self, fresh: Iterable[PriceRecord]) -> PriceBook:
        """Return the book with new prices of a cloud in place of earlier ones.

        Zones are replaced together: the old price of a zone that is no longer listed is removed,
        since no machine can be launched there.
        """
        fresh = list(fresh)
        read_at = {_zones(record): record.fetched_at for record in fresh if record.zone is not None}
        retained = [
            record
            for record in self._by_key.values()
            if record.zone is None
            or record.fetched_at >= read_at.get(_zones(record), record.fetched_at)
        ]
        return _merged([*retained, *fresh], self.rates)

    def joined(self, other: PriceBook) -> PriceBook:
        """Merge two books; records and rates of ``other`` have precedence."""
        rates = {(rate.currency, rate.on): rate for rate in (*self.rates, *other.rates)}
        records = [*self._by_key.values(), *other._by_key.values()]
        return _merged(records, tuple(rates[key] for key in sorted(rates)))


def _zones(record: PriceRecord) -> tuple[str | None, ...]:
    """Return the key without the zone."""
    return (*record.key[:2], *record.key[3:])


def _last_choice(record: PriceRecord) -> tuple[bool, float]:
    """Sort key of zone prices: zones with machines first, then the highest price."""
    return record.availability == "none", -record.amount


def _texts(key: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(part or "" for part in key)


def _merged(records: Iterable[PriceRecord], rates: tuple[ExchangeRate, ...]) -> PriceBook:
    """Return the last record of each key, in a stable order."""
    by_key = {record.key: record for record in records}
    order = sorted(by_key, key=_texts)
    return PriceBook(records=tuple(by_key[key] for key in order), rates=rates)


def bundled_book() -> PriceBook:
    """Return the dated snapshots of this release."""
    book = PriceBook()
    folder = resources.files("geo_ray.prices") / _SNAPSHOTS
    for file in sorted(folder.iterdir(), key=attrgetter("name")):
        if file.name.endswith(".json"):
            book = book.joined(parse_book(file.read_bytes(), file.name))
    return book


def parse_book(data: bytes | str, name: str, written: bytes | None = None) -> PriceBook:
    """Parse a price book from JSON.

    Args:
        data: the JSON text.
        name: name of the book in messages.
        written: original YAML text, if the JSON was converted from YAML.

    Raises:
        PriceBookError: it is invalid; the message names the problem.
    """
    try:
        return PriceBook.model_validate_json(data)
    except ValidationError as error:
        wrong = complaints(error, PriceBook, data if written is None else written)
        raise PriceBookError(f"prices {name} are not valid: {wrong}") from None


def load_book(path: Path) -> PriceBook:
    """Read a price book from a file, as YAML or JSON by its name.

    Raises:
        PriceBookError: the file is missing or invalid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise PriceBookError(
            f"prices {path} cannot be read: {error.strerror or error}",
            fix="Name a readable price file.",
        ) from None
    if len(data) > _MOST_BYTES:
        raise PriceBookError(f"prices {path} are larger than {_MOST_BYTES} bytes")
    if path.suffix not in YAML_SUFFIXES:
        return parse_book(data, str(path))
    try:
        tree = parse_yaml(data.decode("utf-8-sig"), str(path)).value
    except (ConfigError, UnicodeDecodeError) as error:
        text = error.message if isinstance(error, ConfigError) else f"{path}: not UTF-8 text"
        fix = error.fix if isinstance(error, ConfigError) else "Save the file as UTF-8."
        raise PriceBookError(f"prices {text}", fix=fix) from None
    return parse_book(json.dumps({} if tree is None else tree), str(path), data)


def dump_book(book: PriceBook) -> bytes:
    """Return the book as JSON text, one line per record."""

    def lines(items: Iterable[StrictModel]) -> str:
        shown = (item.model_dump(mode="json", exclude_none=True) for item in items)
        rows = [json.dumps({k: v for k, v in row.items() if v != []}) for row in shown]
        return ("\n  " + ",\n  ".join(rows) + "\n ") if rows else ""

    records, rates = lines(book.records), lines(book.rates)
    text = f'{{"version": {book.version},\n "records": [{records}],\n "rates": [{rates}]}}\n'
    return text.encode()


def known_book(paths: Iterable[Path]) -> PriceBook:
    """Return the shipped prices and those of files; later files override earlier ones.

    Raises:
        PriceBookError: a file is unreadable or invalid.
    """
    book = bundled_book()
    for path in paths:
        book = book.joined(load_book(path))
    return book


def own_files() -> list[Path]:
    """Return the user's files.

    Those in GEO_RAY_PRICES, else ``prices.json`` in the current directory.
    """
    named = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    here = Path(DEFAULT_FILE)
    return named or ([here] if here.exists() else [])


@dataclass(frozen=True, slots=True)
class Instance:
    """Hardware of a machine type; None: unknown.

    Attributes:
        accelerators: number of accelerators; each takes a worker.
        accelerator_gb: memory of one accelerator; None also if there is none.
        host_gb: memory of the machine.
        network_gbps: sustained network rate.
    """

    accelerators: int | None = None
    accelerator_gb: float | None = None
    host_gb: float | None = None
    network_gbps: float | None = None


INSTANCES: Final[dict[tuple[str, str], Instance]] = {
    ("aws", "c5a.2xlarge"): Instance(0, None, 16, 2.5),
    ("aws", "m5.2xlarge"): Instance(0, None, 32, 2.5),
    ("aws", "g4dn.xlarge"): Instance(1, 16, 16, 5),
    ("aws", "g5.xlarge"): Instance(1, 24, 16, 2.5),
    ("aws", "g6.2xlarge"): Instance(1, 24, 32, 5),
    ("aws", "p4d.24xlarge"): Instance(8, 40, 1152, 400),
    ("aws", "p5.4xlarge"): Instance(1, 80, 256, 100),
    ("aws", "p5.48xlarge"): Instance(8, 80, 2048, 3200),
}
"""Hardware by cloud and type."""


def instance_of(cloud: str, kind: str) -> Instance:
    """Return the hardware of a type."""
    return INSTANCES.get((cloud, kind), Instance())
