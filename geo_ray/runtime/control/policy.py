"""What a run does about trouble: lost workers and regions, failed saves, requests to stop. Pure.

The controller tells what happened and when, and does what it is answered. Every wait of a halt has
a deadline.

    worker_lost  -> replace it, now or later, ignore it, or the error that ends the run
    worker_left  -> the same of one that was sent away
    replacements -> the workers whose time has come
    regions_lost -> the regions to go on without, or the error that ends the run
    due          -> Save (and whether the regions stand still after it), or nothing
    stalled      -> for how long nothing has happened, if that is worth a line
    check_goes_on -> nothing; or the error that ends the run: nobody can make progress any more
    overdue      -> why an open checkpoint is given up, if it is: its parts do not come
    save_failed  -> seconds until the next attempt; or the error that ends the run
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.errors import (
    CheckpointConflictError,
    GeoRayError,
    InterruptedRunError,
    LeaseLostError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    WorkerLostError,
)
from geo_ray.runtime.control.restarts import Restarts
from geo_ray.training.averager.stalled import stalled_error, stalled_regions

HALT_DEADLINE_S: Final = 120.0
"""For the regions to stand still and be saved; and before, for the parts of an open checkpoint."""

STUCK_S: Final = 10.0
STALL_S: Final = 300.0
MAX_PAUSE_S: Final = 60.0
"""Between attempts to save; they begin with one second, which doubles."""
PART_S: Final = 600.0
"""Longest time without a part of an open checkpoint, unless the configuration says another."""


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
        max_worker_restarts: workers that may be replaced in a window.
        max_refused_steps: steps in a row without a usable gradient.
        save_every_s: between checkpoints; None: none by time.
        min_regions: with fewer regions the run ends.
        restart_window_s: length of that window; None: the whole run.
        part_s: longest time without a part of an open checkpoint.
        retry_s: how long saving is tried again before the run ends without it.
    """

    max_worker_restarts: int
    max_refused_steps: int
    save_every_s: float | None
    min_regions: int = 1
    restart_window_s: float | None = None
    part_s: float = PART_S
    retry_s: float = 600.0


class RunPolicy:
    """Remembers what was decided; see the module's docstring. Times are seconds of one clock.

    Args:
        limits: what the configuration allows.
        now_s: the present time.
    """

    def __init__(self, limits: RunLimits, now_s: float) -> None:
        self._limits = limits
        self._restarts = Restarts(limits.max_worker_restarts, limits.restart_window_s)
        self._later: list[tuple[str, int]] = []
        self._failed_saves = 0
        self._failing_s: float | None = None  # since when no checkpoint could be saved
        self._retry_at_s = now_s
        self._failure: GeoRayError | None = None
        self._saved_s = self._part_s = self._open_s = now_s
        self._took_s = 0.0  # the newest complete checkpoint
        self._halting: GeoRayError | None = None
        self._halt_asked_s = self._halt_until_s = 0.0
        self._halt_saved = self._halts = False
        self.newest_saved: int | None = None
        self._saved_since: int | None = None  # newest checkpoint completed after the request
        self.stopping: str | None = None
        self._progress_s = self._told_s = now_s
        self._progress = 0  # steps and exchanges that were told of
        self._begun_with = self._saved_with = -1  # of these, when a checkpoint began
        self._stuck: dict[str, int] = {}
        self._stuck_s = now_s

    @property
    def is_halting(self) -> bool:
        """Whether the regions are to stand still, for whatever reason."""
        return self._halting is not None

    @property
    def is_halt_saved(self) -> bool:
        """Whether the checkpoint after which they stand still is complete."""
        return self._halt_saved

    # -------------------------------------------------------------- workers and regions

    def worker_lost(
        self,
        place: tuple[str, int],
        cause: str,
        error: GeoRayError | None,
        *,
        is_present: bool,
        goes_on: bool,
        now_s: float,
    ) -> Literal["replace", "later", "ignore"] | GeoRayError:
        """A worker's process has ended before its work.

        Args:
            place: region and rank of the worker.
            cause: for people.
            error: what it raised; None if it died.
            is_present: whether its region is still part of the run.
            goes_on: whether its region goes on without it.
            now_s: the present time.

        Returns:
            What to do, or why the run must end: ``error`` itself, if that lies in task or data.
        """
        if not is_present:
            return "ignore"
        # A lost connection says nothing about the worker: whoever comes next connects anew.
        if error is not None and not isinstance(error, LinkDownError):
            return error
        if goes_on:
            return self.worker_left(place, now_s)
        if not self._restarts.take(now_s):
            region, rank = place
            return WorkerLostError(
                f"worker {region}/{rank} died ({cause}); {self._restarts} is used up"
            )
        return "replace"

    def worker_left(self, place: tuple[str, int], now_s: float) -> Literal["replace", "later"]:
        """A worker is gone that can be waited for; what to do about it."""
        if self._restarts.take(now_s):
            return "replace"
        self._later.append(place)
        return "later"

    def replacements(self, now_s: float) -> list[tuple[str, int]]:
        """Those that were to be replaced later, and may be now."""
        due: list[tuple[str, int]] = []
        while len(due) < len(self._later) and self._restarts.take(now_s):
            due.append(self._later[len(due)])
        del self._later[: len(due)]
        return due

    def regions_lost(
        self,
        lost: Mapping[str, str],
        failures: Mapping[str, GeoRayError],
        present: Mapping[str, bool],
        former_homes: Collection[str],
    ) -> dict[str, str]:
        """Processes of regions are gone, or regions say that they cannot go on.

        Args:
            lost: causes, by regions whose server or bridge does not answer.
            failures: what regions say of themselves.
            present: the regions that take part: whether the run can go on without each.
            former_homes: where the averager lived before it moved, if it has.

        Returns:
            Causes by the regions to go on without.

        Raises:
            RegionLostError: a region is lost that is needed, or too few are left.
            GeoRayError: why a region cannot go on.
        """
        gone = dict(lost)
        for region, failure in failures.items():
            if region in gone:
                continue
            # Its bridge is gone, or it was cut off for so long that the others went on without it.
            # What else fails in a region lies in task, data or program, and would do so elsewhere.
            cut_off = isinstance(failure, LinkDownError | RegionLostError)
            cut_off = cut_off or region in former_homes
            if not (cut_off and present.get(region)):
                raise failure
            gone[region] = failure.message
        for region, cause in gone.items():
            if not present.get(region):
                raise RegionLostError(cause)
        left, least = len(present) - len(gone), self._limits.min_regions
        if gone and left < least:
            raise RegionLostError(
                f"{'; '.join(gone.values())}; {left} of {len(present)} regions are left, and "
                f"members.min asks for {least}"
            )
        return gone

    def on_progress(self, now_s: float) -> None:
        """A region has made a step or an exchange, or has evaluated."""
        self._progress_s = self._told_s = now_s
        self._progress += 1

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

        Checkpoints take half of the time at most: the next one waits, after one that took long, for
        as long again. There is none while nothing happens: it would hold the same state as the
        newest, and push older ones out.

        Args:
            now_s: the present time.
            is_open: whether one is being made.

        Raises:
            GeoRayError: the regions were to stand still, and did not in time.
        """
        if self._halting is not None:
            if now_s > self._halt_until_s:
                late = f"the one before was not written to its end in {self._limits.part_s:g} s"
                if self._halts:
                    late = f"the regions did not stand still in {HALT_DEADLINE_S:g} s"
                if self._failure is not None:
                    late = f"it was tried for {self._limits.retry_s:g} s: {self._failure.message}"
                raise self.not_saved(late)
            waits = is_open or self._halt_saved or now_s < self._retry_at_s
            return None if waits else self._save(now_s, halt=True)
        if is_open:
            self._open_s = now_s
        every_s = self._limits.save_every_s
        if is_open or every_s is None:
            return None
        if now_s < max(self._retry_at_s, self._saved_s + max(every_s, 2 * self._took_s)):
            return None
        if self._saved_with == self._progress:
            return None
        return self._save(now_s, halt=False)

    def _save(self, now_s: float, *, halt: bool) -> Save:
        self._saved_s = self._part_s = self._open_s = now_s
        self._begun_with = self._progress
        if halt and not self._halts:  # one that is made again gets no more time
            self._halt_until_s = now_s + HALT_DEADLINE_S
        self._halts = halt
        return Save(halt)

    def on_part(self, now_s: float) -> None:
        """A part of the open checkpoint has come."""
        self._part_s = now_s

    def overdue(self, now_s: float, *, awaits_parts: bool) -> str | None:
        """Why to give the open checkpoint up and begin another in its time; None: it is not.

        That is no failed save: regions that hear of it by their next answer may take long. But an
        open one keeps all others from being made, above all the one after which a run halts.

        Args:
            now_s: the present time.
            awaits_parts: whether a checkpoint is open that has not all of its parts.
        """
        if not awaits_parts:
            return None
        waits = self._halting is not None and not self._halts
        if waits and now_s - self._halt_asked_s >= HALT_DEADLINE_S:
            return f"its parts were not there {HALT_DEADLINE_S:g} s after the request to stop"
        if now_s - self._part_s >= self._limits.part_s:
            return f"no part of it has come for {self._limits.part_s:g} s"
        return None

    def saved(self, checkpoint: int) -> None:
        """Checkpoint ``checkpoint`` is complete."""
        self.newest_saved = checkpoint
        self._saved_with = self._begun_with
        self._took_s = self._open_s - self._saved_s
        self._failed_saves, self._failing_s, self._failure = 0, None, None
        # One that was open when the halt came lets the regions go on: another has to follow.
        self._halt_saved = self._halting is not None and self._halts
        if self._halting is not None:
            self._saved_since = checkpoint

    def save_failed(self, error: GeoRayError, now_s: float) -> float:
        """Continue with the checkpoint before, and try again after a pause that doubles.

        A store that does not answer, or a full disk, does not end a run that trains. For a run that
        must stop, saving is tried for `RunLimits.retry_s`; then `due` ends it.

        Args:
            error: why a checkpoint was not written.
            now_s: the present time.

        Returns:
            Seconds until the next attempt, at the earliest.

        Raises:
            GeoRayError: somebody else writes the run's checkpoints, or has taken the run over: of
                two that go on, neither would be saved.
        """
        if isinstance(error, CheckpointConflictError | LeaseLostError):
            raise error
        pause_s = min(MAX_PAUSE_S, 2.0 ** min(self._failed_saves, 10))
        self._failed_saves += 1
        self._failure, self._retry_at_s = error, now_s + pause_s
        if self._failing_s is None:
            self._failing_s = now_s
        if self._halting is not None:
            self._halt_until_s = max(self._halt_until_s, self.saves_until_s(now_s))
        return pause_s

    @property
    def is_failing(self) -> bool:
        """Whether the newest attempt to save has failed."""
        return self._failing_s is not None

    def may_retry(self, now_s: float) -> bool:
        """Whether the pause after a checkpoint that failed is over."""
        return now_s >= self._retry_at_s

    def saves_until_s(self, now_s: float) -> float:
        """Until when saving is tried again if the run does not train meanwhile."""
        return (now_s if self._failing_s is None else self._failing_s) + self._limits.retry_s

    # -------------------------------------------------------------- stopping

    def halt(self, why: GeoRayError, now_s: float) -> bool:
        """Save, then end with ``why``; whether that is news."""
        if self._halting is not None:
            return False
        self._halting = why
        self._halt_asked(now_s)
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
        self._halt_asked(now_s)
        return self._halting

    def _halt_asked(self, now_s: float) -> None:
        # The time to stand still is counted from the checkpoint after which they do.
        self._halt_asked_s = now_s
        self._halt_until_s = now_s + (HALT_DEADLINE_S if self._halts else self._limits.part_s)

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
            why = self._halting
            raise type(why)(f"{why.message}; its state is saved", fix=why.fix)
        raise self.not_saved("the run was about to end")

    def not_saved(self, cause: str) -> GeoRayError:
        """The reason to stop, with the truth about the checkpoint."""
        why = self._halting or InterruptedRunError("the run was interrupted")
        made = "no new checkpoint was made"
        if self._saved_since is not None:
            made = f"checkpoint {self._saved_since} is complete, no later one was made"
        return type(why)(f"{why.message}; {made}: {cause}")
