"""Decisions about a run in trouble: lost workers and regions, hangs, quorum and divergence. Pure.

The controller reports what happened and when, and carries out the answer (`process_watch.py`,
`members.py`); every wait of a pause has a deadline. A dead worker is replaced within the restart
allowance. When that is used up, an elastic region continues and replaces it later; otherwise the
run ends. An error of the task or the data ends the run. Quorum: with `members.min` a run continues
with that many regions, else it waits for all that will return, up to `members.wait_s`. Hangs:
limits follow from the usual step time; a late process is named first and replaced later. A
checkpoint is healthy if it is finite, at most half of its steps were refused, and its loss is below
``best + (first - best) / 2 + |first| / 4``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, cast

from geo_ray.base.errors import (
    CheckpointConflictError,
    GeoRayError,
    InterruptedRunError,
    LeaseLostError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    WorkerLostError,
)
from geo_ray.base.restarts import Restarts
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.training.averager import stalled_error, stalled_regions
from geo_ray.training.stragglers import READING, Computing


@dataclass(slots=True)
class Quorum:
    """Decides when a run pauses for want of regions, and when it has waited enough. Pure.

    Rule: with `members.min` a run goes on while so many regions are there; without, it waits for
        every
    region that is lost and will be brought back. It goes on at once when somebody is there to join,
    since newcomers begin at a border, which the others come to by training on. After
    `members.wait_s` without enough regions it is saved and ends. Times are seconds of one clock.

    Attributes:
        least: regions that must be there; None: all that have not left.
        wait_s: longest pause.
    """

    least: int | None
    wait_s: float
    _since_s: float | None = None
    _is_paused: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether nobody trains."""
        return self._is_paused

    def see(
        self,
        here: Collection[str],
        awaited: Collection[str],
        *,
        is_joining: bool,
        is_ending: bool,
        now_s: float,
    ) -> str | None:
        """Judge who is there; `is_paused` has what follows.

        Args:
            here: regions that take part.
            awaited: lost ones that will be brought back.
            is_joining: whether one of them is there, and joins at the next border.
            is_ending: whether the run is told to finish, or to halt: then it is not paused.
            now_s: the present time.

        Returns:
            What is missing, while it is.
        """
        short = bool(awaited) if self.least is None else len(here) < self.least
        if not short:
            self._since_s, self._is_paused = None, False
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        self._is_paused = not (is_joining or is_ending)
        names = ", ".join(sorted(awaited)) or "nobody can come back"
        least = "" if self.least is None else f", and members.min asks for {self.least}"
        return f"regions that take part: {len(here)}{least}; lost: {names}"

    def overdue(self, missing: str, now_s: float) -> RegionLostError | None:
        """Why the run is saved and ends, if it has waited enough."""
        if self._since_s is None or now_s - self._since_s < self.wait_s:
            return None
        return RegionLostError(
            f"{missing}; they were not back within members.wait_s = {self.wait_s:g} s",
            fix="See why their machines do not come; `geo-ray train --resume` goes on with those "
            "that the checkpoint has.",
        )


NAMED_S: Final = 10.0
REPLACED_S: Final = 60.0
_NAMED_TIMES: Final = 3.0
_REPLACED_TIMES: Final = 20.0
_UNUSUAL: Final = 10.0
_OF_TIMEOUT: Final = 0.8  # others that wait give up at `train.step_timeout_s`


@dataclass(frozen=True, slots=True)
class Hangs:
    """The limits of a run.

    Attributes:
        step_timeout_s: `train.step_timeout_s` of the run.
    """

    step_timeout_s: float | None = None

    def judge(
        self, computing: Computing, usual_s: float | None, doing: str | None
    ) -> Literal["fine", "named", "replaced"]:
        """What to do about a worker.

        Args:
            computing: what its server says of it.
            usual_s: the usual time of a step there.
            doing: what it says of itself; None: it has not answered lately, or was not asked.
        """
        if computing.for_s < self.named_after_s(usual_s, is_usual=computing.is_usual):
            return "fine"
        late = computing.for_s >= self.replaced_after_s(usual_s, is_usual=computing.is_usual)
        return "replaced" if late and doing != READING else "named"

    def named_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """After how many seconds of a step a worker is named."""
        least_s = max(NAMED_S, _NAMED_TIMES * (usual_s or 0.0))
        return least_s if is_usual else _UNUSUAL * least_s

    def replaced_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """After how many seconds of a step a worker is replaced."""
        limit_s = max(REPLACED_S, _REPLACED_TIMES * (usual_s or 0.0))
        if not is_usual:
            return _UNUSUAL * limit_s
        if self.step_timeout_s is not None:
            return min(limit_s, _OF_TIMEOUT * self.step_timeout_s)
        return limit_s


MIN_STEPS = 50


@dataclass(slots=True)
class LossHealth:
    """Follows the training loss over all regions from checkpoint to checkpoint.

    Attributes:
        first: mean loss until the first checkpoint; None before.
        best: lowest mean between two checkpoints; None before the first.
        healthy: what the last checkpoint was found to be.
    """

    first: float | None = None
    best: float | None = None
    healthy: bool = True
    _total: float = 0.0
    _steps: int = 0
    _refused: int = 0
    _newest: deque[float] = field(default_factory=partial(deque, maxlen=MIN_STEPS))

    def on_step(self, loss: float | None) -> None:
        """A region has applied a step with this loss; None if all of its rows were refused."""
        if loss is not None and math.isfinite(loss):
            self._total += loss
            self._steps += 1
            self._newest.append(loss)
            return
        if self.first is None and self._steps:
            self.first = self.best = self._total / self._steps
        self._refused += 1

    def judge(self) -> bool:
        """A checkpoint is taken: whether the run was healthy since the one before."""
        if self._steps or self._refused:
            self.healthy = self._refused <= self._steps and self._is_learning()
            self._total, self._steps, self._refused = 0.0, 0, 0
        return self.healthy

    def export(self) -> dict[str, float | None]:
        """Plain values, for a checkpoint's manifest."""
        return {"first": self.first, "best": self.best}

    @classmethod
    def restore(cls, manifest: CheckpointManifest) -> LossHealth:
        """As it was at a checkpoint; `export` is its ``loss``."""
        loss = manifest.extra.get("loss")
        if not isinstance(loss, dict):
            return cls(healthy=manifest.healthy)
        first, best = (cast(float | None, loss.get(name)) for name in ("first", "best"))
        return cls(first, best, manifest.healthy)

    def _is_learning(self) -> bool:
        is_long = self._steps >= MIN_STEPS
        mean = self._total / self._steps if is_long else sum(self._newest) / len(self._newest)
        if self.first is None or self.best is None:
            self.first = self.best = mean
        limit = self.best + (self.first - self.best) / 2 + abs(self.first) / 4
        self.best = min(self.best, mean)
        return mean <= limit


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
        self._progress_s = self._reported_s = now_s
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
        former_leaders: Collection[str],
    ) -> dict[str, str]:
        """Processes of regions are gone, or regions say that they cannot go on.

        Args:
            lost: causes, by regions whose server or bridge does not answer.
            failures: what regions say of themselves.
            present: the regions that take part: whether the run can go on without each.
            former_leaders: where the averager lived before it moved, if it has.

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
            cut_off = cut_off or region in former_leaders
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
        self._progress_s = self._reported_s = now_s
        self._progress += 1

    def stalled(self, now_s: float) -> float | None:
        """Seconds without progress anywhere, if the user should hear of it (again); else None.

        That is no reason to end a run: a step takes as long as it takes, and who is gone is noticed
        otherwise.
        """
        if now_s - self._reported_s < STALL_S:
            return None
        self._reported_s = now_s
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
