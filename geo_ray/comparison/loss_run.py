"""Measures what intervals and codecs cost a task in loss, by short simulated runs side by side."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.comparison.outcome import Outcome
from geo_ray.comparison.pool import SimulatedCase, simulate_all
from geo_ray.errors import ProfileError
from geo_ray.job.loss.grid import LossCase, LossCases, with_seed
from geo_ray.planning.loss_profile import (
    LEAST_LOSS,
    MOST_LOSS,
    LossKey,
    LossPoint,
    LossProfile,
    LossSubject,
)

METRIC: Final = "loss"

Told = Callable[[str], None]
"""Hears what each run that ended was."""


@dataclass(frozen=True, slots=True)
class LossTask:
    """What is measured.

    Attributes:
        cases: the runs.
        subject: the task.
        base_dir: where relative paths of the configuration start.
        steps: local steps of each run.
        seeds: of the runs of each case.
        jobs: runs side by side.
    """

    cases: LossCases
    subject: LossSubject
    base_dir: Path
    steps: int
    seeds: Sequence[int]
    jobs: int


def kept_codecs_at(task: LossTask, known: LossProfile | None) -> int | None:
    """The interval that an earlier measurement of the very same has codecs at; None: at none.

    Codecs are compared at one interval of a file, so new ones belong to those that it has.
    """
    if known is None or not is_of(task, known):
        return None
    at = known.codecs_at
    coded = any(interval == at and codec is not None for interval, codec in known.by_key)
    return at if coded and (at, None) in known.by_key else None


def still_to_do(task: LossTask, known: LossProfile | None) -> list[LossCase]:
    """The cases that an earlier measurement of the very same does not have."""
    if known is None or not is_of(task, known):
        return list(task.cases.all)
    have = known.by_key
    return [case for case in task.cases.all if case.key is not None and case.key not in have]


def measure_loss(task: LossTask, known: LossProfile | None, told: Told) -> Iterator[LossProfile]:
    """Run what is missing; gives what is measured after each case that is complete.

    Args:
        task: what to measure.
        known: an earlier measurement; that of something else is not used.
        told: hears of every run that ended.

    Raises:
        ProfileError: plain training diverged, or the task has no metric ``loss``.
        GeoRayError: whatever ends a run early.
    """
    with tempfile.TemporaryDirectory(prefix="geo-ray-loss-") as scratch:
        runs = _runs(task, still_to_do(task, known), Path(scratch))
        # Closed here: an error in `gathered` holds it open, and runs would go on in `scratch`.
        with closing(_ended(runs, task.jobs, told)) as outcomes:
            yield from gathered(task, known, outcomes)


def gathered(
    task: LossTask, known: LossProfile | None, outcomes: Iterable[Outcome]
) -> Iterator[LossProfile]:
    """Put outcomes of runs together; gives what is measured after each case that is complete.

    Args:
        task: what is measured.
        known: as for `measure_loss`.
        outcomes: of what is `still_to_do`, in any order; labelled by `label_of`.

    Raises:
        ProfileError: as for `measure_loss`.
    """
    key_of = {label_of(case.key): case.key for case in still_to_do(task, known)}
    found = None
    if known is not None and None not in key_of.values():
        found = known.model_copy(update={"codecs_at": task.cases.codecs_at})
    complete: dict[LossKey, tuple[float | None, ...]] = {}
    losses: dict[str, dict[int, float | None]] = defaultdict(dict)
    began_s = time.monotonic()
    for outcome in outcomes:
        by_seed = losses[outcome.label]
        by_seed[outcome.seed] = _loss_of(outcome)
        if len(by_seed) < len(task.seeds):
            continue
        key, each = key_of[outcome.label], tuple(by_seed[seed] for seed in task.seeds)
        if key is None:
            found = LossProfile(
                subject=task.subject,
                steps=task.steps,
                seeds=tuple(task.seeds),
                plain=_of_plain(each),
                codecs_at=task.cases.codecs_at,
            )
        else:
            complete[key] = each
        if found is None:
            continue  # with what shall it be compared?
        before = len(found.points)
        for key in sorted(complete, key=lambda each: each[1] is not None):
            if key[1] is not None and (found.codecs_at, None) not in found.by_key:
                continue  # a file that is gone on with has what its codecs are compared with
            now_s = time.monotonic()
            found = found.with_point(_point(key, complete.pop(key)), now_s - began_s)
            began_s = now_s
        if len(found.points) > before and found.has_intervals:
            yield found


def is_of(task: LossTask, known: LossProfile) -> bool:
    """Whether an earlier measurement is of the very same, so that it is gone on with."""
    mine = (task.subject, task.steps, tuple(task.seeds))
    return mine == (known.subject, known.steps, known.seeds)


def _point(key: LossKey, losses: tuple[float | None, ...]) -> LossPoint:
    """What one way to exchange ended with.

    Raises:
        ProfileError: a loss that nothing can be compared with.
    """
    if any(loss is not None and loss < LEAST_LOSS for loss in losses):
        raise ProfileError(
            f"training with '{label_of(key)}' ended with a loss of 0 or less, so that nothing can "
            "be said relative to it",
            fix="Let the task's metric `loss` be positive, or give `geo-ray profile --loss` other "
            "--steps.",
        )
    return LossPoint(interval=key[0], codec=key[1], losses=losses)


def _runs(task: LossTask, cases: Sequence[LossCase], scratch: Path) -> list[SimulatedCase]:
    base_dir, runs = str(task.base_dir.absolute()), []
    for number, case in enumerate(cases):
        for seed in task.seeds:
            directory = scratch / f"{number}-{seed}"
            run = with_seed(case.experiment, task.base_dir, seed, directory)
            json_ = run.model_dump_json()
            runs.append(SimulatedCase(label_of(case.key), 1.0, json_, str(directory), base_dir))
    return runs


def _ended(runs: Sequence[SimulatedCase], jobs: int, told: Told) -> Generator[Outcome, None, None]:
    """The outcomes as they come; what runs leave goes with them, since models are large."""
    directories = {(run.label, Path(run.directory).name.rpartition("-")[2]): run for run in runs}
    if not runs:
        return
    with closing(simulate_all(runs, jobs)) as outcomes:
        for outcome in outcomes:
            run = directories[outcome.label, str(outcome.seed)]
            shutil.rmtree(run.directory, ignore_errors=True)
            told(f"{outcome.label}, seed {outcome.seed}")
            yield outcome


def label_of(key: LossKey | None) -> str:
    """What a case is called."""
    if key is None:
        return "plain training"
    interval, codec = key
    return f"every {interval} steps, {codec or 'no codec'}"


def _loss_of(outcome: Outcome) -> float | None:
    """The loss at the end; None if training diverged.

    Raises:
        ProfileError: the task has none.
    """
    if outcome.failed is not None:
        return None
    if METRIC not in outcome.eval:
        raise ProfileError(
            f"the task has no metric '{METRIC}'; it has {', '.join(outcome.eval) or 'none'}",
            fix=f"Let the task's `metrics` give '{METRIC}', or plan by the rough table.",
        )
    loss = outcome.eval[METRIC]
    return None if loss is None or loss > MOST_LOSS else loss


def _of_plain(losses: Sequence[float | None]) -> tuple[float, ...]:
    found = tuple(loss for loss in losses if loss is not None and loss >= LEAST_LOSS)
    if len(found) < len(losses):
        raise ProfileError(
            "plain training (bsp without codecs) diverged, or ended with a loss of 0 or less, so "
            "that there is nothing to compare with",
            fix="Lower the learning rate, or give `geo-ray profile --loss` other --steps.",
        )
    return found
