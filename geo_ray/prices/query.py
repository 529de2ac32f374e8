"""Price queries to clouds: their results, the parsing of replies, and endpoint overrides.

A query that fails does not affect the others. `parse_endpoints` reads addresses to use instead
of a cloud's own: a private endpoint, a proxy, or a test server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import urlsplit

from geo_ray.base.errors import CloudError
from geo_ray.prices.price import Item, Market, PriceRecord
from geo_ray.prices.price_book import PriceBook


class SendQuery(Protocol):
    """A function that sends one query to a cloud."""

    def __call__(self) -> list[PriceRecord]:
        """Return the prices in the reply; raises CloudError."""


@dataclass(frozen=True, slots=True)
class Query:
    """A price query for one region.

    Attributes:
        cloud: name of the cloud.
        region: region of the cloud.
        item: kind of item.
        markets: markets to query.
        types: instance or disk types; none for egress.
        ask: sends the query.
    """

    cloud: str
    region: str
    item: Item
    markets: tuple[Market, ...]
    types: tuple[str, ...]
    ask: SendQuery = field(repr=False)

    @property
    def what(self) -> str:
        """Description of the query, for messages."""
        if self.item == "egress":
            return f"{self.cloud} {self.region} egress"
        return f"{self.cloud} {self.region} {' and '.join(self.markets)}"

    def covers(self, record: PriceRecord) -> bool:
        """Return whether a record answers this query."""
        return (
            (record.cloud, record.region, record.item) == (self.cloud, self.region, self.item)
            and record.market in self.markets
            and (not self.types or record.type in self.types)
        )

    def known(self, book: PriceBook) -> list[PriceRecord]:
        """Return the records of a book that answer this query."""
        return [record for record in book.records if self.covers(record)]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query.

    Attributes:
        query: the query.
        records: prices; items that are not offered are missing.
        error: why there are no records.
    """

    query: Query
    records: tuple[PriceRecord, ...] = ()
    error: CloudError | None = None

    @property
    def missing(self) -> list[str]:
        """Return the queried items without a price, such as ``p5.48xlarge (spot)``."""
        if self.error is not None:
            return []
        if self.query.item == "egress":
            return [] if self.records else ["egress"]
        found = {(record.type, record.market) for record in self.records}
        return [
            f"{type_} ({market})"
            for type_ in self.query.types
            for market in self.query.markets
            if (type_, market) not in found
        ]


def answer_to(query: Query) -> QueryResult:
    """Send a query; an error becomes part of the result."""
    try:
        return QueryResult(query, tuple(query.ask()))
    except CloudError as error:
        return QueryResult(query, error=error)


_LONGEST: Final = 300


def amount_of(value: object) -> float | None:
    """Return a price; None if it is absent or 0, which clouds send for items they do not sell.

    Raises:
        ValueError: the value is not a number, negative or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not an amount")
    amount = float(value)
    if amount < 0 or not math.isfinite(amount):
        raise ValueError(f"{value!r} is not an amount")
    return amount or None


@contextmanager
def making_sense(place: str) -> Iterator[None]:
    """Turn errors in reading a reply into a CloudError.

    Args:
        place: origin of the reply, for the message.

    Raises:
        CloudError: the reply is malformed.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = quoted(f"{type(error).__name__}: {error}")
        raise CloudError(f"{place}: the answer is not valid ({message})") from None


def quoted(text: str, secrets: Iterable[str | None] = ()) -> str:
    """Return a cloud's text on one line, shortened, without secrets that it may repeat."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."


_FIX = "Write --endpoint https://HOST, or --endpoint SERVICE=https://HOST for one service."


def parse_endpoints(texts: Iterable[str], services: Iterable[str]) -> dict[str, str]:
    """Return endpoint overrides by service.

    Args:
        texts: ``URL`` for all services, ``SERVICE=URL`` for one; later ones override earlier ones.
        services: services of the cloud.

    Raises:
        CloudError: a URL is invalid, or a service is unknown.
    """
    known = tuple(services)
    found: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = "", text
        if name and name not in known:
            raise CloudError(
                f"unknown service {name!r}; known services: {', '.join(known)}", fix=_FIX
            )
        _check(url)
        found.update(dict.fromkeys([name] if name else known, url.rstrip("/")))
    return found


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise CloudError("an endpoint must be an http or https URL", fix=_FIX)
    if parts.username is not None or parts.query or parts.path.strip("/"):
        raise CloudError(
            f"the endpoint at {parts.hostname} has more than a host and a port", fix=_FIX
        )
