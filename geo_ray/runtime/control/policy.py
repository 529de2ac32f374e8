"""What a run does about trouble: lost workers and regions, failed saves, requests to stop. Pure.

The controller tells what happened and when, and does what it is answered. Every wait of a halt has
a deadline.

    worker_lost  -> replace it, ignore it, or the error that ends the run
    regions_lost -> the regions to go on without, or the error that ends the run
    due          -> Save (and whether the regions stand still after it), or nothing
    stalled      -> for how long nothing has happened, if that is worth a line
    check_goes_on -> nothing; or the error that ends the run: nobody can make progress any more
    is_overdue   -> whether an open checkpoint is given up: no part of it has come for long
    save_failed  -> nothing: go on with the checkpoint before; or the error that ends the run
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.errors import (
    GeoRayError,
    InterruptedRunError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    WorkerLostError,
)
from geo_ray.training.averager.stalled import stalled_error, stalled_regions

HALT_DEADLINE_S: Final = 120.0
STUCK_S: Final = 10.0
STALL_S: Final = 300.0
MAX_FAILED_SAVES: Final = 3
PART_S: Final = 600.0
"""Longest time without a part of an open checkpoint."""


@dataclass(frozen=True, slots=True)
class Save:
    """Begin a checkpoint now.

    Attributes:
        halt: the regions stand still after it.
    """

    halt: bool


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What the configuration allows.

    Attributes:
        max_worker_restarts: workers that may be replaced in the whole run.
        max_refused_steps: steps in a row without a usable gradient.
        save_every_s: between checkpoints; None: none by time.
    """

    max_worker_restarts: int
    max_refused_steps: int
    save_every_s: float | None


class RunPolicy:
    """Remembers what was decided; see the module's docstring. Times are seconds of one clock.

    Args:
        limits: what the configuration allows.
        now_s: the present time.
    """

    def __init__(self, limits: RunLimits, now_s: float) -> None:
        self._limits = limits
        self._restarts = 0
        self._failed_saves = 0
        self._saved_s = self._part_s = now_s
        self._halting: GeoRayError | None = None
        self._halt_began_s = 0.0
        self._halt_saved = False
        self.stopping: str | None = None
        self._progress_s = self._told_s = now_s
        self._stuck: dict[str, int] = {}
        self._stuck_s = now_s

    @property
    def is_halting(self) -> bool:
        """Whether the regions are to stand still, for whatever reason."""
        return self._halting is not None

    @property
    def is_halt_saved(self) -> bool:
        """Whether a checkpoint was completed since."""
        return self._halt_saved

    # -------------------------------------------------------------- workers and regions

    def worker_lost(
        self, name: str, cause: str, error: GeoRayError | None, *, is_present: bool
    ) -> Literal["replace", "ignore"] | GeoRayError:
        """A worker's process has ended before its work.

        Args:
            name: of the worker.
            cause: for people.
            error: what it raised; None if it died.
            is_present: whether its region is still part of the run.

        Returns:
            What to do, or why the run must end: ``error`` itself, if that lies in task or data.
        """
        if not is_present:
            return "ignore"
        # A lost connection says nothing about the worker: whoever comes next connects anew.
        if error is not None and not isinstance(error, LinkDownError):
            return error
        limit = self._limits.max_worker_restarts
        if self._restarts >= limit:
            return WorkerLostError(
                f"worker {name} died ({cause}); train.max_worker_restarts = {limit} is used up"
            )
        self._restarts += 1
        return "replace"

    def regions_lost(
        self,
        lost: Mapping[str, str],
        failures: Mapping[str, GeoRayError],
        averager_region: str,
        spare: Collection[str],
    ) -> dict[str, str]:
        """Processes of regions are gone, or regions say that they cannot go on.

        Args:
            lost: causes, by regions whose server or bridge does not answer.
            failures: what regions say of themselves.
            averager_region: where the averager lives.
            spare: the regions that the run can go on without.

        Returns:
            Causes by the regions to go on without.

        Raises:
            RegionLostError: a region is lost that is needed.
            GeoRayError: why a region cannot go on.
        """
        gone = dict(lost)
        for region, failure in failures.items():
            if region in gone:
                continue
            # Its bridge is gone, or it was cut off for so long that the others went on without it.
            cut_off = isinstance(failure, LinkDownError) or averager_region != region
            if not (cut_off and region in spare):
                raise failure
            gone[region] = failure.message
        for region, cause in gone.items():
            if region not in spare:
                raise RegionLostError(cause)
        return gone

    def on_progress(self, now_s: float) -> None:
        """A region has made a step or an exchange, or has evaluated."""
        self._progress_s = self._told_s = now_s

    def stalled(self, now_s: float) -> float | None:
        """Seconds without progress anywhere, if the user should hear of it (again); else None.

        That is no reason to end a run: a step takes as long as it takes, and who is gone is noticed
        otherwise.
        """
        if now_s - self._told_s < STALL_S:
            return None
        self._told_s = now_s
        return now_s - self._progress_s

    def check_goes_on(
        self,
        now_s: float,
        still: Mapping[str, int | None],
        unanswered: Mapping[str, int] | None,
    ) -> None:
        """Whether anything can still happen; however long it takes, it is waited for.

        Processes are asked one after the other, so that must be seen for a while.

        Args:
            now_s: the present time.
            still: see `stalled_regions`, as for the next.
            unanswered: by the averager.

        Raises:
            StalledError: nothing can.
        """
        waits = stalled_regions(still, unanswered)
        if waits != self._stuck or not waits:
            self._stuck, self._stuck_s = waits, now_s
        elif now_s - self._stuck_s >= STUCK_S:
            raise stalled_error(waits)

    # -------------------------------------------------------------- saving

    def due(self, now_s: float, *, is_open: bool) -> Save | None:
        """Whether to begin a checkpoint now.

        Args:
            now_s: the present time.
            is_open: whether one is being made.

        Raises:
            GeoRayError: the regions were to stand still, and did not in time.
        """
        if self._halting is not None:
            if now_s - self._halt_began_s > HALT_DEADLINE_S:
                raise self.not_saved(f"the regions did not stand still in {HALT_DEADLINE_S:g} s")
            return None if is_open or self._halt_saved else self._save(now_s, halt=True)
        every_s = self._limits.save_every_s
        if is_open or every_s is None or now_s - self._saved_s < every_s:
            return None
        return self._save(now_s, halt=False)

    def _save(self, now_s: float, *, halt: bool) -> Save:
        self._saved_s = self._part_s = now_s
        return Save(halt)

    def on_part(self, now_s: float) -> None:
        """A part of the open checkpoint has come."""
        self._part_s = now_s

    def is_overdue(self, now_s: float, *, awaits_parts: bool) -> bool:
        """Whether to give the open checkpoint up and begin another in its time.

        That is no failed save: regions that hear of it by their next answer may take long. But an
        open one keeps all others from being made.

        Args:
            now_s: the present time.
            awaits_parts: whether a checkpoint is open that has not all of its parts.
        """
        return awaits_parts and now_s - self._part_s >= PART_S

    def saved(self) -> None:
        """A checkpoint is complete."""
        self._failed_saves = 0
        self._halt_saved = self._halting is not None

    def save_failed(self, error: GeoRayError) -> None:
        """Go on with the checkpoint before; but not for ever, and not if the run must stop.

        Raises:
            GeoRayError: the run must end.
        """
        self._failed_saves += 1
        if self._halting is not None or self._failed_saves >= MAX_FAILED_SAVES:
            raise error

    # -------------------------------------------------------------- stopping

    def halt(self, why: GeoRayError, now_s: float) -> bool:
        """Save, then end with ``why``; whether that is news."""
        if self._halting is not None:
            return False
        self._halting, self._halt_began_s = why, now_s
        return True

    def exhausted(self, region: str, now_s: float) -> GeoRayError | None:
        """A region has refused too many steps in a row; why the run halts, if that is news."""
        if isinstance(self._halting, NonFiniteError):
            return None
        # More than an interrupt: who resumes must know.
        self._halting = NonFiniteError(
            f"region '{region}' refused {self._limits.max_refused_steps} steps in a row: no finite "
            "loss and gradient"
        )
        self._halt_began_s = now_s
        return self._halting

    def stop(self, cause: str) -> bool:
        """Let all regions finish; whether that is news."""
        if self.stopping is not None:
            return False
        self.stopping = cause
        return True

    def check_end(self, phases: Collection[str]) -> None:
        """All workers are home.

        Args:
            phases: of the regions.

        Raises:
            GeoRayError: the run was halted, with what became of its checkpoint.
        """
        if self._halting is None:
            return
        # It was at its end before the request could have an effect.
        if isinstance(self._halting, InterruptedRunError) and set(phases) == {"done"}:
            return
        if self._halt_saved:
            raise type(self._halting)(f"{self._halting.message}; its state is saved")
        raise self.not_saved("the run was about to end")

    def not_saved(self, cause: str) -> GeoRayError:
        """The reason to stop, with the truth about the checkpoint."""
        why = self._halting or InterruptedRunError("the run was interrupted")
        return type(why)(f"{why.message}; no new checkpoint was made: {cause}")
