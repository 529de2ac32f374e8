"""Decisions about a run in trouble: lost workers and regions, hangs, quorum and divergence. Pure.

The controller reports what happened and when, and carries out the answer (`process_watch.py`,
`members.py`); every wait of a pause has a deadline. A dead worker is replaced within the restart
allowance. When that is used up, an elastic region continues and replaces it later; otherwise the
run ends. An error of the task or the data ends the run. Quorum: with `members.min` a run continues
with that many regions; without it, it waits for all that will return, up to `members.wait_s`.
Hangs: limits follow from the usual step time; a late process is reported first and replaced later.
A checkpoint is healthy if it is finite, at most half of its steps were refused, and its loss is
below ``best + (first - best) / 2 + |first| / 4``.
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
    """Decides when a run pauses for missing regions, and when it gives up waiting. Pure.

    Rule: with `members.min` a run continues while that many regions are present; without it, it
    waits for every lost region that will be brought back. It continues as soon as a region is ready
    to join, because joining regions enter at a membership barrier, which the others reach only by
    training. After `members.wait_s` without enough regions it is saved and ends. Times are seconds
    of one clock.

    Attributes:
        least: number of required regions; None: all that have not left.
        wait_s: longest pause.
    """

    least: int | None
    wait_s: float
    _since_s: float | None = None
    _is_paused: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused."""
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
        """Evaluate which regions are present; sets `is_paused`.

        Args:
            here: regions that take part.
            awaited: lost regions that will be brought back.
            is_joining: whether one of them is ready and joins at the next barrier.
            is_ending: whether the run was told to finish or halt; then it is not paused.
            now_s: the current time.

        Returns:
            What is missing, while it is paused.
        """
        short = bool(awaited) if self.least is None else len(here) < self.least
        if not short:
            self._since_s, self._is_paused = None, False
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        self._is_paused = not (is_joining or is_ending)
        names = ", ".join(sorted(awaited)) or "none can return"
        least = "" if self.least is None else f"; members.min requires {self.least}"
        return f"regions that take part: {len(here)}{least}; lost: {names}"

    def overdue(self, missing: str, now_s: float) -> RegionLostError | None:
        """Return why the run is saved and ends, if it has waited long enough."""
        if self._since_s is None or now_s - self._since_s < self.wait_s:
            return None
        return RegionLostError(
            f"{missing}; they were not back within members.wait_s = {self.wait_s:g} s",
            fix="Check why their machines are missing; `geo-ray train --resume` continues with the "
            "regions in the checkpoint.",
        )


NAMED_S: Final = 10.0
REPLACED_S: Final = 60.0
_NAMED_TIMES: Final = 3.0
_REPLACED_TIMES: Final = 20.0
_UNUSUAL: Final = 10.0
_OF_TIMEOUT: Final = 0.8  # other waiting workers give up at `train.step_timeout_s`


@dataclass(frozen=True, slots=True)
class Hangs:
    """Limits for detecting hung workers.

    Attributes:
        step_timeout_s: `train.step_timeout_s` of the run.
    """

    step_timeout_s: float | None = None

    def judge(
        self, computing: Computing, usual_s: float | None, doing: str | None
    ) -> Literal["fine", "named", "replaced"]:
        """Decide what to do about a worker.

        Args:
            computing: its server's report.
            usual_s: usual time of a step of the region.
            doing: its own report; None: it has not answered recently, or was not asked.
        """
        if computing.for_s < self.named_after_s(usual_s, is_usual=computing.is_usual):
            return "fine"
        late = computing.for_s >= self.replaced_after_s(usual_s, is_usual=computing.is_usual)
        return "replaced" if late and doing != READING else "named"

    def named_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """Return the step duration after which a worker is reported."""
        least_s = max(NAMED_S, _NAMED_TIMES * (usual_s or 0.0))
        return least_s if is_usual else _UNUSUAL * least_s

    def replaced_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """Return the step duration after which a worker is replaced."""
        limit_s = max(REPLACED_S, _REPLACED_TIMES * (usual_s or 0.0))
        if not is_usual:
            return _UNUSUAL * limit_s
        if self.step_timeout_s is not None:
            return min(limit_s, _OF_TIMEOUT * self.step_timeout_s)
        return limit_s


MIN_STEPS = 50


@dataclass(slots=True)
class LossHealth:
    """Tracks the training loss over all regions between checkpoints.

    Attributes:
        first: mean loss until the first checkpoint; None before it.
        best: lowest mean between two checkpoints; None before the first.
        healthy: result of the last checkpoint.
    """

    first: float | None = None
    best: float | None = None
    healthy: bool = True
    _total: float = 0.0
    _steps: int = 0
    _refused: int = 0
    _newest: deque[float] = field(default_factory=partial(deque, maxlen=MIN_STEPS))

    def on_step(self, loss: float | None) -> None:
        """Record a region's step with this loss; None if all of its rows were refused."""
        if loss is not None and math.isfinite(loss):
            self._total += loss
            self._steps += 1
            self._newest.append(loss)
            return
        if self.first is None and self._steps:
            self.first = self.best = self._total / self._steps
        self._refused += 1

    def judge(self) -> bool:
        """Return whether the run was healthy since the last checkpoint; a new one begins."""
        if self._steps or self._refused:
            self.healthy = self._refused <= self._steps and self._is_learning()
            self._total, self._steps, self._refused = 0.0, 0, 0
        return self.healthy

    def export(self) -> dict[str, float | None]:
        """Return plain values for a checkpoint's manifest."""
        return {"first": self.first, "best": self.best}

    @classmethod
    def restore(cls, manifest: CheckpointManifest) -> LossHealth:
        """Return the state at a checkpoint, from the ``loss`` that `export` wrote."""
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
"""Limit for pausing and saving the regions, and before that for the parts of an open checkpoint."""

STUCK_S: Final = 10.0
STALL_S: Final = 300.0
MAX_PAUSE_S: Final = 60.0
"""Longest pause between attempts to save; the first is one second, and each one doubles."""
PART_S: Final = 600.0
"""Longest time without a part of an open checkpoint, unless configured."""


@dataclass(frozen=True, slots=True)
class Save:
    """Begin a checkpoint now.

    Attributes:
        halt: the regions pause after it.
    """

    halt: bool


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits from the configuration.

    Attributes:
        max_worker_restarts: worker replacements allowed in a window.
        max_refused_steps: consecutive steps without a usable gradient.
        save_every_s: time between checkpoints; None: not periodic.
        min_regions: with fewer regions the run ends.
        restart_window_s: length of that window; None: the whole run.
        part_s: longest time without a part of an open checkpoint.
        retry_s: how long saving is retried before the run ends without it.
    """

    max_worker_restarts: int
    max_refused_steps: int
    save_every_s: float | None
    min_regions: int = 1
    restart_window_s: float | None = None
    part_s: float = PART_S
    retry_s: float = 600.0


class RunPolicy:
    """The decisions of a run and their state; see the module. Times are seconds of one clock.

    Args:
        limits: limits from the configuration.
        now_s: the current time.
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
        self._took_s = 0.0  # duration of the newest complete checkpoint
        self._halting: GeoRayError | None = None
        self._halt_asked_s = self._halt_until_s = 0.0
        self._halt_saved = self._halts = False
        self.newest_saved: int | None = None
        self._saved_since: int | None = None  # newest checkpoint completed after the request
        self.stopping: str | None = None
        self._progress_s = self._reported_s = now_s
        self._progress = 0  # reported steps and exchanges
        self._begun_with = self._saved_with = -1  # progress when a checkpoint began
        self._stuck: dict[str, int] = {}
        self._stuck_s = now_s

    @property
    def is_halting(self) -> bool:
        """Whether the regions must pause, for any reason."""
        return self._halting is not None

    @property
    def is_halt_saved(self) -> bool:
        """Whether the checkpoint after which they pause is complete."""
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
        """Decide what to do about a worker's process that has ended before its work was done.

        Args:
            place: region and rank of the worker.
            cause: the cause, for messages.
            error: the error it raised; None if it died.
            is_present: whether its region still takes part.
            goes_on: whether its region continues without it.
            now_s: the current time.

        Returns:
            The action, or why the run must end: ``error`` itself, if it is an error of the task or
            data.
        """
        if not is_present:
            return "ignore"
        # A lost connection is no fault of the worker: its replacement reconnects.
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
        """Decide what to do about a worker that has left and is not urgently needed."""
        if self._restarts.take(now_s):
            return "replace"
        self._later.append(place)
        return "later"

    def replacements(self, now_s: float) -> list[tuple[str, int]]:
        """Return the postponed replacements that are allowed now."""
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
        """Decide on lost processes of regions and on regions that report failures.

        Args:
            lost: causes, by regions whose server or bridge does not answer.
            failures: errors reported by regions.
            present: the regions that take part: whether the run can continue without each.
            former_leaders: earlier regions of the averager.

        Returns:
            Causes by the regions to continue without.

        Raises:
            RegionLostError: a required region is lost, or too few are left.
            GeoRayError: why a region cannot continue.
        """
        gone = dict(lost)
        for region, failure in failures.items():
            if region in gone:
                continue
            # Its bridge is gone, or it was unreachable for so long that the others continued
            # without it. Any other failure of a region lies in task, data or program, and would
            # recur elsewhere.
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
        """Record that a region has made a step or an exchange, or has evaluated."""
        self._progress_s = self._reported_s = now_s
        self._progress += 1

    def stalled(self, now_s: float) -> float | None:
        """Return the seconds without progress if the user must be notified (again); else None.

        It does not end the run: steps may take long, and lost processes are detected otherwise.
        """
        if now_s - self._reported_s < STALL_S:
            return None
        self._reported_s = now_s
        return now_s - self._progress_s

    def check_progress(
        self,
        now_s: float,
        still: Mapping[str, int | None],
        unanswered: Mapping[str, int] | None,
    ) -> None:
        """Check that progress is still possible, however long it takes.

        Processes are polled one after the other, so the condition must persist for a while.

        Args:
            now_s: the current time.
            still: the regions from `stalled_regions`.
            unanswered: the requests that the averager has not answered.

        Raises:
            StalledError: no progress is possible.
        """
        waits = stalled_regions(still, unanswered)
        if waits != self._stuck or not waits:
            self._stuck, self._stuck_s = waits, now_s
        elif now_s - self._stuck_s >= STUCK_S:
            raise stalled_error(waits)

    # -------------------------------------------------------------- saving

    def due(self, now_s: float, *, is_open: bool) -> Save | None:
        """Return the checkpoint to begin now, if any.

        Checkpoints take at most half of the time: after one that took long, the next waits for the
        same duration. None is made without progress: it would have the state of the newest one and
        push older ones out.

        Args:
            now_s: the current time.
            is_open: whether a checkpoint is in progress.

        Raises:
            GeoRayError: the regions did not pause in time.
        """
        if self._halting is not None:
            if now_s > self._halt_until_s:
                late = f"the previous one was not complete within {self._limits.part_s:g} s"
                if self._halts:
                    late = f"the regions did not pause within {HALT_DEADLINE_S:g} s"
                if self._failure is not None:
                    late = f"it was retried for {self._limits.retry_s:g} s: {self._failure.message}"
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
        if halt and not self._halts:  # a repeated one gets no extra time
            self._halt_until_s = now_s + HALT_DEADLINE_S
        self._halts = halt
        return Save(halt)

    def on_part(self, now_s: float) -> None:
        """Record the arrival of a part of the open checkpoint."""
        self._part_s = now_s

    def overdue(self, now_s: float, *, awaits_parts: bool) -> str | None:
        """Return why to give up the open checkpoint and begin another one; None: do not.

        This is not a failed save: regions that learn of it by their next answer may take long. But
        an open checkpoint blocks all others, in particular the one after which a run halts.

        Args:
            now_s: the current time.
            awaits_parts: whether a checkpoint is open and incomplete.
        """
        if not awaits_parts:
            return None
        waits = self._halting is not None and not self._halts
        if waits and now_s - self._halt_asked_s >= HALT_DEADLINE_S:
            return f"its parts had not arrived {HALT_DEADLINE_S:g} s after the request to stop"
        if now_s - self._part_s >= self._limits.part_s:
            return f"no part of it has arrived for {self._limits.part_s:g} s"
        return None

    def saved(self, checkpoint: int) -> None:
        """Record that checkpoint ``checkpoint`` is complete."""
        self.newest_saved = checkpoint
        self._saved_with = self._begun_with
        self._took_s = self._open_s - self._saved_s
        self._failed_saves, self._failing_s, self._failure = 0, None, None
        # After a checkpoint that was open when the halt came, the regions continue: another must
        # follow.
        self._halt_saved = self._halting is not None and self._halts
        if self._halting is not None:
            self._saved_since = checkpoint

    def save_failed(self, error: GeoRayError, now_s: float) -> float:
        """Continue with the previous checkpoint, and retry after a pause that doubles.

        An unreachable store or a full disk does not end a run that trains. For a run that must
        stop, saving is retried for `RunLimits.retry_s`; then `due` ends it.

        Args:
            error: why a checkpoint was not written.
            now_s: the current time.

        Returns:
            Seconds until the next attempt, at the earliest.

        Raises:
            GeoRayError: another process writes the run's checkpoints, or has taken the run over;
                with two writers neither would be saved.
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
        """Return whether the pause after a failed checkpoint is over."""
        return now_s >= self._retry_at_s

    def saves_until_s(self, now_s: float) -> float:
        """Return until when saving is retried if the run does not train."""
        return (now_s if self._failing_s is None else self._failing_s) + self._limits.retry_s

    # -------------------------------------------------------------- stopping

    def halt(self, why: GeoRayError, now_s: float) -> bool:
        """Save, then end with ``why``; return False if that was requested before."""
        if self._halting is not None:
            return False
        self._halting = why
        self._halt_asked(now_s)
        return True

    def exhausted(self, region: str, now_s: float) -> GeoRayError | None:
        """Record too many consecutive refused steps; return why the run halts, if that is new."""
        if isinstance(self._halting, NonFiniteError):
            return None
        # More important than an interrupt: the user must learn of it before resuming.
        self._halting = NonFiniteError(
            f"region '{region}' refused {self._limits.max_refused_steps} steps in a row: no finite "
            "loss and gradient"
        )
        self._halt_asked(now_s)
        return self._halting

    def _halt_asked(self, now_s: float) -> None:
        # The time limit of the pause starts with the checkpoint before it.
        self._halt_asked_s = now_s
        self._halt_until_s = now_s + (HALT_DEADLINE_S if self._halts else self._limits.part_s)

    def stop(self, cause: str) -> bool:
        """Let all regions finish; return False if that was requested before."""
        if self.stopping is not None:
            return False
        self.stopping = cause
        return True

    def check_end(self, phases: Collection[str]) -> None:
        """Check the end of a run whose workers are done.

        Args:
            phases: phases of the regions.

        Raises:
            GeoRayError: the run was halted, with the outcome of its checkpoint.
        """
        if self._halting is None:
            return
        # It had ended before the request could have an effect.
        if isinstance(self._halting, InterruptedRunError) and set(phases) == {"done"}:
            return
        if self._halt_saved:
            why = self._halting
            raise type(why)(f"{why.message}; its state is saved", fix=why.fix)
        raise self.not_saved("the run was about to end")

    def not_saved(self, cause: str) -> GeoRayError:
        """Return the reason to stop, with the state of the checkpoint."""
        why = self._halting or InterruptedRunError("the run was interrupted")
        made = "no new checkpoint was made"
        if self._saved_since is not None:
            made = f"checkpoint {self._saved_since} is complete, no later one was made"
        return type(why)(f"{why.message}; {made}: {cause}")
