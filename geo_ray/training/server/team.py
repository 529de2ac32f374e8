"""A region's team: which workers are there, and who computes which share of the step.

A step is made of *shares*, one for each rank: its rows are those that this rank is assigned. Where
all are there, each computes its own. A worker whose gradient lies in its own memory while the step
is not complete has *lent* it: before it computes another share, shards must keep a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from geo_ray.training.server.elastic import ElasticConfig
from geo_ray.types import StepReport


class Team:
    """See the module's docstring.

    Attributes:
        ranks: 0 to ranks - 1 belong to the region.
        elastic: the rule for missing ones; None: steps wait for them.
        joined: workers that are there.
        awaited: ranks that the next step waits for.
        leaving: workers that are to go home when they have pushed what they compute.
        idle: workers that wait for rows.
        computes: shares that are being computed, by worker.
        lent: pushed shares that no step has used yet and that lie with their worker, by worker.
        step: shares of the step under way; empty between two.
    """

    def __init__(self, ranks: int, elastic: ElasticConfig | None = None) -> None:
        self.ranks = ranks
        self.elastic = elastic
        self.joined: set[int] = set()
        self.awaited = set(range(ranks))
        self.leaving: set[int] = set()
        self.idle: set[int] = set()
        self.computes: dict[int, int] = {}
        self.lent: dict[int, int] = {}
        self.step: set[int] = set()
        self._pushed_by: dict[int, int] = {}
        self._told = set(range(ranks))

    # -------------------------------------------------------------- who is there

    def join(self, worker: int) -> int | None:
        """A worker, new or replaced, is here; the share that went with its predecessor's memory."""
        self.leaving.discard(worker)
        self.awaited.discard(worker)
        self.joined.add(worker)
        self.idle.add(worker)
        return self.lent.pop(worker, None)

    def leave(self, worker: int) -> int | None:
        """A worker is gone; the share that it was computing, if it was."""
        self.joined.discard(worker)
        self.idle.discard(worker)
        if self.elastic is None:
            self.awaited.add(worker)
        else:
            self.awaited.discard(worker)
        return self.computes.pop(worker, None)

    def goers(self) -> dict[int, int | None]:
        """Those that wait and are to go home, with what they had lent; they are not here now."""
        going = {
            worker: self.lent.pop(worker, None) for worker in sorted(self.leaving & self.waiting)
        }
        for worker in going:
            self.leave(worker)
            self.leaving.discard(worker)
        return going

    @property
    def present(self) -> set[int]:
        """Workers that take part: they are here, and stay."""
        return self.joined - self.leaving

    @property
    def may_work(self) -> bool:
        """Whether enough are there for anybody to be given rows."""
        least = 0 if self.elastic is None else self.elastic.least(self.ranks)
        return not self.awaited and len(self.present) >= least

    def news(self) -> tuple[int, ...] | None:
        """Who takes part, if that has changed since it was last asked."""
        if self.elastic is None or self.awaited or self.present == self._told:
            return None
        self._told = self.present
        return tuple(sorted(self._told))

    # -------------------------------------------------------------- who computes what

    @property
    def follows(self) -> bool:
        """Whether a step has the shares of those only that are there when it begins."""
        return self.elastic is not None and self.elastic.batch == "follows"

    def begin(self) -> None:
        """Begin a step, unless one is under way."""
        if not self.step:
            self.step = self.present if self.follows else set(range(self.ranks))

    def give_up(self, share: int) -> None:
        """The step under way does without this share."""
        self.step.discard(share)

    def is_whole(self, pushed: Collection[int]) -> bool:
        """Whether these shares make the step under way."""
        return bool(self.step) and self.step <= set(pushed)

    def deal(self, pushed: Collection[int]) -> dict[int, int]:
        """Open shares by those who are to compute them next: their own, else any."""
        left = self.step - set(pushed) - set(self.computes.values())
        takers = self.idle & self.present
        dealt = {worker: worker for worker in sorted(takers & left)}
        if self.elastic is not None:
            helpers = sorted(takers - left) + sorted(self.present & self.lent.keys())
            dealt |= dict(zip(helpers, sorted(left - dealt.keys()), strict=False))
        return dealt

    def take(self, worker: int, share: int) -> int | None:
        """``worker`` begins a share; the one that it had lent, whose place it needs now."""
        self.idle.discard(worker)
        self.computes[worker] = share
        return self.lent.pop(worker, None)

    def pushed(self, worker: int) -> None:
        """It has pushed what it computed."""
        share = self.computes.pop(worker)
        self.lent[worker] = share
        self._pushed_by[share] = worker

    def applied(self, shares: Iterable[int]) -> None:
        """A step has used these shares; whoever waited for that is idle."""
        used = set(shares)
        for worker in [w for w, share in self.lent.items() if share in used]:
            del self.lent[worker]
            self.idle |= {worker} & self.joined
        self.step.clear()

    def compute_s(self, reports: Mapping[int, StepReport]) -> float:
        """Of the worker that computed longest for a step, by what was reported of its shares."""
        took_s: dict[int, float] = {}
        for share, report in reports.items():
            worker = self._pushed_by.get(share, share)
            took_s[worker] = took_s.get(worker, 0.0) + report.compute_s
        return max(took_s.values())

    @property
    def waiting(self) -> set[int]:
        """Workers that are here and compute nothing."""
        return (self.idle | self.lent.keys()) & self.joined
