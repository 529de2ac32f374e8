"""The queue's reconcile loop: read requests, observe, decide, persist, act.

The loop may die at any point. Decisions are written before they are executed, and each action is
idempotent: the job server accepts a submission of a name once; a run is asked to stop, or a region
to join, only if it has not done so yet; a submission without an attempt in the journal is stopped.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Protocol

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    JobFailedError,
    LeaseLostError,
    QueueJournalError,
    QueueRequestError,
    RunDirectoryError,
)
from geo_ray.base.text import printable
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.runs.lease import Fence
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.inbox import taken
from geo_ray.scheduler.queue.job_spec import AnyRequest, JobRequest
from geo_ray.scheduler.queue.journal import (
    AnyEntry,
    EndedEntry,
    GoneEntry,
    ObservationEntry,
    OpenedEntry,
    PolicyGenerationEntry,
    QueueJournal,
)
from geo_ray.scheduler.queue.model import QueueObservation
from geo_ray.scheduler.queue.monitor import (
    ObservedProgress,
    impatience,
    observed_progress,
    over,
    starts,
)
from geo_ray.scheduler.queue.slots import GENERATION_SLOTS, QueueSlots, TickInputs, begun_slot
from geo_ray.scheduler.queue.state import JobState, PolicyGeneration, QueuedJob, QueueState
from geo_ray.storage.conditional_store import ConditionalStore


@dataclass(frozen=True, slots=True)
class Submit:
    """Submits an attempt to the job server, which accepts each name once.

    Attributes:
        id: id of the job.
        tenant: its tenant.
        request: the job.
        attempt: number of the attempt.
        workers: workers by region.
        averager: region of the averager.
    """

    id: str
    tenant: str
    request: JobRequest
    attempt: int
    workers: Mapping[str, int]
    averager: str


@dataclass(frozen=True, slots=True)
class AskStop:
    """Asks a run to save and stop.

    Attributes:
        job: name of the job.
    """

    job: str


@dataclass(frozen=True, slots=True)
class EndSubmission:
    """Stops a submission in any state.

    Attributes:
        submission: name of the submission.
    """

    submission: str


@dataclass(frozen=True, slots=True)
class ChangeMember:
    """Lets a region join or leave a run.

    Attributes:
        job: name of the job.
        verb: join or leave.
        region: region of the run.
    """

    job: str
    verb: Literal["add", "drain", "remove"]
    region: str


@dataclass(frozen=True, slots=True)
class AskMachines:
    """Sets the target of an autoscaler.

    Attributes:
        target: what should run.
    """

    target: ClusterTarget


Action = Submit | AskStop | EndSubmission | ChangeMember | AskMachines


def submission_name(queue: str, job: str, attempt: int) -> str:
    """Return the submission name of an attempt.

    Args:
        queue: name of the queue.
        job: id of the job.
        attempt: number of the attempt.
    """
    return f"geoq-{queue}.{job}.{attempt}"


def is_submission_of(queue: str, name: str) -> bool:
    """Whether a submission belongs to a queue.

    Queues whose name has the same prefix are excluded.
    """
    return re.fullmatch(rf"geoq-{re.escape(queue)}\.[^.]+\.[0-9a-f]{{8}}\.\d+", name) is not None


def actions_of(job: QueuedJob, config: QueueConfig, observed: QueueObservation) -> list[Action]:
    """Return the actions that are due for a job.

    Args:
        job: the job.
        config: the queue.
        observed: observations.
    """
    attempt, one = job.attempt, observed.attempts.get(job.name)
    if attempt is None or one is None:
        return []
    name = submission_name(config.name, job.id, attempt.number)
    if job.state is JobState.LEAVING:
        if one.state != "going":
            return []
        late = observed.unix_s - attempt.leave_unix_s > config.patience.save_s
        return [AskStop(job.name) if one.trains and not late else EndSubmission(name)]
    if one.state == "unknown":
        return [
            Submit(
                job.id, job.tenant, job.request, attempt.number, attempt.workers, attempt.averager
            )
        ]
    found: list[Action] = []
    for region, stands in one.members.items() if one.trains else ():
        if region in attempt.workers and stands in ("absent", "left", "did not join"):
            found.append(ChangeMember(job.name, "add", region))
        elif region not in attempt.workers and stands == "member":
            found.append(ChangeMember(job.name, "drain", region))
        elif region not in attempt.workers and stands == "lost":
            found.append(ChangeMember(job.name, "remove", region))  # it must not join again
    return found


def target_of(state: QueueState, config: QueueConfig) -> ClusterTarget:
    """Return the machines that allocated jobs need, by region."""
    gpus = dict.fromkeys(config.regions, 0.0)
    cpus = dict.fromkeys(config.regions, 0.0)
    whole = dict.fromkeys(config.regions, 0)  # machines of groups
    slot = state.generation.slots[-1] if state.generation.slots else None
    for job in state.living():
        if job.attempt is not None:
            workers = job.attempt.workers
        elif slot is not None and job.name in slot.given and job.name not in slot.held:
            workers = slot.given[job.name].workers
        else:
            continue
        for region, count in workers.items():
            if region not in config.regions:
                continue  # the region was removed from the queue: it launches nothing
            needs = job.request.spec.needs(region)
            machine = config.regions[region].machines
            if machine is not None:
                whole[region] += count * needs.machines_of(machine.cpus, machine.gpus)
            gpus[region] += needs.gpus * count
            cpus[region] += needs.cpus_of(count)
    regions = []
    for name, about in config.regions.items():
        machine = about.machines
        if machine is None:
            continue
        count = math.ceil(cpus[name] / machine.cpus - 1e-9)
        if machine.gpus:
            count = max(count, math.ceil(gpus[name] / machine.gpus - 1e-9))
        count = max(count, whole[name])
        kind = MachineKind(
            machine.type, 1.0, machine.cap, machine.markets, (), machine.usd_per_hour
        )
        rows_per_s = float(min(count, machine.cap))
        regions.append(RegionTarget(name, machine.at, rows_per_s, (kind,), None, (None,), 0))
    return ClusterTarget(tuple(regions))


_SEEN_EVERY_S: Final = 30.0
_GAP_S: Final = 120.0  # longest gap between iterations that still counts as observed time
_COMPACT_AGAIN_S: Final = 600.0
_MAX_MESSAGE: Final = 300  # largest number of characters of a problem message
_BACK_S: Final = 1.0  # tolerance for clock corrections
_log = logging.getLogger(__name__)


class QueueWorld(Protocol):
    """The cluster and its job server."""

    def see(self, state: QueueState, unix_s: float) -> QueueObservation:
        """Observe nodes, submissions and runs.

        Raises:
            GeoRayError: an observation failed; no decision is made.
        """

    def act(self, action: Action) -> None:
        """Execute an action.

        Raises:
            GeoRayError: the action failed; it is retried.
        """


@dataclass(slots=True)
class QueueLoop:
    """The reconcile loop of a queue; see the module.

    Attributes:
        config: the queue.
        store: store of the queue.
        world: the cluster.
        token: fencing token of the lease.
        fence: fence of the lease of this process.
        new_id: id of the queue if it was never served before.
    """

    config: QueueConfig
    store: ConditionalStore
    world: QueueWorld
    token: int
    fence: Fence
    new_id: str = field(default_factory=partial(secrets.token_hex, 16))
    state: QueueState = field(default_factory=QueueState)
    _journal: QueueJournal | None = None
    _slots: QueueSlots | None = None
    _looked_unix_s: float = 0.0
    _reported_unix_s: float = -math.inf
    _compacts_unix_s: float = -math.inf

    def tick(self, unix_s: float) -> tuple[str, ...]:
        """Run one iteration; return its errors.

        Args:
            unix_s: current time.

        Raises:
            LeaseLostError: another process serves the queue.
            RunDirectoryError, QueueJournalError: the journal cannot be read or written; nothing was
            done.
        """
        self.fence.check()
        if self._journal is None:
            self._open(unix_s)
        self._note_time(unix_s)
        errors: list[str] = []
        self._take(unix_s, errors)
        try:
            observed = self.world.see(self.state, unix_s)
        except LeaseLostError:
            raise
        except GeoRayError as error:
            return (*errors, str(error))
        problems = {name: one.problem for name, one in observed.attempts.items() if one.problem}
        for job in self.state.living():
            with _contained(job, problems):
                self._add(over(job, self.config, observed))
        is_tick = self._is_tick(observed)
        self._observe(observed, problems, is_tick=is_tick)
        for job in self.state.living():
            with _contained(job, problems):
                self._add(impatience(job, self.config, observed))
        if is_tick:
            self._tick(observed)
        self._add(starts(self.state, self.config, observed))
        for name in observed.orphans:
            self._act(EndSubmission(name), errors)
        for job in self.state.living():
            with _contained(job, problems):
                for action in actions_of(job, self.config, observed):
                    self._act_for(job, action, unix_s, problems)
        if self.config.autoscaler is not None:
            self._act(AskMachines(target_of(self.state, self.config)), errors)
        self._note_problems(problems, unix_s)
        self._compact(unix_s, errors)
        return (*errors, *(f"job {name}: {problem}" for name, problem in problems.items()))

    # ------------------------------------------------------------------ its parts

    def _open(self, unix_s: float) -> None:
        journal, state = QueueJournal(self.store), QueueState()
        state.feed(journal.read())
        before = state.config
        self._journal, self.state, self._slots = journal, state, None
        entries: list[AnyEntry] = []
        if before != self.config or state.token != self.token:
            entries.append(self._opened(unix_s))
        if before is None or not _same_slots(before, self.config):
            entries.append(PolicyGenerationEntry(unix_s=unix_s, number=state.generation.number + 1))
        self._add(entries)
        self._looked_unix_s = unix_s

    def _opened(self, unix_s: float) -> OpenedEntry:
        return OpenedEntry(
            unix_s=unix_s,
            token=self.token,
            queue_id=self.state.queue_id or self.new_id,
            config=self.config,
        )

    def _note_time(self, unix_s: float) -> None:
        """Record a gap without iterations: the process was suspended, or its clock was set.

        Nothing is known of the gap, and it counts against no job. If the clock was set back, a new
        policy generation begins, since the next slot of this one would be far in the future.
        """
        gap_s, self._looked_unix_s = unix_s - self._looked_unix_s, unix_s
        entries: list[AnyEntry] = []
        if not -_BACK_S <= gap_s <= _GAP_S:
            entries.append(self._opened(unix_s))
        generation = self.state.generation
        if unix_s < self._began_unix_s(generation) - _BACK_S:
            entries.append(PolicyGenerationEntry(unix_s=unix_s, number=generation.number + 1))
        self._add(entries)

    def _began_unix_s(self, generation: PolicyGeneration) -> float:
        """Start of the newest slot, or of its generation."""
        newest = generation.slots[-1].slot if generation.slots else 0
        return generation.began_unix_s + newest * self.config.slot_s

    def _take(self, unix_s: float, errors: list[str]) -> None:
        """Process the requests in all inboxes in the order in which they were sent."""
        inboxes = {tenant: self._inbox(tenant, errors) for tenant in self.config.tenants}
        found: list[tuple[str, AnyRequest]] = []
        for tenant, requests in inboxes.items():
            for each in requests:
                key = self.config.tenants[tenant].key
                request = inbox.opened(each, self.state.queue_id, key)
                if request is None:
                    errors.append(
                        f"a request of tenant {tenant} is not signed with its token, or is invalid"
                    )
                elif not self.state.was_answered(tenant, request):
                    found.append((tenant, request))
        for tenant, request in sorted(found, key=_sent_unix_s):
            if request.id not in self.state.answers:
                self._add(taken(self.state, self.config, tenant, request, unix_s))
        for tenant, requests in inboxes.items():
            try:
                if requests:
                    inbox.remove(self.store, tenant, {each.id for each in requests})
            except Exception as error:  # requests left there are recognized by their ids
                errors.append(f"the requests of tenant {tenant}: {_message(error)}")

    def _inbox(self, tenant: str, errors: list[str]) -> list[inbox.SignedRequest]:
        """Return the requests in a tenant's inbox. An unreadable inbox counts as empty."""
        try:
            return inbox.look(self.store, tenant)
        except Exception as error:  # an error concerns this tenant only
            errors.append(f"the requests of tenant {tenant}: {_message(error)}")
            return []

    def _observe(
        self, observed: QueueObservation, problems: dict[str, str], *, is_tick: bool
    ) -> None:
        found: dict[str, ObservedProgress] = {}
        for job in self.state.living():
            with _contained(job, problems):
                one = observed_progress(job, self.config, observed)
                if one is not None:
                    found[job.name] = one
        if not found:
            return
        jobs_progress = {name: self.state.jobs[name].progress for name in found}
        first = any(
            jobs_progress[name].mark is None and one.done > jobs_progress[name].done
            for name, one in found.items()
        )
        every_s = min(_SEEN_EVERY_S, self.config.slot_s)
        if is_tick or first or observed.unix_s - self.state.observed_unix_s >= every_s:
            entry = ObservationEntry(
                unix_s=observed.unix_s,
                done={name: one.done for name, one in found.items()},
                factors={n: one.factor for n, one in found.items() if one.factor is not None},
                expected={n: one.expected for n, one in found.items() if one.expected is not None},
            )
            self._add([entry])

    def _act(self, action: Action, errors: list[str]) -> None:
        """Execute an action that concerns no single job; a failed one is retried."""
        self.fence.check()
        try:
            self.world.act(action)
        except LeaseLostError:
            raise
        except Exception as error:
            errors.append(_message(error))
            _log.warning("queue: %s", errors[-1])

    def _act_for(
        self, job: QueuedJob, action: Action, unix_s: float, problems: dict[str, str]
    ) -> None:
        """Execute an action for a job. Failures are retried, except for a refused start."""
        self.fence.check()
        try:
            self.world.act(action)
        except LeaseLostError:
            raise
        except QueueRequestError as error:
            problems[job.name] = _message(error)
            if isinstance(action, Submit):
                self._add(_refused(job, error, unix_s))
        except Exception as error:
            problems[job.name] = _message(error)
            _log.warning("queue: job %s: %s", job.name, problems[job.name])

    def _note_problems(self, problems: dict[str, str], unix_s: float) -> None:
        """Record problems of single jobs, for `geo-ray queue list`.

        A message that changes continually is recorded as rarely as progress is.
        """
        changed = {}
        for job in self.state.living():
            text = problems.get(job.name, "")[:_MAX_MESSAGE]
            before = job.progress.problem
            if text != before and (not text or not before or self._is_time_to_tell(unix_s)):
                changed[job.name] = text
        if changed:
            self._reported_unix_s = unix_s
            self._add([ObservationEntry(unix_s=unix_s, problems=changed)])

    def _is_time_to_tell(self, unix_s: float) -> bool:
        return not 0 <= unix_s - self._reported_unix_s < _SEEN_EVERY_S

    def _is_tick(self, observed: QueueObservation) -> bool:
        if (
            not any(any(units) for units in observed.capacity.values())
            and not self.state.generation.slots
        ):
            return False  # no machine has joined yet
        slots = self.state.generation.slots
        return not slots or self._slot_of(observed.unix_s) > slots[-1].slot

    def _tick(self, observed: QueueObservation) -> None:
        if self._slot_of(observed.unix_s) >= GENERATION_SLOTS:
            self._add(
                [
                    PolicyGenerationEntry(
                        unix_s=observed.unix_s, number=self.state.generation.number + 1
                    )
                ]
            )
        slot, now = self._slot_of(observed.unix_s), TickInputs(observed.unix_s, observed.capacity)
        try:
            self._add(self._decided(slot, now))
        except (LeaseLostError, RunDirectoryError):
            raise
        except Exception as error:  # only a new job can be the cause
            culprits = self._culprits(slot, now)
            if not culprits:
                raise
            _log.exception("queue: the policy failed on %s", ", ".join(culprits))
            for name in culprits:
                problem = InvariantError(f"the policy failed on it: {error!r}")
                self._add(_refused(self.state.jobs[name], problem, observed.unix_s))
            self._add(self._decided(slot, now))

    def _decided(self, slot: int, now: TickInputs) -> list[AnyEntry]:
        """Ask the policy. If it cannot be rebuilt from the journal, begin a new generation."""
        try:
            if self._slots is None or self._slots.number != self.state.generation.number:
                self._slots = QueueSlots(self.config, self.state.generation, self.state.jobs)
        except Exception:
            _log.exception(
                "queue: the policy cannot be rebuilt from the journal: beginning a new generation"
            )
            self._add(
                [PolicyGenerationEntry(unix_s=now.unix_s, number=self.state.generation.number + 1)]
            )
            self._slots, slot = QueueSlots(self.config, self.state.generation, self.state.jobs), 0
        try:
            return begun_slot(self.state, self.config, self._slots, slot, now)
        except BaseException:
            self._slots = None  # its state includes an unrecorded tick: rebuild it from the journal
            raise

    def _culprits(self, slot: int, now: TickInputs) -> list[str]:
        """Return the new jobs on which the policy fails."""
        new = [
            job.name for job in self.state.living() if job.name not in self.state.generation.known
        ]
        found = []
        for name in new:
            alone = copy.deepcopy(self.state)
            for other in new:
                if other != name:
                    del alone.jobs[other]
            try:
                slots = QueueSlots(self.config, alone.generation, alone.jobs)
                begun_slot(alone, self.config, slots, slot, now)
            except Exception:
                found.append(name)
        return found

    def _compact(self, unix_s: float, errors: list[str]) -> None:
        """Replace a long journal by a snapshot."""
        journal = self._journal
        if journal is None or not journal.is_long or unix_s < self._compacts_unix_s:
            return
        self.fence.check()
        snapshot = self.state.snapshot(unix_s)
        try:
            journal.compact(snapshot)
        except (LeaseLostError, QueueJournalError):
            raise
        except GeoRayError as error:  # a long journal does not stop the queue
            self._compacts_unix_s = unix_s + _COMPACT_AGAIN_S
            errors.append(f"the journal cannot be compacted: {error.message}")
            self._journal = None  # read the partially written journal again
            return
        self.state.feed(snapshot)

    def _slot_of(self, unix_s: float) -> int:
        return max(0, int((unix_s - self.state.generation.began_unix_s) / self.config.slot_s))

    def _add(self, entries: Sequence[AnyEntry]) -> None:
        if entries and self._journal is not None:
            self._journal.add(entries)
            self.state.feed(entries)


@contextmanager
def _contained(job: QueuedJob, problems: dict[str, str]) -> Iterator[None]:
    """Record an error that concerns one job; journal errors are raised."""
    try:
        yield
    except (LeaseLostError, QueueJournalError, RunDirectoryError):
        raise
    except Exception as error:
        _log.exception("queue: job %s", job.name)
        problems[job.name] = _message(error)


def _refused(job: QueuedJob, error: GeoRayError, unix_s: float) -> list[AnyEntry]:
    """End a job that can never be started."""
    entries: list[AnyEntry] = []
    if job.attempt is not None:
        entries.append(
            GoneEntry(
                unix_s=unix_s,
                job=job.name,
                attempt=job.attempt.number,
                how="failed",
                code=error.code,
                message=error.message[:_MAX_MESSAGE],
            )
        )
    message = f"it cannot start: {error.code}: {error.message[:_MAX_MESSAGE]}"
    code = JobFailedError.code
    ended = EndedEntry(unix_s=unix_s, job=job.name, outcome="failed", code=code, message=message)
    return [*entries, ended]


def _sent_unix_s(asked: tuple[str, AnyRequest]) -> float:
    _, request = asked
    return request.sent_unix_s


def _message(error: Exception) -> str:
    message = (
        error.message if isinstance(error, GeoRayError) else f"{type(error).__name__}: {error}"
    )
    return printable(message)


def _same_slots(before: QueueConfig, now: QueueConfig) -> bool:
    """Whether the policy can continue with a changed configuration."""
    names = ("policy", "slot_s", "regions", "link", "links", "value_per_usd")
    return all(getattr(before, name) == getattr(now, name) for name in names)
