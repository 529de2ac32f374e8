"""The status of a run, read from its directory by another process.

A run whose run actor was killed is one that its supervisor restarts, for `RESTART_S` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Final, TypeAlias

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import CheckpointError, StoreError
from geo_ray.experiment.cluster import ClusterConfig
from geo_ray.experiment.recorded import RecordedConfig
from geo_ray.experiment.regions import start_command
from geo_ray.planner.actual_cost import Spent, compare_cost
from geo_ray.planner.plan import Plan
from geo_ray.runs import directory
from geo_ray.runs.checkpoints import store_of
from geo_ray.runs.lease import LEASE_KEY, LeaseRecord, LeaseWatch, decode_record, has_ended
from geo_ray.runs.remote import Copy, RunObjects
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore
from geo_ray.telemetry.event_log import EVENTS_FILE, Ending, EventTail, being_written, ending_of
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.status import (
    CheckpointStatus,
    RunActorStatus,
    RunStatus,
    SpentStatus,
    StatusFold,
    left_s,
    mean_loss,
    speed_of,
)
from geo_ray.telemetry.totals import RunTotals

RESTART_S: Final = 60.0
"""Time limit of a restart; a run without a run actor by then has lost its supervisor."""


def waits_s(
    cluster: ClusterConfig, totals: RunTotals, unresponsive_s: float | None
) -> float | None:
    """Return how long the processes of a run may continue while its run actor is restarted.

    Args:
        cluster: cluster of the run; a local cluster usually ends with the run actor.
        totals: totals over its events.
        unresponsive_s: seconds since the last sign of its run actor; None if unknown.

    Returns:
        Seconds from now; None if they have ended, end, or never trained.
    """
    if cluster.kind == "local" or unresponsive_s is None or totals.started is None:
        return None
    if totals.finished is not None or totals.failed is not None or totals.stop_cause is not None:
        return None
    left_s = RESTART_S - unresponsive_s
    return left_s if left_s > 0 else None


Beside: TypeAlias = Callable[[Event, RunTotals], None]
"""Callback for every event, with the totals that include it."""


def _nobody() -> Beside:
    return lambda event, totals: None


class StatusReader:
    """Reads new data of a run repeatedly, without changing it.

    Args:
        path: directory of the run.
        clock: clock for judging a run actor; None: the machine's.
        beside: creates an additional consumer of events; called again if the log is replaced.

    Raises:
        RunDirectoryError: there is no run.
        ConfigError: its configuration cannot be read.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock | None = None,
        beside: Callable[[], Beside] = _nobody,
    ) -> None:
        self._run, self._config = directory.recorded_run(path)
        self._shown = self._run.shown if self._run.address is not None else str(path)
        self._copy: Copy | None = None
        self._leases: ConditionalStore = LocalConditionalStore(self._run.path)
        if self._run.address is not None:
            objects = RunObjects(self._run.address)
            self._leases, self._copy = objects.lease(), Copy(objects, self._run.path)
        self._clock = clock or SystemClock()
        self._tail = EventTail(self._run.path / EVENTS_FILE)
        self._fold = StatusFold(self._config.train.target)
        self._store = store_of(self._run, self._config.checkpoint)
        self._watch = LeaseWatch()
        self._plan = directory.followed_plan(self._run)
        self._make_beside = beside
        self._beside = beside()
        self._caught_up = False

    @property
    def config(self) -> RecordedConfig:
        """The part of the run's configuration that needs no import of its classes."""
        return self._config

    @property
    def plan(self) -> Plan | None:
        """The plan that the run follows, or None."""
        return self._plan

    @property
    def leases(self) -> ConditionalStore:
        """Store of the run's lease."""
        return self._leases

    @property
    def totals(self) -> RunTotals:
        """Totals of the run, as far as it was read."""
        return self._fold.totals

    @property
    def is_remote(self) -> bool:
        """Whether the run's directory is in a bucket."""
        return self._copy is not None

    @property
    def problems(self) -> tuple[str, ...]:
        """The first damaged lines of the log, which were skipped."""
        return self._tail.problems

    @property
    def read_bytes(self) -> int:
        """Number of bytes of the log that were read."""
        return self._tail.read_bytes

    @property
    def read_fraction(self) -> float:
        """Fraction of the log that was read; an incomplete last line counts as read."""
        read_bytes, left_bytes = self._tail.read_bytes, self._tail.left_bytes
        return 1.0 if self._caught_up else read_bytes / max(1, read_bytes + left_bytes)

    def read(self, most_events: int | None = None) -> RunStatus:
        """Return the current state; the run actor may be unknown at the first call.

        Args:
            most_events: maximum number of lines of the log; None: all.

        Raises:
            RunDirectoryError: its events or its lease cannot be read.
        """
        self._pull()
        lease = self._leases.read(
            LEASE_KEY
        )  # before the events, which are written before the lease is released
        record = None if lease is None else decode_record(lease.data)
        run_actor = None if record is None else self._run_actor(record)
        self._feed(most_events)
        totals = self._fold.totals
        ending = ending_of(self._run.path, totals)
        is_going = run_actor.alive if run_actor is not None else _goes(ending)
        waits = None
        if lease is not None and record is not None and not record.released and is_going is False:
            waits = waits_s(self._config.cluster, totals, lease.age_s)
        regions = self._fold.regions(is_going=is_going is not False, trains_on=waits is not None)
        tokens_per_s, mfu = speed_of(regions, totals.throughput)
        newest = totals.newest_eval
        checkpoint = self._checkpoint()
        phase = self._phase(ending, run_actor, waits, is_going=is_going)
        code, message, fix = self._why(phase, checkpoint, waits, is_going=is_going)
        return RunStatus(
            run=self._shown,
            phase=phase,
            is_going=is_going,
            waits_s=waits,
            strategy=None if totals.started is None else totals.started["strategy"],
            averager=self._fold.averager,
            address=self._fold.address,
            server_pid=self._fold.server_pid,
            holders=self._fold.holders,
            standby=self._fold.standby,
            standby_pid=self._fold.standby_pid,
            wants_standby=self._config.averager.standby is not None,
            regions=regions,
            refused=self._fold.refused,
            round=self._fold.round,
            loss=mean_loss(regions),
            samples_per_s=sum(each.samples_per_s for each in regions),
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            mfu_is_estimated=mfu is not None and totals.throughput.estimated,
            left_s=left_s(regions) if is_going else None,
            eval_step=None if newest is None else newest["step"],
            eval={} if newest is None else newest["metrics"],
            target=self._fold.target(),
            checkpoint=checkpoint,
            spent=self._spent(),
            run_actor=run_actor,
            code=code,
            message=message,
            fix=fix,
        )

    def feed(self, most_events: int) -> None:
        """Read new events only; see `read`."""
        self._pull()
        self._feed(most_events)

    def _pull(self) -> None:
        if self._copy is not None and self._copy.pull(models=False):
            self._tail = EventTail(
                self._run.path / EVENTS_FILE
            )  # another run actor continued from an earlier point
            self._fold = StatusFold(self._config.train.target)
            self._beside = self._make_beside()

    def _feed(self, most_events: int | None) -> None:
        before = self._tail.lines
        for event in self._tail.new(most_events):
            self._fold.feed(event)
            self._beside(event, self._fold.totals)
        self._caught_up = most_events is None or self._tail.lines - before < most_events

    def _run_actor(self, record: LeaseRecord) -> RunActorStatus:
        alive, how = self._alive(record)
        owner = record.owner
        return RunActorStatus(
            host=owner.host,
            pid=owner.pid,
            since=owner.since,
            token=record.token,
            alive=alive,
            how=how,
            doing=record.doing,
        )

    def _alive(self, record: LeaseRecord) -> tuple[bool | None, str]:
        if record.released:
            return False, "it has ended"
        gone = has_ended(record.owner)
        if gone:
            return False, "its process was killed"
        now_s = self._clock.now_s()
        is_heard = self._watch.see(record, now_s)
        if is_heard is False:
            return False, f"no renewal of its lease for {record.lives_s:g} s"
        if is_heard or gone is False or being_written(self._run.path / EVENTS_FILE):
            return True, "alive"
        return None, f"no renewal seen yet, known within {self._watch.left_s(now_s):.0f} s"

    def _why(
        self,
        phase: str,
        checkpoint: CheckpointStatus | None,
        waits: float | None,
        *,
        is_going: bool | None,
    ) -> tuple[str | None, str | None, str | None]:
        """Return the code, the reason of the end or stop, and the fix."""
        totals, run = self._fold.totals, quote(self._shown)
        failed = totals.failed if not is_going else None
        if failed is not None:
            return failed["code"], failed["message"], failed["fix"].replace(" RUN", f" {run}")
        resume = f"`geo-ray train --resume {run}` continues it"
        if waits is not None:
            return None, totals.stop_cause, f"`geo-ray train --resume {run}` watches it."
        simulated = totals.started is not None and totals.started["simulated"]
        if simulated or not phase.startswith(Ending.CUT_OFF.value):
            return None, totals.stop_cause, None
        why = totals.stop_cause
        if self._config.cluster.kind != "local" and not self.is_remote:
            why = why or "its supervisor has ended, and its processes with it"
        if checkpoint is None:
            start = start_command(self._config.regions)
            return None, why, f"It has no checkpoint: start again with `{start} CONFIG`."
        return None, why, f"{resume} from checkpoint {checkpoint.id} at step {checkpoint.step:,}."

    def _phase(
        self,
        ending: Ending,
        run_actor: RunActorStatus | None,
        waits: float | None,
        *,
        is_going: bool | None,
    ) -> str:
        if waits is not None:
            return "training while its run actor restarts"
        if run_actor is None:
            return ending.value
        if is_going:
            return run_actor.doing or "starting"
        if is_going is None:
            return f"last activity: {run_actor.doing or 'starting'}"
        if ending in (Ending.GOING, Ending.UNKNOWN):
            return f"{Ending.CUT_OFF.value}, or its run actor does not respond"
        return str(ending.value)

    def _checkpoint(self) -> CheckpointStatus | None:
        try:
            return self._newest_checkpoint()
        except StoreError:
            return None  # the other data are still useful

    def _newest_checkpoint(self) -> CheckpointStatus | None:
        for id in reversed(self._store.ids()):
            try:
                manifest = self._store.manifest(id)
            except CheckpointError:
                continue  # damaged, or just removed
            saved_s = self._fold.saved_s.get(id)
            age_s = None if saved_s is None else self._fold.totals.elapsed_s - saved_s
            return CheckpointStatus(
                id=id,
                step=manifest.step,
                age_s=age_s,
                bytes=sum(part.bytes for part in manifest.parts),
                healthy=manifest.healthy,
            )
        return None

    def _spent(self) -> SpentStatus:
        totals = self._fold.totals
        usd = None
        if self._plan is not None and totals.started is not None:
            total = compare_cost(self._plan, Spent.of(totals)).total("USD")
            usd = None if total is None else total.actual
        wan_bytes = sum(totals.wan.by_class().values())
        return SpentStatus(seconds=totals.elapsed_s, wan_bytes=wan_bytes, usd=usd)


def _goes(ending: Ending) -> bool | None:
    return None if ending is Ending.UNKNOWN else ending is Ending.GOING
