"""Pulls of one version from several shards: who may still fetch what, and what is kept for it.

A worker is told a version by the primary shard and then fetches its slices from all shards. Between
the two the region may go on: a merge, or another worker's gradient in mode ``async``. So every
change of the shards comes with the pulls that are open, and a shard that has one of them still to
serve keeps a copy of what it is about to change. In most steps nobody is late, and nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from geo_ray.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker may fetch this from every shard, until it is heard of again.

    Attributes:
        worker: its rank.
        ticket: number of the pull, larger than those before.
        version: how many changes the parameters hold.
        judged: not the live parameters, but those that an evaluation is about.
    """

    worker: int
    ticket: int
    version: int
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One operation that may change the parameters of every shard.

    Attributes:
        version: what it makes.
        pulls: those that are open, all of older versions.
    """

    version: int
    pulls: tuple[Pull, ...] = ()


@dataclass(slots=True)
class OpenPulls:
    """The primary shard's side: what workers were told.

    Attributes:
        version: how many changes were asked of the shards.
    """

    version: int = 0
    _tickets: int = 0
    _open: dict[int, Pull] = field(default_factory=dict)

    def tell(self, worker: int, *, judged: bool = False) -> Pull:
        """Let a worker fetch the present version."""
        self._tickets += 1
        pull = Pull(worker, self._tickets, self.version, judged)
        self._open[worker] = pull
        return pull

    def heard(self, worker: int) -> None:
        """A worker spoke, or is gone: it has what it was told, or wants it no more."""
        self._open.pop(worker, None)

    def change(self) -> Change:
        """The next operation on the shards."""
        self.version += 1
        return Change(self.version, tuple(self._open.values()))


@dataclass(slots=True)
class HeldVersions:
    """A shard's side: the present version, and copies of older ones that somebody waits for.

    Attributes:
        version: how many changes the parameters hold.
    """

    version: int = 0
    _served: dict[int, int] = field(default_factory=dict)
    _copies: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    def before(self, change: Change, present: Callable[[bool], Tensor]) -> None:
        """Keep what ``change`` is about to overwrite, where a pull of it is still to be served.

        Args:
            change: which.
            present: gives the live parameters, or those that are evaluated.
        """
        waiting = [p for p in change.pulls if self._served.get(p.worker, 0) < p.ticket]
        wanted = {(pull.version, pull.judged) for pull in waiting}
        self._copies = {key: copy for key, copy in self._copies.items() if key in wanted}
        for version, judged in wanted - self._copies.keys():
            if version == self.version:
                self._copies[version, judged] = present(judged).clone()
        self.version = change.version

    def fetch(self, pull: Pull, present: Callable[[bool], Tensor]) -> Tensor:
        """What a worker was told that it may fetch: live, or a copy; not to be changed.

        Raises:
            InvariantError: if it is not here, because its worker was heard of since.
        """
        self._served[pull.worker] = max(pull.ticket, self._served.get(pull.worker, 0))
        if pull.version == self.version:
            return present(pull.judged)
        copy = self._copies.get((pull.version, pull.judged))
        if copy is None:
            raise InvariantError(
                f"worker {pull.worker} asks for version {pull.version} of a shard, which has "
                f"{self.version} and no copy"
            )
        return copy
