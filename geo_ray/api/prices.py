"""Prices of instances and traffic: `prices` and `refresh_prices`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from geo_ray.api.config import FilePath
from geo_ray.api.display import RunWatch, ShowProgress, Table
from geo_ray.base.errors import CloudError, ConfigError, PriceBookError, PriceUnknownError
from geo_ray.base.files import write_atomic
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import age_text, nearest_word, number_text
from geo_ray.prices.price import PriceRecord
from geo_ray.prices.price_book import (
    YAML_SUFFIXES,
    PriceBook,
    dump_book,
    known_book,
    load_book,
    own_files,
)
from geo_ray.prices.query import Query, QueryResult, answer_to, parse_endpoints

CLOUDS: Final = ("aws", "tencent")
"""Clouds whose prices can be fetched."""

_WORDS = ("cloud", "region", "zone", "item", "type", "to", "market", "currency", "unit", "source")


@dataclass(frozen=True, repr=False)
class PriceList:
    """Known prices.

    Attributes:
        book: prices and exchange rates.
        at_unix_s: time of the lookup.
    """

    book: PriceBook
    at_unix_s: float

    def table(self) -> Table:
        """Return a row per price."""
        rows = [
            {name: getattr(record, name) for name in _WORDS}
            | {"amount": record.amount, "age_s": record.age_s(self.at_unix_s)}
            for record in self.book.records
        ]
        return Table(rows, dict.fromkeys(_WORDS, str) | {"amount": float, "age_s": float})

    def __repr__(self) -> str:
        stale = sum(record.is_stale(self.at_unix_s) for record in self.book.records)
        return f"<Prices: {len(self.book.records)}, {stale} of them stale>"

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{record.cloud} {record.zone or record.region}",
                str(record.type or record.item),
                record.market,
                f"{number_text(record.amount)} {record.currency}/{record.unit}",
                age_text(record.age_s(self.at_unix_s)),
            )
            for record in self.book.records
        ]
        return html_view(repr(self)[1:-1], ("place", "what", "market", "price", "age"), rows)


def prices(
    files: Sequence[FilePath] = (),
    *,
    cloud: str | None = None,
    region: str | None = None,
    machine: str | None = None,
    stale: bool = False,
) -> PriceList:
    """Return the known prices: those of your files and those of this release.

    Args:
        files: your price files; later files override earlier ones; default: those in
            GEO_RAY_PRICES, else ``prices.json`` in the working directory.
        cloud: only prices of this cloud.
        region: only prices of this region.
        machine: only prices of this instance type.
        stale: only outdated prices.

    Raises:
        PriceBookError: a file cannot be read, or is not valid.
        PriceUnknownError: no such price is known.
    """
    book = known_book([Path(file) for file in files] or own_files())
    now = time.time()
    asked = {"cloud": cloud, "region": region, "type": machine}
    found = [
        record
        for record in book.records
        if all(word in (None, getattr(record, name)) for name, word in asked.items())
    ]
    if not found:
        raise _unknown(asked, book.records)
    records = tuple(record for record in found if not stale or record.is_stale(now))
    return PriceList(PriceBook(records=records, rates=book.rates), now)


@dataclass(frozen=True, repr=False)
class PriceRefresh:
    """A cloud's answers about its prices.

    Attributes:
        path: the updated file.
        answers: one per request; a failed request has an error.
        stored: older prices that stay because their request failed.
    """

    path: Path
    answers: tuple[QueryResult, ...]
    stored: tuple[PriceRecord, ...]

    @property
    def records(self) -> tuple[PriceRecord, ...]:
        """All fetched prices."""
        return tuple(record for answer in self.answers for record in answer.records)

    @property
    def failed(self) -> tuple[QueryResult, ...]:
        """Failed requests."""
        return tuple(answer for answer in self.answers if answer.error is not None)

    def table(self) -> Table:
        """Return a row per request; ``error`` is null if it succeeded."""
        kinds = {"question": str, "read": int, "missing": str, "error": str}
        rows = [
            {
                "question": answer.query.what,
                "read": len(answer.records),
                "missing": ", ".join(answer.missing),
                "error": None if answer.error is None else answer.error.message,
            }
            for answer in self.answers
        ]
        return Table(rows, kinds)

    def __repr__(self) -> str:
        read, failed = len(self.records), len(self.failed)
        return f"<PriceRefresh {self.path}: {read} prices read, {failed} requests failed>"

    def _repr_html_(self) -> str:
        rows = [
            (row["question"], str(row["read"]), row["error"] or row["missing"])
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], ("question", "prices", "not read"), rows)


def refresh_prices(
    cloud: str,
    *,
    regions: Sequence[str] = (),
    types: Sequence[str] = (),
    file: FilePath | None = None,
    endpoints: Sequence[str] = (),
    currency: str | None = None,
    tries: int = 5,
    progress: ShowProgress = False,
) -> PriceRefresh:
    """Fetch the current prices of a cloud and store them in a file, even after an interrupt.

    A price that cannot be read keeps its old value. Credentials are those of the cloud's own
    tools; reading prices costs nothing and starts nothing.

    Args:
        cloud: one of `CLOUDS`.
        regions: regions of the cloud; empty: those with known prices.
        types: instance types; empty: those with a known price in the region.
        file: JSON file to update; default: the first JSON file in GEO_RAY_PRICES, else
            ``prices.json`` in the working directory. Its other records stay.
        endpoints: other endpoints, each ``[SERVICE=]URL``.
        currency: tencent: billing currency; default: CNY.
        tries: attempts per call.
        progress: report requests and failures on standard error.

    Raises:
        ConfigError: an argument is not valid for this cloud.
        CloudError: credentials are missing, or no price could be read.
        PriceBookError: a price file is not valid, or cannot be written.
    """
    if cloud not in CLOUDS:
        raise ConfigError(f"{cloud!r} is not supported", fix=f"Choose among {', '.join(CLOUDS)}.")
    if currency is not None and cloud != "tencent":
        raise ConfigError(
            "--currency is only for tencent; other clouds state their currency", fix="Omit it."
        )
    target = _target(file)
    others = [path for path in own_files() if path != target]
    before = known_book([*others, *([target] if target.exists() else [])])
    wanted = _types_by_region(cloud, regions, types, before)
    try:
        queries = _queries(cloud, wanted, endpoints, currency, tries)
    except CloudError:  # missing credentials: no request was sent
        known = [r for r in before.records if r.cloud == cloud and r.region in wanted]
        RunWatch(progress).notify(_stored_text(known))
        raise
    answers: list[QueryResult] = []
    try:
        _ask_all(queries, answers, before, shown=bool(progress))
    finally:
        if any(answer.records for answer in answers):
            _write(answers, target)
    stored = tuple(r for a in answers if a.error is not None for r in a.query.known(before))
    done = PriceRefresh(target, tuple(answers), stored)
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors and not done.records:
        raise CloudError(
            f"no price was read, {target} is unchanged; {errors[0].message}", fix=errors[0].fix
        )
    return done


def _target(file: FilePath | None) -> Path:
    if file is None:
        json_files = [path for path in own_files() if path.suffix not in YAML_SUFFIXES]
        return json_files[0] if json_files else Path("prices.json")
    if Path(file).suffix in YAML_SUFFIXES:
        raise ConfigError(f"{file}: prices are written as JSON", fix="Give a .json file.")
    return Path(file)


def _types_by_region(
    cloud: str, named: Sequence[str], types: Sequence[str], book: PriceBook
) -> dict[str, tuple[str, ...]]:
    known = [r for r in book.records if r.cloud == cloud and r.item == "instance"]
    regions = named or sorted({record.region for record in known})
    if not regions:
        raise ConfigError(f"no price of {cloud} is known yet", fix="Give --regions.")
    found = {}
    for region in regions:
        there = sorted({str(record.type) for record in known if record.region == region})
        found[region] = tuple(types) or tuple(there)
        if not found[region]:
            raise ConfigError(f"no price of {cloud} in {region} is known yet", fix="Give --types.")
    return found


def _queries(
    cloud: str,
    types: Mapping[str, tuple[str, ...]],
    endpoints: Sequence[str],
    currency: str | None,
    tries: int,
) -> list[Query]:
    if cloud == "aws":
        from geo_ray.prices.aws import SERVICES as AWS_SERVICES
        from geo_ray.prices.aws import Aws, aws_queries

        return aws_queries(Aws(parse_endpoints(endpoints, AWS_SERVICES), attempts=tries), types)
    from geo_ray.prices.tencent import SERVICES as TENCENT_SERVICES
    from geo_ray.prices.tencent import Tencent, tencent_queries

    endpoint = parse_endpoints(endpoints, TENCENT_SERVICES).get("cvm")
    if currency is None and "intl" in (endpoint or ""):
        raise ConfigError("accounts of that site may not pay in CNY", fix="Give your --currency.")
    return tencent_queries(Tencent(endpoint, attempts=tries), types, currency or "CNY")


def _ask_all(
    queries: Sequence[Query], answers: list[QueryResult], before: PriceBook, *, shown: bool
) -> None:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        bar = progress.add_task("", total=len(queries))
        for query in queries:
            progress.update(bar, description=query.what)
            answers.append(answer_to(query))
            progress.advance(bar)
            if shown and (text := _trouble(answers[-1], before)):
                color = None if answers[-1].error is None else "red"
                progress.console.print(
                    text, style=color, highlight=False, markup=False, soft_wrap=True
                )


def _trouble(answer: QueryResult, before: PriceBook) -> str:
    """Return a message about an incomplete answer, or ""."""
    what = answer.query.what
    if answer.error is not None:
        stored = _stored_text(answer.query.known(before))
        return f"{what} was not read: {answer.error.message}\n  {stored}"
    return f"{what}: no price of {', '.join(answer.missing)}" if answer.missing else ""


def _write(answers: Sequence[QueryResult], target: Path) -> None:
    fresh = [record for answer in answers for record in answer.records]
    try:
        # Read the file again, because another refresh may have changed it.
        old = load_book(target) if target.exists() else PriceBook()
        write_atomic(target, dump_book(old.renewed(fresh)))
    except OSError as error:
        raise PriceBookError(
            f"prices {target} cannot be written: {error.strerror or error}",
            fix="Choose another file with --file.",
        ) from None


def _stored_text(stored: Sequence[PriceRecord]) -> str:
    if not stored:
        return "no older price is known"
    now = time.time()
    old = age_text(max(record.age_s(now) for record in stored))
    stale = sum(record.is_stale(now) for record in stored)
    count = "1 older price stays" if len(stored) == 1 else f"{len(stored)} older prices stay"
    return f"{count}, the oldest {old} old, {stale} stale"


def _unknown(asked: Mapping[str, str | None], records: Sequence[PriceRecord]) -> PriceUnknownError:
    """Return the error about an unknown price; it suggests the nearest known word."""
    what = ", ".join(f"{name} '{word}'" for name, word in asked.items() if word is not None)
    for name, word in asked.items():
        known = {str(getattr(record, name)) for record in records}
        if word is not None and word not in known:
            near = nearest_word(word, known)
            hint = f"; did you mean {near}?" if near else ""
            return PriceUnknownError(f"no price is known of {name} '{word}'{hint}")
    return PriceUnknownError(f"no price is known of {what or 'anything'}")
