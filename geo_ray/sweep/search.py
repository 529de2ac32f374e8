"""A search's configuration as Ray Tune parameters, search algorithm and scheduler.

Also the log of ended trials from which a search resumes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import Field, JsonValue, ValidationError
from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import SearchAlgorithm, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator

from geo_ray.base.canonical import canonical_json
from geo_ray.base.errors import SearchMissingError, TuningDirectoryError
from geo_ray.base.model import StrictModel
from geo_ray.sweep.search_config import SearchConfig, TuningConfig
from geo_ray.sweep.space import Space, SpaceEntry
from geo_ray.sweep.trial import score_key

ENDED_FILE: Final = "trials.jsonl"
_OF_RAY: Final = {*AUTO_RESULT_KEYS, "done", "trial_id", "experiment_tag", "should_checkpoint"}
_log = logging.getLogger(__name__)


class EndedTrial(StrictModel):
    """A trial that has ended.

    Attributes:
        drawn: its values, by name of the parameter.
        reports: what it has reported, in order.
    """

    drawn: dict[str, JsonValue]
    reports: tuple[dict[str, str | bool | int | float | None], ...] = Field(min_length=1)

    @property
    def key(self) -> str:
        """The same for trials with the same values."""
        return key_of(self.drawn)


def key_of(drawn: Mapping[str, Any]) -> str:
    """The key of a trial by its values, as Ray Tune has drawn them."""
    return canonical_json(_plain(drawn)).decode()


def plain_report(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trial itself has reported, without what Ray Tune adds."""
    found = {name: _plain(value) for name, value in result.items() if name not in _OF_RAY}
    return {k: v for k, v in found.items() if v is None or isinstance(v, (str, bool, int, float))}


def add_ended(path: Path, drawn: Mapping[str, Any], reports: Collection[Mapping[str, Any]]) -> None:
    """Append a trial that has ended, on a line of its own also behind a torn one.

    Raises:
        OSError: as the system says.
    """
    line = json.dumps({"drawn": _plain(drawn), "reports": list(reports)}) + "\n"
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_torn = file.read() not in (b"", b"\n")
        file.write((f"\n{line}" if is_torn else line).encode())
        file.flush()
        os.fsync(file.fileno())


def read_ended(path: Path, names: Collection[str]) -> dict[str, EndedTrial]:
    """Read the trials that have ended, by key; damaged lines cost their trials.

    Args:
        path: the file; need not exist.
        names: of the parameters of the search. A trial with others is not of it.

    Raises:
        TuningDirectoryError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise TuningDirectoryError(
            f"{path} cannot be read: {error.strerror}", fix="Check the permissions of the file."
        ) from error
    found: dict[str, EndedTrial] = {}
    for number, line in enumerate(lines, 1):
        try:
            trial = EndedTrial.model_validate_json(line)
        except ValidationError:
            _log.warning("line %d of %s is no trial; that trial is run again", number, path)
            continue
        if set(trial.drawn) == set(names):
            found[trial.key] = trial
    return found


def _plain(value: Any) -> Any:
    """A value without NumPy's types, of which Ray Tune's draws are."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value


_TIME_ATTRS: Final = {"time_to_target": "time_s", "usd": "usd", "loss": "samples"}


class BaseKeptAsha(ASHAScheduler):
    """ASHA that never stops the base: without its score nobody knows whether a trial beat it.

    Args:
        base: the draw that is the base; empty if the space does not have it.
        options: of ASHA.
    """

    def __init__(self, base: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._base = dict(base)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray."""
        decision = super().on_trial_result(tune_controller, trial, result)
        return str(self.CONTINUE if _is_base(trial, self._base) else decision)


class BaseKeptPbt(PopulationBasedTraining):
    """Population based training that never makes the base a copy of another trial.

    Args:
        base: as for `BaseKeptAsha`.
        options: of the scheduler.
    """

    def __init__(self, base: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._base = dict(base)

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        """See Ray."""
        if not _is_base(trial, self._base):
            super()._exploit(tune_controller, trial, trial_to_clone)


def _is_base(trial: Any, base: Mapping[str, Any]) -> bool:
    drawn = trial.config
    return bool(drawn) and all(
        name in base and base[name] == value for name, value in drawn.items()
    )


def check_installed(search: SearchConfig) -> None:
    """Say what is to be installed before anything starts.

    Raises:
        SearchMissingError: the package behind the search is not there.
    """
    if search.kind == "random" or find_spec(search.kind) is not None:
        return
    raise SearchMissingError(
        f"search.kind is {search.kind}, and the package {search.kind} is not installed",
        fix=f"Type pip install {search.kind}, or pip install 'geo_ray[search]'; or set "
        "search.kind=random, which needs nothing.",
    )


def param_space(space: Space) -> dict[str, Any]:
    """What Ray Tune draws, by name of the entry; what has one value is not drawn."""
    drawn = (entry for entry in space.entries if entry.domain.kind != "value")
    return {entry.name: _domain(entry, space) for entry in drawn}


def search_of(
    config: TuningConfig, space: Space, jobs: int, ended: Sequence[EndedTrial] = ()
) -> Searcher | SearchAlgorithm:
    """The search algorithm; its first trial is the base, if that is asked for and in the space.

    Args:
        config: the file of the search.
        space: what is searched.
        jobs: trials at once.
        ended: trials of an earlier part of the search, which come again. A search at random draws
            the same ones by itself; one that learns is given them as its first points.
    """
    search, objectives = config.search, config.objectives
    first = space.base_draw() if search.base_first else None
    points = None if first is None else [_drawn(first, space)]
    if ended and search.kind != "random":
        known = [dict(each.drawn) for each in ended]
        points = [each for each in points or [] if each not in known] + known
    seed = search.seed + len(ended)  # else the next draws would be those that came first
    if search.kind == "random":
        return BasicVariantGenerator(
            points_to_evaluate=points, max_concurrent=jobs, random_state=search.seed
        )
    metrics = [score_key(name) for name in objectives]
    # Imported here: the packages are options, and take seconds.
    if search.kind == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        logging.getLogger("optuna").setLevel(logging.WARNING)  # it tells of itself on stderr
        several = len(metrics) > 1
        made: Searcher = OptunaSearch(
            metric=metrics if several else metrics[0],
            mode=["min"] * len(metrics) if several else "min",
            points_to_evaluate=points,
            seed=seed,
        )
        return made
    from ray.tune.search.hyperopt import HyperOptSearch

    found: Searcher = HyperOptSearch(
        metric=metrics[0],
        mode="min",
        points_to_evaluate=points,
        random_state_seed=seed,
        n_initial_points=max(5, search.trials // 4),
    )
    return found


def schedule_of(config: TuningConfig, space: Space) -> TrialScheduler:
    """The scheduler.

    ASHA compares the metric at equal seconds of the run, equal USD or equal samples, as the first
    objective has it: who is ahead there is likely to be first at the target.
    """
    schedule = config.schedule
    if schedule.kind == "asha":
        untyped: Any = BaseKeptAsha  # whose types are of steps, which are whole
        made: TrialScheduler = untyped(
            space.base_draw() or {},
            time_attr=_TIME_ATTRS[config.objectives[0]],
            metric="behind",
            mode="min",
            grace_period=schedule.grace,
            max_t=schedule.grace * schedule.factor**schedule.rungs,
            reduction_factor=schedule.factor,
            stop_last_trials=False,
        )
        return made
    if schedule.kind == "pbt":
        return BaseKeptPbt(
            space.base_draw() or {},
            time_attr="training_iteration",
            metric="behind",
            mode="min",
            perturbation_interval=schedule.every,
            quantile_fraction=schedule.share,
            hyperparam_mutations=param_space(space),
        )
    plain: Any = FIFOScheduler
    found: TrialScheduler = plain()
    return found


def _domain(entry: SpaceEntry, space: Space) -> Any:
    domain = entry.domain
    if domain.kind in ("choice", "grid"):
        values = [space.written(entry, each) for each in domain.edges]
        return tune.choice(values) if domain.kind == "choice" else tune.grid_search(values)
    low, high = getattr(domain, domain.kind)
    whole = domain.kind.endswith("randint")
    draw = getattr(tune, domain.kind)
    return draw(low, high + 1 if whole else high)  # Ray's integers end before the upper end


def _drawn(draw: dict[str, Any], space: Space) -> dict[str, Any]:
    fixed = {entry.name for entry in space.entries if entry.domain.kind in ("value", "grid")}
    return {name: value for name, value in draw.items() if name not in fixed}


def trial_count(config: TuningConfig, space: Space) -> int:
    """How many trials there will be."""
    grids: Sequence[int] = [
        len(entry.domain.edges) for entry in space.entries if entry.domain.kind == "grid"
    ]
    count = config.search.trials
    for each in grids:
        count *= each
    return count
