"""One question to a cloud, and what came of it; a question that fails takes no other with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from geo_ray.clouds.price import Item, Market, PriceRecord
from geo_ray.clouds.price_book import PriceBook
from geo_ray.errors import CloudError


@dataclass(frozen=True, slots=True)
class Query:
    """A question about one region.

    Attributes:
        cloud: which.
        region: of it.
        item: what is asked for.
        markets: in which markets.
        types: of instances or disks; none for egress.
        ask: asks; raises CloudError.
    """

    cloud: str
    region: str
    item: Item
    markets: tuple[Market, ...]
    types: tuple[str, ...]
    ask: Callable[[], list[PriceRecord]] = field(repr=False)

    @property
    def what(self) -> str:
        """For messages."""
        if self.item == "egress":
            return f"{self.cloud} {self.region} egress"
        return f"{self.cloud} {self.region} {' and '.join(self.markets)}"

    def covers(self, record: PriceRecord) -> bool:
        """Whether a record is an answer to this question."""
        return (
            (record.cloud, record.region, record.item) == (self.cloud, self.region, self.item)
            and record.market in self.markets
            and (not self.types or record.type in self.types)
        )

    def known(self, book: PriceBook) -> list[PriceRecord]:
        """What a book knows already of what is asked."""
        return [record for record in book.records if self.covers(record)]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a cloud said.

    Attributes:
        query: what it was asked.
        records: prices; may lack what was asked for, if it is not sold there.
        error: why there are none.
    """

    query: Query
    records: tuple[PriceRecord, ...] = ()
    error: CloudError | None = None

    @property
    def missing(self) -> list[str]:
        """What was asked for and has no price there, such as ``p5.48xlarge (spot)``."""
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
    """Ask; an error is an answer, too."""
    try:
        return QueryResult(query, tuple(query.ask()))
    except CloudError as error:
        return QueryResult(query, error=error)
