"""The sample books of one region: who holds which rows, and what became of them.

Positions of the region's stream are handed out in order; what a lost worker held goes back to the
pool and is handed out first, so every row is applied once or discarded for a named reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from geo_ray.errors import InvariantError
from geo_ray.types import Span


@dataclass(slots=True)
class Ledger:
    """Assigned = applied + in flight + returned + discarded, at every moment.

    Attributes:
        cursor: the next position that nobody had yet.
        returned: spans of lost workers, lowest first.
        in_flight: spans by worker rank.
        applied: rows whose gradient changed the model or took part in a round.
        discarded: rows by the reason why their gradient was refused.
    """

    cursor: int = 0
    returned: list[Span] = field(default_factory=list)
    in_flight: dict[int, Span] = field(default_factory=dict)
    applied: int = 0
    discarded: Counter[str] = field(default_factory=Counter)

    def assign(self, worker: int, count: int) -> Span:
        """Hand ``count`` rows to ``worker``: returned ones first, else the next of the stream.

        A worker that already holds a span (it was replaced) gets the same again.
        """
        if worker in self.in_flight:
            return self.in_flight[worker]
        if self.returned:
            span = self.returned.pop(0)
        else:
            span = Span(self.cursor, count)
            self.cursor += count
        self.in_flight[worker] = span
        return span

    def take_back(self, worker: int) -> None:
        """Return the span of a worker that is gone for good to the pool."""
        span = self.in_flight.pop(worker, None)
        if span is not None:
            self.returned.append(span)
            self.returned.sort(key=lambda s: s.start)

    def settle(self, worker: int, refused: str | None = None) -> Span:
        """Book ``worker``'s span as applied, or as discarded for the reason ``refused``.

        Raises:
            InvariantError: if it holds none.
        """
        span = self.in_flight.pop(worker, None)
        if span is None:
            raise InvariantError(f"worker {worker} reported rows that it was not assigned")
        if refused is None:
            self.applied += span.count
        else:
            self.discarded[refused] += span.count
        return span

    def check(self) -> None:
        """Raise `InvariantError` unless the books balance."""
        open_rows = sum(s.count for s in self.in_flight.values())
        pool_rows = sum(s.count for s in self.returned)
        booked = self.applied + sum(self.discarded.values()) + open_rows + pool_rows
        if booked != self.cursor:
            raise InvariantError(f"sample books: {self.cursor} rows assigned, {booked} booked")

    def export(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        spans = {str(w): [s.start, s.count] for w, s in self.in_flight.items()}
        return {
            "cursor": self.cursor,
            "returned": [[s.start, s.count] for s in self.returned],
            "in_flight": spans,
            "applied": self.applied,
            "discarded": dict(self.discarded),
        }

    @classmethod
    def restore(cls, data: dict[str, object]) -> Ledger:
        """The ledger of `export`. Spans in flight stay with their worker's rank."""
        raw: dict[str, object] = dict(data)
        in_flight = raw["in_flight"]
        returned = raw["returned"]
        discarded = raw["discarded"]
        if not (
            isinstance(in_flight, dict)
            and isinstance(returned, list)
            and isinstance(discarded, dict)
        ):
            raise InvariantError(f"sample books of another shape: {sorted(raw)}")
        return cls(
            cursor=int(str(raw["cursor"])),
            returned=[Span(int(s), int(n)) for s, n in returned],
            in_flight={int(w): Span(int(v[0]), int(v[1])) for w, v in in_flight.items()},
            applied=int(str(raw["applied"])),
            discarded=Counter({str(k): int(v) for k, v in discarded.items()}),
        )
