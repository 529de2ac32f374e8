"""Queries to clouds and their results; a query that fails does not affect others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from geo_ray.clouds.price import Item, Market, PriceRecord
from geo_ray.clouds.price_book import PriceBook
from geo_ray.errors import CloudError


@dataclass(frozen=True, slots=True)
class Query:
    """A query about one region.

    Attributes:
        cloud: name of the cloud.
        region: region of the cloud.
        item: item that is asked for.
        markets: markets that are asked for.
        types: types of instances or disks; none for egress.
        ask: sends the query; raises CloudError.
    """

    cloud: str
    region: str
    item: Item
    markets: tuple[Market, ...]
    types: tuple[str, ...]
    ask: Callable[[], list[PriceRecord]] = field(repr=False)

    @property
    def what(self) -> str:
        """The query in words, for messages."""
        if self.item == "egress":
            return f"{self.cloud} {self.region} egress"
        return f"{self.cloud} {self.region} {' and '.join(self.markets)}"

    def covers(self, record: PriceRecord) -> bool:
        """Return whether a record is an answer to this query."""
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
        records: prices; may lack items that are not sold there.
        error: why there are no records, if there are none.
    """

    query: Query
    records: tuple[PriceRecord, ...] = ()
    error: CloudError | None = None

    @property
    def missing(self) -> list[str]:
        """Return the queried items without a price there, such as ``p5.48xlarge (spot)``."""
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
    """Send a query; an error is a result, too."""
    try:
        return QueryResult(query, tuple(query.ask()))
    except CloudError as error:
        return QueryResult(query, error=error)
