"""Replans a run that follows a plan when its members change, and records its measured links.

Rule: replan once the members differ from those planned for, have been stable for `settle_s`, and
    the last replan is `min_interval_s` ago (hysteresis as in the planner). The interval and the
    averager's location can change during the run; the rest is only reported. A thread plans, which
    may take seconds. `cloud/autoscaler/policy.py` enforces the budget.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from geo_ray.base.errors import GeoRayError
from geo_ray.runs.replanning import MembersPlan
from geo_ray.runtime.reporting import PlanServices
from geo_ray.transport.links import LinkEstimate, LinkTable, load_links, record_of, save_links

SETTLE_S = 60.0
MIN_INTERVAL_S = 600.0


@dataclass(slots=True)
class ReplanPolicy:
    """Decides when to replan a run that follows a plan, after a change of its members. Pure.

    Idea: a change of members changes the best settings of the others. A change that is reverted
    within minutes does not matter, and planning costs seconds of a core.

    Rule: replan when the members differ from those of the last plan, have been stable for
    `settle_s`, and the last plan is at least `min_interval_s` old. A region that comes and goes
    causes at most one plan in `min_interval_s`. A new plan is used only for a sufficient gain
    (`geo_ray.runs.replanning`: 5 % of the remaining cost or time, with the change paid).

    Source: ours; hysteresis as in `geo_ray.runs.replanning`.

    Attributes:
        settle_s: how long the members must be stable.
        min_interval_s: shortest time between two plans.
    """

    settle_s: float = SETTLE_S
    min_interval_s: float = MIN_INTERVAL_S
    _planned: frozenset[str] | None = None  # members of the last plan
    _seen: frozenset[str] = frozenset()
    _since_s: float = 0.0
    _newest_s: float = -inf

    def due(self, members: Collection[str], now_s: float) -> bool:
        """Return whether to replan for the current members; polled repeatedly.

        The first call sets the members that the run was planned for.
        """
        present = frozenset(members)
        if present != self._seen:
            self._seen, self._since_s = present, now_s
        if self._planned is None or present == self._planned:
            self._planned = present
            return False
        if now_s - self._since_s < self.settle_s or now_s - self._newest_s < self.min_interval_s:
            return False
        self._planned, self._newest_s = present, now_s
        return True

    def doubt(self) -> None:
        """Mark the members of the last plan as unknown: replan once the current ones are stable."""
        self._planned = frozenset()


log = logging.getLogger(__name__)


class PlanFor(Protocol):
    """Plans a run for the regions that take part; see `plan_of_members`."""

    def __call__(
        self, members: Collection[str], averager: str, interval: int | None, standby: str | None, /
    ) -> MembersPlan:
        """Return the plan.

        Args:
            members: regions that take part.
            averager: the region that hosts the averager.
            interval: the current one, in the plan's steps; None: there is none.
            standby: the region that may take over the averager.
        """
        ...


class CurrentLeader(NamedTuple):
    """The averager's region, and its standby's region, if any."""

    region: str
    standby: str | None = None


@dataclass(slots=True)
class PlanWatch:
    """Replans a run that follows a plan when its members change.

    Two settings can change during the run: the interval, and the averager's region, if the plan
    names the standby's region. The rest is only reported. `ReplanPolicy` decides when to plan; a
    thread plans, which may take seconds.

    Attributes:
        policy: decides when.
        plan_for: plans; None: the run follows no plan.
        loop: the run loop.
    """

    policy: ReplanPolicy
    plan_for: PlanFor | None
    loop: PlanServices
    _interval: int | None = None
    _has_planned: bool = False
    _pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "plan"))
    _open: tuple[tuple[str, ...], Future[MembersPlan]] | None = None
    _asked_leader: str = ""
    _requested: int | None = None

    def tick(
        self,
        members: Collection[str],
        leader: CurrentLeader,
        now_s: float,
        interval: int | None = None,
    ) -> None:
        """Start planning if it is due, and use the result.

        Args:
            members: regions that take part.
            leader: see `CurrentLeader`.
            now_s: monotonic time.
            interval: the averager's current interval, in the plan's steps; None: it has none, or
                has not reported one.
        """
        if self.plan_for is None:
            return
        if interval is not None and self._interval is None and not self._has_planned:
            self.policy.doubt()  # resumed with settings for the members at that time
        self._interval = self._requested or interval or self._interval
        if self._open is None and self.policy.due(members, now_s):
            asked = tuple(sorted(members))
            self._has_planned, self._asked_leader = True, leader.region
            question = (asked, leader.region, self._interval, leader.standby)
            self._open = asked, self._pool.submit(self.plan_for, *question)
        if self._open is None or not self._open[1].done():
            return
        asked, found = self._open
        self._open = None
        if (asked, self._asked_leader) != (tuple(sorted(members)), leader.region):
            self.policy.doubt()  # members have changed, or the averager has moved
            return
        try:
            planned = found.result()
        except GeoRayError as error:
            log.warning("no plan for %s: %s", ", ".join(asked), error.message)
            self.loop.show(f"not replanned for {', '.join(asked)}: {error.message}")
            return
        except Exception:  # of any class: training must not end because planning failed
            log.exception("no plan for %s", ", ".join(asked))
            return
        self._note(asked, planned)

    def _follow(self, members: tuple[str, ...], planned: MembersPlan) -> None:
        """Change the settings that can change during the run, if each pays by itself."""
        loop = self.loop
        decision, present = planned.as_it_goes, planned.present
        if decision is None or not decision.changed:
            return
        why, plan = decision.reason, decision.plan
        about = {"regions": list(members), "cause": why, "gain": decision.gain}
        if plan.interval != present.interval:
            before, self._interval = present.interval, plan.interval
            self._requested = self._interval
            loop.set_interval(self._interval)
            loop.emit("interval_changed", before=before, interval=self._interval, **about)
            loop.show(f"changing the interval from {before} to {self._interval}: {why}")
        if plan.averager != present.averager:
            loop.move_averager()
            loop.emit("averager_moves", before=present.averager, averager=plan.averager, **about)
            loop.show(f"moving the averager from {present.averager} to {plan.averager}: {why}")

    def leader_moved(self) -> None:
        """Request the interval from the new averager, whose log may end before the request."""
        if self._requested is not None:
            self.loop.set_interval(self._requested)

    def close(self) -> None:
        """Wait for planning in progress, whose thread reads the run."""
        self._pool.shutdown(cancel_futures=True)

    def _note(self, members: tuple[str, ...], planned: MembersPlan) -> None:
        present, decision = planned.present, planned.decision
        self._follow(members, planned)
        best = decision.plan
        self.loop.emit(
            "replanned",
            regions=list(members),
            changed=decision.changed,
            cause=decision.reason,
            gain=decision.gain,
            interval=best.interval,
            averager=best.averager,
            seconds=best.total_s,
            usd=best.total_usd,
        )
        names = ", ".join(members)
        if not decision.changed:
            self.loop.show(f"replanned for {names}: {decision.reason}")
            return
        found = [
            f"{r.region}: {r.workers} workers, {sum(r.batch_sizes)} rows a step"
            for r in best.regions
        ]
        if best.interval != present.interval:
            found.append(f"interval {best.interval} instead of {present.interval}")
        if best.averager != present.averager:
            found.append(f"the averager in {best.averager}")
        self.loop.show(f"replanned for {names}: {decision.reason}: {'; '.join(found)}")


_LOGGER = logging.getLogger(__name__)
_EVERY_S: Final = 1.0


class LinkTraffic(NamedTuple):
    """Bytes that a region has sent to another one so far, by traffic class."""

    src: str
    dst: str
    bytes_by_class: dict[str, int]


class LinkNotes:
    """Records link measurements of a run in a file.

    Attributes:
        path: the file; measurements before a resume are retained.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = _known(path)
        self._saving = threading.Thread()
        self._recorded_s = -_EVERY_S
        self._newest: dict[tuple[str, str], Mapping[str, int]] = {}
        self._before: dict[tuple[str, str], Counter[str]] = {}  # of replaced bridges
        self._earlier: dict[tuple[str, str], Mapping[str, int]] = {}  # by a run actor that is gone

    def record(
        self,
        reports: Mapping[str, Mapping[str, Any]],
        *,
        force: bool = False,
    ) -> list[LinkTraffic]:
        """Record the link reports of bridges, and write them at most every second.

        Args:
            reports: `PeerStats` by peer, by region.
            force: write now, and wait until it is written.

        Returns:
            The traffic of each link; empty if it is not time.
        """
        now_s = time.monotonic()
        if not force and now_s - self._recorded_s < _EVERY_S:
            return []
        self._recorded_s = now_s
        traffic = []
        for region, links in reports.items():
            for peer, link in links.items():
                by_class = {k: int(v) for k, v in link["bytes_sent"].items()}
                traffic.append(LinkTraffic(region, peer, self._sum(region, peer, by_class)))
            self.note(region, links)
        self.save(wait=force)
        return traffic

    def _sum(self, region: str, peer: str, sent: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of a link over all bridges of a region; a new bridge starts at 0."""
        pair = region, peer
        newest, before = self._newest.get(pair, {}), self._before.setdefault(pair, Counter())
        for name, count in self._earlier.pop(pair, {}).items():  # more than it sent, others did
            before[name] += max(0, count - sent.get(name, 0))
        if any(sent.get(name, 0) < count for name, count in newest.items()):
            before.update(newest)
        self._newest[pair] = sent
        return dict(sorted((before + Counter(sent)).items()))

    def resume(self, sums: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Continue the sums reported under an earlier run actor, by link and class."""
        self._earlier = dict(sums)

    def note(self, region: str, links: Mapping[str, Any]) -> None:
        """Record the link report of the bridge of ``region`` (`PeerStats` by peer)."""
        now_unix_s = time.time()
        found = [
            record_of(region, peer, LinkEstimate(**link["estimate"]), now_unix_s)
            for peer, link in links.items()
        ]
        self._table = self._table.with_records([record for record in found if record is not None])

    def save(self, *, wait: bool = False) -> None:
        """Write the file; a full disk must not end the run.

        A thread writes: while a checkpoint is being written, any file takes seconds.

        Args:
            wait: wait until it is written. Otherwise writing is skipped while the previous write
                runs.
        """
        if wait and self._saving.ident is not None:
            self._saving.join()
        if not self._table.links or self._saving.is_alive():
            return
        self._saving = threading.Thread(target=self._write, args=(self._table,), daemon=True)
        self._saving.start()
        if wait:
            self._saving.join()

    def _write(self, table: LinkTable) -> None:
        try:
            save_links(table, self._path)
        except GeoRayError as error:
            _LOGGER.warning("%s", error)


def _known(path: Path) -> LinkTable:
    if not path.exists():
        return LinkTable()
    try:
        return load_links(path)
    except GeoRayError as error:
        _LOGGER.warning("%s", error)
        return LinkTable()
