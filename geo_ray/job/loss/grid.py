"""Which short runs tell what intervals and codecs cost a task in loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from geo_ray.config.experiment import Experiment
from geo_ray.config.explain import explain
from geo_ray.config.own import context
from geo_ray.errors import ConfigError, ProfileError
from geo_ray.job.follow_plan import exchange_of
from geo_ray.job.plans.inputs import check_strategy, codecs_of
from geo_ray.planning.loss_profile import LossKey

INTERVALS: Final = (1, 4, 16, 64)
_LEAST_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class LossCase:
    """Runs of one way to exchange, one for each seed.

    Attributes:
        key: interval in local steps, and codec; None: plain training.
        experiment: their configuration, of the first seed.
    """

    key: LossKey | None
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class LossCases:
    """The runs to make.

    Attributes:
        all: plain training first, then intervals without codec, then codecs.
        steps: local steps of each run: those that were wanted, in whole steps of a region.
        codecs_at: interval that codecs are measured at.
        left_out: why an interval or codec is not measured.
    """

    all: tuple[LossCase, ...]
    steps: int
    codecs_at: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossWanted:
    """What the user asks for.

    Attributes:
        steps: local steps of each run.
        intervals: in steps of a region; None: the configured one, and those that a plan may choose
            among if it names any, else `INTERVALS`.
        codecs: to measure; None: those that a plan chooses among.
        codecs_at: interval in local steps that codecs are measured at; None: by `_codecs_at`.
    """

    steps: int
    intervals: Sequence[int] | None = None
    codecs: Sequence[str | None] | None = None
    codecs_at: int | None = None


def loss_cases(experiment: Experiment, base_dir: Path, wanted: LossWanted) -> LossCases:
    """Which runs to make.

    Args:
        experiment: the configuration.
        base_dir: where its relative paths start.
        wanted: what the user asks for.

    Raises:
        ConfigError: there is nothing to exchange, the strategy has no intervals to choose among,
            or the planner knows nothing of strategy or codec.
        ProfileError: no interval fits so few steps, or plain training is not possible.
    """
    if len(experiment.regions) < 2:
        raise ConfigError(
            "with one region there are no intervals and codecs whose loss could be measured",
            fix="Name several `regions`.",
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
                f"an interval of {interval} steps: {wanted.steps} steps have fewer than "
                f"{_LEAST_ROUNDS} of it"
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
            "plain training (bsp without codecs), which all is compared with, is not possible: "
            f"{'; '.join(explain(error, Experiment, {}))}",
            fix="Change with --set what bsp refuses; of the rest the loss is measured as it is.",
        ) from None
    return LossCases((plain, *found.values()), steps * local, at, tuple(left_out))


def with_seed(experiment: Experiment, base_dir: Path, seed: int, run_dir: Path) -> Experiment:
    """One run of a case.

    Args:
        experiment: the case's.
        base_dir: where relative paths of the configuration start.
        seed: of the run.
        run_dir: where it leaves its files.
    """
    tree = experiment.model_dump(mode="json")
    tree["seed"], tree["run"]["dir"] = seed, str(run_dir)
    return _validated(tree, base_dir)


def _intervals(experiment: Experiment, wanted: LossWanted) -> list[int]:
    """In local steps; one if the strategy has no such option.

    Raises:
        ConfigError: it has none, and intervals are wanted.
    """
    exchange, local = experiment.strategy.traits.exchange, max(1, experiment.worker_steps)
    if exchange.interval is None:
        if wanted.intervals is not None:
            raise ConfigError(
                f"intervals: strategy {experiment.strategy.kind} has no option `interval`",
                fix="Leave out --intervals; its loss is measured as it exchanges.",
            )
        return [max(1, round(exchange.every * local))]
    of_plan = None if experiment.plan is None else experiment.plan.intervals
    choices = wanted.intervals or (exchange.interval, *(of_plan or INTERVALS))
    return sorted({each * local for each in choices})


def _codecs_at(experiment: Experiment, measured: Sequence[int]) -> int:
    """The configured interval, else the longest below it that is measured, else the shortest."""
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
        found[key] = LossCase(key, _validated(tree, base_dir))
    except ValidationError as error:
        interval, codec = key
        what = f"an interval of {interval} steps" if codec is None else f"codec {codec}"
        left_out.append(f"{what}: {'; '.join(explain(error, Experiment, {}))}")


def _plain(experiment: Experiment, base_dir: Path, steps: int) -> Experiment:
    tree = _short(experiment, steps)
    tree["train"]["steps"] = steps * max(1, experiment.worker_steps)  # as many rows
    tree |= {
        "strategy": {"kind": "bsp"},
        "codec": {},
        "overlay": {"kind": "star"},
        "transfers": None,
    }
    return _validated(tree, base_dir)


def _short(experiment: Experiment, steps: int) -> dict[str, Any]:
    """The configuration as short as it is measured, without what does not change the loss."""
    tree: dict[str, Any] = experiment.model_dump(mode="json")
    tree["name"], tree["plan"], tree["checkpoint"]["every_s"] = "loss", None, None
    if "compute_share" in tree["strategy"]:
        tree["strategy"]["compute_share"] = None  # an interval is what it is called
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
        "keep_best": None,
        "count": None,
    }
    return tree


def _validated(tree: dict[str, Any], base_dir: Path) -> Experiment:
    return Experiment.model_validate_json(json.dumps(tree), context=context(base_dir))
