"""One look of a queue after the other: take in, conclude, decide, write it down, act.

It may die at every point. What was decided is written before it is done, and all that is done may
be done again: the job server takes a submission of a name once, a run is asked to stop or a region
to join only while it has not, and what runs and is no attempt of the journal's is ended. So whoever
goes on reads the journal, sees what is there, and does what is missing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from geo_ray.errors import GeoRayError, LeaseLostError
from geo_ray.lease.store import ConditionalStore
from geo_ray.queue import inbox
from geo_ray.queue.actions import Action, actions_of
from geo_ray.queue.border import begun_slot
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.entries import AnyEntry, EraEntry, OpenedEntry
from geo_ray.queue.fitting import NowSeen
from geo_ray.queue.job_spec import AnyRequest
from geo_ray.queue.journal import QueueJournal
from geo_ray.queue.seen import QueueSeen
from geo_ray.queue.slots import ERA_SLOTS, QueueSlots
from geo_ray.queue.state import EraState, QueueState
from geo_ray.queue.taking import taken
from geo_ray.queue.watching import impatience, over, progress, starts

_SEEN_EVERY_S: Final = 30.0
_GAP_S: Final = 120.0  # between two looks, after which nothing is known of the time between
_BACK_S: Final = 1.0  # that clocks are set back all the time
_log = logging.getLogger(__name__)


class QueueWorld(Protocol):
    """The cluster and its job server."""

    def see(self, state: QueueState, unix_s: float) -> QueueSeen:
        """Look at nodes, submissions and runs.

        Raises:
            GeoRayError: something does not answer; nothing is decided then.
        """

    def act(self, action: Action) -> None:
        """Do something.

        Raises:
            GeoRayError: it cannot be done; it is tried again.
        """


@dataclass(slots=True)
class QueueLoop:
    """See the module.

    Attributes:
        config: the queue.
        store: its folder.
        world: the cluster.
        epoch: how manieth holder of the queue's lease this is.
        fence: raises `LeaseLostError` if another one may act.
    """

    config: QueueConfig
    store: ConditionalStore
    world: QueueWorld
    epoch: int
    fence: Callable[[], None]
    state: QueueState = field(default_factory=QueueState)
    _journal: QueueJournal | None = None
    _slots: QueueSlots | None = None
    _looked_unix_s: float = 0.0

    def tick(self, unix_s: float) -> tuple[str, ...]:
        """Look once; return what could not be done.

        Args:
            unix_s: the present time.

        Raises:
            LeaseLostError: another process serves the queue.
            RunDirectoryError, QueueJournalError: the journal cannot be read or written; nothing
                was done.
        """
        self.fence()
        if self._journal is None:
            self._open(unix_s)
        self._note_time(unix_s)
        errors: list[str] = []
        self._take(unix_s, errors)
        try:
            seen = self.world.see(self.state, unix_s)
        except LeaseLostError:
            raise
        except GeoRayError as error:
            return (*errors, str(error))
        self._add(over(self.state, self.config, seen))
        is_border = self._is_border(seen)
        self._observe(seen, is_border=is_border)
        self._add(impatience(self.state, self.config, seen))
        if is_border:
            self._border(seen)
        self._add(starts(self.state, self.config, seen))
        for action in actions_of(self.state, self.config, seen):
            self.fence()
            try:
                self.world.act(action)
            except LeaseLostError:
                raise
            except GeoRayError as error:
                _log.warning("queue: %s", error.message)
                errors.append(str(error))
            except Exception as error:  # of one job, whatever it is: the others go on
                _log.exception("queue: %s could not be done", type(action).__name__)
                errors.append(f"{type(action).__name__}: {error!r}")
        return tuple(errors)

    # ------------------------------------------------------------------ its parts

    def _open(self, unix_s: float) -> None:
        journal, state = QueueJournal(self.store), QueueState()
        state.feed(journal.read())
        before = state.config
        self._journal, self.state = journal, state
        entries: list[AnyEntry] = []
        if before != self.config or state.epoch != self.epoch:
            entries.append(self._opened(unix_s))
        if before is None or not _same_slots(before, self.config):
            entries.append(EraEntry(unix_s=unix_s, number=state.era.number + 1))
        self._add(entries)
        self._looked_unix_s = unix_s

    def _opened(self, unix_s: float) -> OpenedEntry:
        return OpenedEntry(
            unix_s=unix_s,
            epoch=self.epoch,
            queue_id=self.state.queue_id or secrets.token_hex(16),
            config=self.config,
        )

    def _note_time(self, unix_s: float) -> None:
        """Note a time in which nobody looked: it was suspended, or its clock was set.

        Nothing is known of such a time, and no job is to blame for it. A clock that was set back
        begins an era, as the slots of this one would not come for long.
        """
        gap_s, self._looked_unix_s = unix_s - self._looked_unix_s, unix_s
        entries: list[AnyEntry] = []
        if not -_BACK_S <= gap_s <= _GAP_S:
            entries.append(self._opened(unix_s))
        era = self.state.era
        if unix_s < self._began_unix_s(era) - _BACK_S:
            entries.append(EraEntry(unix_s=unix_s, number=era.number + 1))
        self._add(entries)

    def _began_unix_s(self, era: EraState) -> float:
        """When the newest slot began, or its era."""
        newest = era.slots[-1].slot if era.slots else 0
        return era.began_unix_s + newest * self.config.slot_s

    def _take(self, unix_s: float, errors: list[str]) -> None:
        """Take in what the boxes have: what was sent first, first."""
        boxes = {tenant: self._box(tenant, errors) for tenant in self.config.tenants}
        found: list[tuple[str, AnyRequest]] = []
        for tenant, box in boxes.items():
            for each in box:
                if each.id in self.state.answers:
                    continue
                key = self.config.tenants[tenant].key
                request = inbox.opened(each, self.config.name, key)
                if request is None:
                    errors.append(
                        f"a request of tenant {tenant} is not signed by its token, or makes no "
                        "sense"
                    )
                else:
                    found.append((tenant, request))
        for tenant, request in sorted(found, key=lambda each: each[1].sent_unix_s):
            if request.id not in self.state.answers:
                self._add(taken(self.state, self.config, tenant, request, unix_s))
        for tenant, box in boxes.items():
            try:
                if box:
                    inbox.remove(self.store, tenant, {each.id for each in box})
            except GeoRayError as error:  # what is left there counts once all the same
                errors.append(f"the box of tenant {tenant}: {error.message}")

    def _box(self, tenant: str, errors: list[str]) -> list[inbox.SignedRequest]:
        """What is in a box; it is its tenant's, who may have seen to it that it is of no use."""
        try:
            return inbox.look(self.store, tenant)
        except GeoRayError as error:
            errors.append(f"the box of tenant {tenant}: {error.message}")
            return []

    def _observe(self, seen: QueueSeen, *, is_border: bool) -> None:
        entry = progress(self.state, self.config, seen)
        if entry is None:
            return
        first = any(
            self.state.jobs[name].course.mark is None and done > self.state.jobs[name].course.done
            for name, done in entry.done.items()
        )
        every_s = min(_SEEN_EVERY_S, self.config.slot_s)
        if is_border or first or seen.unix_s - self.state.seen_unix_s >= every_s:
            self._add([entry])

    def _is_border(self, seen: QueueSeen) -> bool:
        if not any(any(units) for units in seen.room.values()) and not self.state.era.slots:
            return False  # no machine is there yet
        slots = self.state.era.slots
        return not slots or self._slot_of(seen.unix_s) > slots[-1].slot

    def _border(self, seen: QueueSeen) -> None:
        if self._slot_of(seen.unix_s) >= ERA_SLOTS:
            self._add([EraEntry(unix_s=seen.unix_s, number=self.state.era.number + 1)])
        if self._slots is None or self._slots.number != self.state.era.number:
            self._slots = QueueSlots(self.config, self.state.era, self.state.jobs)
        slot, now = self._slot_of(seen.unix_s), NowSeen(seen.unix_s, seen.room)
        try:
            self._add(begun_slot(self.state, self.config, self._slots, slot, now))
        except BaseException:
            self._slots = None  # it was asked what nobody has written down
            raise

    def _slot_of(self, unix_s: float) -> int:
        return max(0, int((unix_s - self.state.era.began_unix_s) / self.config.slot_s))

    def _add(self, entries: Sequence[AnyEntry]) -> None:
        if entries and self._journal is not None:
            self._journal.add(entries)
            self.state.feed(entries)


def _same_slots(before: QueueConfig, now: QueueConfig) -> bool:
    """Whether a policy can go on as it was."""
    names = ("policy", "slot_s", "regions", "link", "links", "worth_per_usd")
    return all(getattr(before, name) == getattr(now, name) for name in names)
