"""What a job has during one slot: workers and parameter servers by site, and its batch."""

from __future__ import annotations

from dataclasses import dataclass

Counts = tuple[tuple[int, int], ...]
"""(number of the site, how many), ascending by site; none of them 0."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """See the module's docstring.

    Attributes:
        workers: by site.
        servers: parameter servers by site.
        batch: rows of a step of all workers together.
    """

    workers: Counts
    servers: Counts
    batch: int

    @property
    def num_workers(self) -> int:
        """Workers of all sites."""
        return sum(count for _, count in self.workers)

    @property
    def num_servers(self) -> int:
        """Parameter servers of all sites."""
        return sum(count for _, count in self.servers)

    @property
    def sites(self) -> tuple[int, ...]:
        """Every site that is used, ascending."""
        return tuple(sorted({site for site, _ in (*self.workers, *self.servers)}))


def counts_of(by_site: dict[int, int]) -> Counts:
    """Return counts in their order, without sites that have none."""
    return tuple(sorted((site, count) for site, count in by_site.items() if count))
