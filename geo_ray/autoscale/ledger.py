"""What machines have cost, by region and by why they were rented: as quoted, and as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_BETWEEN: Final = "\t"


@dataclass(slots=True)
class SpendRow:
    """Dollars of one region for one reason.

    Attributes:
        machine_h: hours of machines.
        quoted_usd: what they would have cost at the price of the moment they were rented at.
        paid_usd: what they cost, at the prices of the time.
    """

    machine_h: float = 0.0
    quoted_usd: float = 0.0
    paid_usd: float = 0.0


@dataclass(slots=True)
class SpendLedger:
    """All rows.

    Attributes:
        rows: by region and reason.
    """

    rows: dict[str, SpendRow] = field(default_factory=dict)

    def add(
        self, region: str, reason: str, hours: float, quoted_usd: float, paid_usd: float
    ) -> None:
        """Book some hours of a machine."""
        row = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        row.machine_h += hours
        row.quoted_usd += quoted_usd
        row.paid_usd += paid_usd

    def move(self, region: str, reason: str, to_reason: str, row: SpendRow) -> None:
        """Book what was booked for one reason for another one."""
        mine = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        mine.machine_h = max(0.0, mine.machine_h - row.machine_h)
        mine.quoted_usd = max(0.0, mine.quoted_usd - row.quoted_usd)
        mine.paid_usd = max(0.0, mine.paid_usd - row.paid_usd)
        self.add(region, to_reason, row.machine_h, row.quoted_usd, row.paid_usd)

    def row(self, region: str, reason: str) -> SpendRow:
        """Return one row."""
        return self.rows.get(f"{region}{_BETWEEN}{reason}", SpendRow())

    def by_region_and_reason(self) -> list[tuple[str, str, SpendRow]]:
        """Return all rows, sorted."""
        found = []
        for key in sorted(self.rows):
            region, _, reason = key.partition(_BETWEEN)
            found.append((region, reason, self.rows[key]))
        return found

    @property
    def paid_usd(self) -> float:
        """All that was paid so far."""
        return sum(row.paid_usd for row in self.rows.values())

    @property
    def quoted_usd(self) -> float:
        """The same at the prices of the moments that machines were rented at."""
        return sum(row.quoted_usd for row in self.rows.values())
