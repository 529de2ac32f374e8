"""Measures the loss of intervals and codecs for a task with short simulated runs.

The file keeps earlier results until better ones are complete.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from geo_ray.base.errors import ConfigError, ProfileError
from geo_ray.base.explain import explain
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import (
    LEAST_LOSS,
    MOST_LOSS,
    LossKey,
    LossPoint,
    LossProfile,
    LossSubject,
    load_loss_profile,
)
from geo_ray.planner.profile import save_profile
from geo_ray.runs.follow_plan import exchange_of
from geo_ray.runs.plan_inputs import check_strategy, codecs_of
from geo_ray.sweep.runner import pooled
from geo_ray.sweep.trial import Outcome, TrialSpec, validated

INTERVALS: Final = (1, 4, 16, 64)
_LEAST_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class LossCase:
    """Runs of one exchange setting, one per seed.

    Attributes:
        key: interval in local steps, and codec; None: plain training.
        experiment: their configuration, with the first seed.
    """

    key: LossKey | None
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class LossCases:
    """The runs to make.

    Attributes:
        all: plain training first, then intervals without codec, then codecs.
        steps: local steps of each run: the requested number, in whole region steps.
        codecs_at: interval at which codecs are measured.
        left_out: reasons why an interval or codec is not measured.
    """

    all: tuple[LossCase, ...]
    steps: int
    codecs_at: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossWanted:
    """Requested measurements.

    Attributes:
        steps: local steps of each run.
        intervals: intervals in region steps; None: the configured one, and those that a plan may
            choose, if it lists any, else `INTERVALS`.
        codecs: codecs; None: those that a plan may choose.
        codecs_at: interval in local steps at which codecs are measured; None: by `_codecs_at`.
    """

    steps: int
    intervals: Sequence[int] | None = None
    codecs: Sequence[str | None] | None = None
    codecs_at: int | None = None


def loss_cases(experiment: Experiment, base_dir: Path, wanted: LossWanted) -> LossCases:
    """Return the runs to make.

    Args:
        experiment: the configuration.
        base_dir: base of its relative paths.
        wanted: requested measurements.

    Raises:
        ConfigError: there is nothing to exchange, the strategy has no intervals to choose from, or
            the planner does not support the strategy or codec.
        ProfileError: no interval fits so few steps, or plain training is not possible.
    """
    if len(experiment.regions) < 2:
        raise ConfigError(
            "a single region has no intervals and codecs to measure",
            fix="Configure several `regions`.",
        )
    check_strategy(experiment)
    named = wanted.codecs
    if named is None and experiment.plan is not None:
        named = experiment.plan.codecs
    codecs = codecs_of(experiment, named)
    local = max(1, experiment.worker_steps)
    left_out: list[str] = []
    steps = max(1, wanted.steps // local)
    found: dict[LossKey, LossCase] = {}
    intervals = _intervals(experiment, wanted)
    chosen = experiment.strategy.traits.exchange.interval is not None
    for interval in intervals:
        if chosen and interval * _LEAST_ROUNDS > wanted.steps:
            left_out.append(
                f"an interval of {interval} steps: {wanted.steps} steps contain fewer than "
                f"{_LEAST_ROUNDS} intervals"
            )
            continue
        _add(found, left_out, experiment, base_dir, steps, (interval, None))
    if not found:
        raise ProfileError(
            f"no interval could be measured over {wanted.steps} steps: {'; '.join(left_out)}",
            fix="Give `geo-ray profile --loss` more --steps, or other --intervals.",
        )
    at = wanted.codecs_at or _codecs_at(experiment, [interval for interval, _ in found])
    for codec in codecs:
        if codec is not None:
            _add(found, left_out, experiment, base_dir, steps, (at, codec))
    try:
        plain = LossCase(None, _plain(experiment, base_dir, steps))
    except ValidationError as error:
        raise ProfileError(
            "plain training (bsp without codecs), the baseline of all comparisons, is not "
            "possible: "
            f"{'; '.join(explain(error, Experiment, {}))}",
            fix="Change the keys that bsp rejects with --set; other keys are measured as "
            "configured.",
        ) from None
    return LossCases((plain, *found.values()), steps * local, at, tuple(left_out))


def with_seed(experiment: Experiment, base_dir: Path, seed: int, run_dir: Path) -> Experiment:
    """Return one run of a case.

    Args:
        experiment: configuration of the case.
        base_dir: base of relative paths in the configuration.
        seed: seed of the run.
        run_dir: directory of the run.
    """
    tree = experiment.model_dump(mode="json")
    tree["seed"], tree["run"]["dir"] = seed, str(run_dir)
    return validated(tree, base_dir)


def _intervals(experiment: Experiment, wanted: LossWanted) -> list[int]:
    """Return the interval in local steps; one if the strategy has no such option.

    Raises:
        ConfigError: the strategy has no intervals, but intervals are requested.
    """
    exchange, local = experiment.strategy.traits.exchange, max(1, experiment.worker_steps)
    if exchange.interval is None:
        if wanted.intervals is not None:
            raise ConfigError(
                f"intervals: strategy {experiment.strategy.kind} has no option `interval`",
                fix="Omit --intervals; its loss is measured with its own exchanges.",
            )
        return [max(1, round(exchange.every * local))]
    of_plan = None if experiment.plan is None else experiment.plan.intervals
    choices = wanted.intervals or (exchange.interval, *(of_plan or INTERVALS))
    return sorted({each * local for each in choices})


def _codecs_at(experiment: Experiment, measured: Sequence[int]) -> int:
    """Return the configured interval, or the longest measured below it, or the shortest."""
    exchange, local = experiment.strategy.traits.exchange, max(1, experiment.worker_steps)
    present = (exchange.interval or 0) * local
    return max((each for each in measured if each <= present), default=min(measured))


def _add(
    found: dict[LossKey, LossCase],
    left_out: list[str],
    experiment: Experiment,
    base_dir: Path,
    steps: int,
    key: LossKey,
) -> None:
    tree = _short(experiment, steps)
    for dotted, value in exchange_of(experiment, *key).items():
        section, _, name = dotted.partition(".")
        if name:
            tree[section][name] = value
        else:
            tree[section] = value
    try:
        found[key] = LossCase(key, validated(tree, base_dir))
    except ValidationError as error:
        interval, codec = key
        what = f"an interval of {interval} steps" if codec is None else f"codec {codec}"
        left_out.append(f"{what}: {'; '.join(explain(error, Experiment, {}))}")


def _plain(experiment: Experiment, base_dir: Path, steps: int) -> Experiment:
    tree = _short(experiment, steps)
    tree["train"]["steps"] = steps * max(1, experiment.worker_steps)  # the same number of rows
    tree |= {
        "strategy": {"kind": "bsp"},
        "codec": {},
        "overlay": {"kind": "star"},
        "transfers": None,
    }
    return validated(tree, base_dir)


def _short(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return the shortened configuration, without keys that do not affect the loss."""
    tree: dict[str, Any] = experiment.model_dump(mode="json")
    tree["name"], tree["plan"], tree["checkpoint"]["every_s"] = "loss", None, None
    if "compute_fraction" in tree["strategy"]:
        tree["strategy"]["compute_fraction"] = None  # the interval is fixed
    tree["averager"] |= {"standby": None, "next_standbys": [], "max_divergence": 0.0}
    schedule = tree["optimizer"].get("schedule")
    if schedule is not None:  # the same curve over fewer steps
        shorter = steps / experiment.train.steps
        schedule["warmup_steps"] = round(schedule["warmup_steps"] * shorter)
        if schedule["steps"] is not None:
            schedule["steps"] = max(1, round(schedule["steps"] * shorter))
    tree["train"] |= {
        "steps": steps,
        "eval_every": 0,
        "target": None,
        "patience": None,
        "keep_best": None,
        "count": None,
    }
    return tree


METRIC: Final = "loss"


@dataclass(frozen=True, slots=True)
class LossTask:
    """A measurement.

    Attributes:
        cases: the runs.
        subject: task and data.
        base_dir: base of relative paths in the configuration.
        steps: local steps of each run.
        seeds: seeds of each case.
        jobs: parallel runs.
    """

    cases: LossCases
    subject: LossSubject
    base_dir: Path
    steps: int
    seeds: Sequence[int]
    jobs: int


def codecs_held_at(task: LossTask, known: LossProfile | None) -> int | None:
    """Return the interval at which an identical earlier measurement has codecs, or None.

    Codecs of a file are compared at one interval, so new ones use the same.
    """
    if known is None or not is_of(task, known):
        return None
    at = known.codecs_at
    coded = any(interval == at and codec is not None for interval, codec in known.by_key)
    return at if coded and (at, None) in known.by_key else None


def still_to_do(task: LossTask, known: LossProfile | None) -> list[LossCase]:
    """Return the cases that an identical earlier measurement lacks."""
    if known is None or not is_of(task, known):
        return list(task.cases.all)
    have = known.by_key
    return [case for case in task.cases.all if case.key is not None and case.key not in have]


def measure_loss(
    task: LossTask, known: LossProfile | None, ended: Callable[[], None]
) -> Iterator[LossProfile]:
    """Run the missing cases; yields the profile after each complete case.

    Args:
        task: the measurement.
        known: an earlier measurement; ignored unless identical.
        ended: called after every run.

    Raises:
        ProfileError: plain training diverged, or the task has no metric ``loss``.
        GeoRayError: a run ends early.
    """
    with tempfile.TemporaryDirectory(prefix="geo-ray-loss-") as scratch:
        trials = _trials(task, still_to_do(task, known), Path(scratch))
        # Closed here: an error in `gathered` holds it open, and runs would continue in `scratch`.
        with closing(pooled(trials, task.jobs)) as outcomes:
            yield from gathered(task, known, _counted(outcomes, ended))


def _counted(outcomes: Iterable[Outcome], ended: Callable[[], None]) -> Iterator[Outcome]:
    for outcome in outcomes:
        ended()
        yield outcome


def gathered(
    task: LossTask, known: LossProfile | None, outcomes: Iterable[Outcome]
) -> Iterator[LossProfile]:
    """Combine outcomes of runs; yields the profile after each complete case.

    Args:
        task: the measurement.
        known: as for `measure_loss`.
        outcomes: outcomes of `still_to_do`, in any order; labelled by `label_of`.

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
            continue  # there is no baseline
        before = len(found.points)
        for key in sorted(complete, key=lambda each: each[1] is not None):
            if key[1] is not None and (found.codecs_at, None) not in found.by_key:
                continue  # a continued file has the baseline of its codecs
            now_s = time.monotonic()
            found = found.with_point(_point(key, complete.pop(key)), now_s - began_s)
            began_s = now_s
        if len(found.points) > before and found.has_intervals:
            yield found


def is_of(task: LossTask, known: LossProfile) -> bool:
    """Return whether an earlier measurement is identical, so that it is continued."""
    mine = (task.subject, task.steps, tuple(task.seeds))
    return mine == (known.subject, known.steps, known.seeds)


def _point(key: LossKey, losses: tuple[float | None, ...]) -> LossPoint:
    """Return the final loss of an exchange setting.

    Raises:
        ProfileError: the loss cannot be used for a comparison.
    """
    if any(loss is not None and loss < LEAST_LOSS for loss in losses):
        raise ProfileError(
            f"training with '{label_of(key)}' ended with a loss of 0 or less, which has no "
            "relative "
            "difference",
            fix="Let the task's metric `loss` be positive, or give `geo-ray profile --loss` other "
            "--steps.",
        )
    return LossPoint(interval=key[0], codec=key[1], losses=losses)


def _trials(task: LossTask, cases: Sequence[LossCase], scratch: Path) -> list[TrialSpec]:
    trials = []
    for number, case in enumerate(cases):
        for seed in task.seeds:
            run = with_seed(case.experiment, task.base_dir, seed, scratch / f"{number}-{seed}")
            trials.append(TrialSpec(label_of(case.key), 1.0, run, task.base_dir, is_saved=False))
    return trials


def label_of(key: LossKey | None) -> str:
    """Return the label of a case."""
    if key is None:
        return "plain training"
    interval, codec = key
    return f"every {interval} steps, {codec or 'no codec'}"


def _loss_of(outcome: Outcome) -> float | None:
    """Return the loss at the end; None if training diverged.

    Raises:
        ProfileError: the task has no loss.
    """
    if outcome.failed is not None:
        return None
    if METRIC not in outcome.eval:
        raise ProfileError(
            f"the task has no metric '{METRIC}'; it has {', '.join(outcome.eval) or 'none'}",
            fix=f"Add '{METRIC}' to the task's `metrics`, or plan with the default table.",
        )
    loss = outcome.eval[METRIC]
    return None if loss is None or loss > MOST_LOSS else loss


def _of_plain(losses: Sequence[float | None]) -> tuple[float, ...]:
    found = tuple(loss for loss in losses if loss is not None and loss >= LEAST_LOSS)
    if len(found) < len(losses):
        raise ProfileError(
            "plain training (bsp without codecs) diverged, or ended with a loss of 0 or less, so "
            "that there is no baseline",
            fix="Lower the learning rate, or give `geo-ray profile --loss` other --steps.",
        )
    return found


@dataclass(frozen=True, slots=True)
class LossFile:
    """Destination of a measurement.

    Attributes:
        path: the file.
        known: results of an identical, perhaps interrupted measurement.
        writes: file for intermediate results: the file itself, or a temporary one while another
            or older measurement exists, which plans may still use.
    """

    path: Path
    known: LossProfile | None
    writes: Path

    def keep(self, found: LossProfile) -> None:
        """Write the current results."""
        save_profile(found, self.writes)

    def finish(self) -> None:
        """Move the complete measurement to its place."""
        if self.writes != self.path and self.writes.exists():
            self.writes.replace(self.path)


def opened(path: Path, task: LossTask, *, fresh: bool) -> LossFile:
    """Return the file of a measurement.

    Args:
        path: the file; may be missing.
        task: the measurement.
        fresh: ignore existing results.

    Raises:
        ProfileError: the existing file cannot be read, and ``fresh`` is false.
    """
    beside = path.with_name(f"{path.name}.partial")
    if fresh:
        beside.unlink(missing_ok=True)
        return LossFile(path, None, beside if path.exists() else path)
    if not path.exists():
        return LossFile(path, None, path)
    there = load_loss_profile(path)
    if is_of(task, there):
        return LossFile(path, there, path)
    known = _partial(beside, task)
    if known is None:
        beside.unlink(missing_ok=True)
    return LossFile(path, known, beside)


def _partial(path: Path, task: LossTask) -> LossProfile | None:
    """Return the results of an interrupted measurement; None if it is not identical."""
    if not path.exists():
        return None
    try:
        found = load_loss_profile(path)
    except ProfileError:
        return None
    return found if is_of(task, found) else None
