"""Ray Tune as the back end of a sweep: it samples candidates, runs them and stops some early.

A candidate is a configuration with sampled values. It is run once per seed, simulated or on real
actors, and reports at each evaluation of the first seed and at its end. `run_search` drives Ray
Tune; `trainable` is for Ray Tune code of a user.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ray import tune
from ray.tune import Callback, PlacementGroupFactory, ResultGrid
from ray.tune.experiment import Trial
from ray.tune.result import AUTO_RESULT_KEYS
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import SearchAlgorithm, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.util import get_current_placement_group

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, GeoRayError, SearchMissingError
from geo_ray.base.load import digest, override_items
from geo_ray.base.output import ticking
from geo_ray.base.text import duration_text, number_text
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.demand import by_label
from geo_ray.ray_cluster.placement import bundles_of, placed_in
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.launcher import OwnProcesses
from geo_ray.runtime.spec import demands_of
from geo_ray.storage.folders import directory_of
from geo_ray.sweep.runner import (
    TRIALS_FILE,
    TrialRecord,
    TrialsFile,
    default_jobs,
    key_of,
    plain,
    progress_text,
)
from geo_ray.sweep.score import (
    Standing,
    TrialWatch,
    failed_report,
    final_report,
    kind_of,
    report_of,
    score_key,
)
from geo_ray.sweep.search_config import ObjectiveName, PricesConfig, SearchConfig, TuningConfig
from geo_ray.sweep.space import Base, Space, SpaceEntry, base_of
from geo_ray.sweep.trial import RealTrial, run_trial
from geo_ray.telemetry.events import Event, RunObserver

TUNE_FOLDER: Final = "tune"
_OF_RAY: Final = {*AUTO_RESULT_KEYS, "done", "trial_id", "experiment_tag", "should_checkpoint"}
_TRIAL_CPUS: Final = 0.01
_ON_CLUSTER: Final = "cluster={kind: existing}"
_STANDING: Final = "standing.json"
_TRIALS_REGION: Final = "trials"
_CLUSTER_KEY: Final = re.compile(r"(?<![\w./-])cluster(?=\.[a-z_]|=)")
_QUIET: Final = {
    "RAY_AIR_NEW_OUTPUT": "0",  # disables Ray's table; `ProgressCallback` prints progress
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
_TIME_ATTRS: Final = {"time_to_target": "time_s", "usd": "usd", "loss": "samples"}


# ------------------------------------------------------------------ one candidate


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """Common settings of all candidates of a search; sent to all of their processes.

    Attributes:
        base: base configuration.
        objectives: objectives to minimize; the scheduler compares the first.
        seeds: seeds of each candidate; empty: one run, with the base's seed.
        prices: prices for `usd`.
        runs: directory of the runs of real trials; None: candidates are simulated.
    """

    base: Base
    objectives: tuple[ObjectiveName, ...] = ("time_to_target",)
    seeds: tuple[int, ...] = ()
    prices: PricesConfig | None = None
    runs: str | None = None

    def experiments(self, values: Mapping[str, JSONValue]) -> list[Experiment]:
        """Return the runs of a candidate, one per seed.

        Raises:
            ConfigError: the values do not form a valid configuration.
        """
        changes: tuple[str, ...] = ("name=run", "checkpoint.every_s=null")
        if self.runs is not None:
            changes = (f"name={_trial_name()}", _ON_CLUSTER, f"run.dir={json.dumps(self.runs)}")
        if not self.seeds:
            return [self.base.experiment(values, changes)]
        return [self.base.experiment(values, (*changes, f"seed={seed}")) for seed in self.seeds]


def _trial_name() -> str:
    try:
        return f"trial-{tune.get_context().get_trial_id()}"
    except (AttributeError, RuntimeError):  # outside of a trial, when its resources are computed
        return "trial"


def run_candidate(values: Mapping[str, JSONValue], spec: CandidateSpec) -> None:
    """Run a candidate with every seed, and report to Ray Tune; a failure is a result.

    The first seed reports every evaluation. With a checkpoint of Ray Tune, its run continues from
    there with the candidate's values. After the last seed the medians are reported.
    """
    try:
        ended = [
            _run_seed(experiment, spec, reports=number == 0)
            for number, experiment in enumerate(spec.experiments(values))
        ]
    except GeoRayError as error:
        tune.report(failed_report(spec.objectives, str(error)))
        return
    tune.report(final_report(ended, spec.objectives))


def _run_seed(
    experiment: Experiment, spec: CandidateSpec, *, reports: bool
) -> tuple[Standing, TrialWatch]:
    base_dir = Path(spec.base.parent)
    if spec.runs is None:
        with tempfile.TemporaryDirectory(prefix="geo-ray-trial-") as scratch:
            section = experiment.run.model_copy(update={"dir": scratch})
            own = experiment.model_copy(update={"run": section})
            watch = TrialWatch(own, spec.prices)
            run = directory.create(own, base_dir)
            sender = _Reporter(run, spec, watch, reports=reports)
            return watch.ended(run_trial(own, run, sender)), watch
    run = directory.create(experiment, base_dir)
    before = _restored(run) if reports else None
    watch = TrialWatch(experiment, spec.prices, before)
    sender = _Reporter(run, spec, watch, reports=reports)
    group = get_current_placement_group()
    placed = None if group is None else placed_in(group, demands_of(experiment), first=1)
    real = RealTrial(OwnProcesses(placed), resumes=before is not None)
    return watch.ended(run_trial(experiment, run, sender, real)), watch


class _Reporter(RunObserver):
    """Reports evaluations to Ray Tune, with the newest checkpoint if it is new."""

    def __init__(
        self, run: RunDirectory, spec: CandidateSpec, watch: TrialWatch, *, reports: bool
    ) -> None:
        self._run, self._spec, self._watch, self._reports = run, spec, watch, reports
        self._saved: int | None = None
        self._sent: int | None = None

    def on_event(self, event: Event) -> None:
        """See `RunObserver`."""
        if event.kind == "checkpoint":
            self._saved = int(event["id"])
        standing = self._watch.feed(event)
        if standing is None or not self._reports:
            return
        reported = report_of(standing, self._watch.goal, self._spec.objectives)
        if self._saved is None or self._saved == self._sent:
            tune.report(reported)
            return
        folder = directory_of(self._run.checkpoints, self._saved)
        self._sent = self._saved
        with tempfile.TemporaryDirectory(prefix="geo-ray-checkpoint-") as scratch:
            shutil.copytree(folder, Path(scratch) / folder.name)
            known = {k: v for k, v in asdict(standing).items() if v is None or math.isfinite(v)}
            (Path(scratch) / _STANDING).write_text(json.dumps(known), "utf-8")
            tune.report(reported, checkpoint=tune.Checkpoint.from_directory(scratch))


def _restored(run: RunDirectory) -> Standing | None:
    """Copy a checkpoint of Ray Tune into a new run's directory; None if there is none."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        for source in Path(folder).iterdir():
            if source.is_dir():
                shutil.copytree(source, run.checkpoints / source.name, dirs_exist_ok=True)
        known = json.loads((Path(folder) / _STANDING).read_text("utf-8"))
    return Standing(**({"usd": math.nan} | known))


def candidate_resources(
    values: Mapping[str, JSONValue], spec: CandidateSpec
) -> PlacementGroupFactory:
    """Return the resources of a real trial: its run actor and all processes, by region."""
    run_actor: tuple[dict[str, float], dict[str, str]] = ({"CPU": _TRIAL_CPUS}, {})
    bundles = [run_actor]
    with suppress(ConfigError):  # the trial itself reports the error
        bundles += bundles_of(demands_of(spec.experiments(values)[0]))
    return PlacementGroupFactory(
        [amounts for amounts, _ in bundles],
        strategy="PACK",
        bundle_label_selector=[labels for _, labels in bundles],
    )


def cluster_cpus(tried: Sequence[Experiment], jobs: int) -> tuple[tuple[str, ...], float]:
    """Return the regions of a local cluster for real trials, with the CPUs of each."""
    totals: dict[str, float] = {}
    for experiment in tried:
        for demand in by_label(demands_of(experiment)):
            most = max(totals.get(demand.region, 0.0), demand.total().get("CPU", 0.0))
            totals[demand.region] = most
    return tuple(totals), jobs * (max(totals.values()) + _TRIAL_CPUS)


def trainable(
    config: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    objectives: Sequence[ObjectiveName] = ("time_to_target", "loss"),
    seeds: Sequence[int] = (),
    prices: PricesConfig | None = None,
    base_dir: str | os.PathLike[str] | None = None,
) -> Callable[[dict[str, Any]], None]:
    """Return a function for ``ray.tune.Tuner`` that simulates a trial.

    Its ``param_space`` has values by key, as in the file of a search: ``strategy.kind``,
    ``regions.us.workers``, ``codec``, ``optimizer.lr``. At every evaluation it reports ``time_s``,
    ``samples``, the metric, and ``score_time_to_target``, ``score_loss`` and so on, which are to be
    minimized; a failed or diverged trial reports scores above all others, and the reason.

    Args:
        config: a file, a mapping of its keys, or an experiment.
        overrides: changed values in all trials.
        objectives: objectives for which ``score_`` values are reported.
        seeds: seeds of each trial; the median counts. Default: one, the base's.
        prices: prices for the objective `usd`.
        base_dir: base of relative paths; default: the file's or the working directory.

    Raises:
        ConfigError: the configuration is invalid, or `usd` has no prices.
    """
    if "usd" in objectives and prices is None:
        raise ConfigError(
            "prices: required by the objective usd", fix="Give prices=PricesConfig()."
        )
    base = base_of(config, override_items(overrides), base_dir)
    base.experiment()
    spec = CandidateSpec(base, tuple(objectives), tuple(seeds), prices)

    def trial(values: dict[str, Any]) -> None:
        run_candidate(values, spec)

    return trial


# ------------------------------------------------------------------ inputs of Ray Tune


class AshaKeepingBase(ASHAScheduler):
    """ASHA that never stops the base, because other trials are compared with its score.

    Args:
        base: the sample of the base; empty if it is outside the space.
        options: options of ASHA.
    """

    def __init__(self, base: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._base = dict(base)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See Ray."""
        decision = super().on_trial_result(tune_controller, trial, result)
        return str(self.CONTINUE if _is_base(trial, self._base) else decision)


class PbtKeepingBase(PopulationBasedTraining):
    """Population based training that never replaces the base by a copy of another trial.

    Args:
        base: as for `AshaKeepingBase`.
        options: options of the scheduler.
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
    """Check that the package of a search is installed.

    Raises:
        SearchMissingError: the package of the search is missing.
    """
    if search.kind == "random" or find_spec(search.kind) is not None:
        return
    raise SearchMissingError(
        f"search.kind is {search.kind}, but the package {search.kind} is not installed",
        fix=f"Run pip install {search.kind}, or pip install 'geo_ray[search]'; or set "
        "search.kind=random, which needs no package.",
    )


def param_space(space: Space) -> dict[str, Any]:
    """Return the domains for Ray Tune by name; entries with a single value are omitted."""
    drawn = (entry for entry in space.entries if entry.domain.kind != "value")
    return {entry.name: _domain(entry, space) for entry in drawn}


def search_of(
    config: TuningConfig, space: Space, jobs: int, ended: Sequence[TrialRecord] = ()
) -> Searcher | SearchAlgorithm:
    """Return the search algorithm; its first trial is the base, if requested and in the space.

    Args:
        config: the search.
        space: search space.
        jobs: parallel trials.
        ended: recorded trials of an earlier part of the search, which are repeated. A random search
            samples the same ones again; others get them as their first points.
    """
    search, objectives = config.search, config.objectives
    first = space.base_draw() if search.base_first else None
    points = None if first is None else [_drawn(first, space)]
    if ended and search.kind != "random":
        known = [dict(each.values) for each in ended]
        points = [each for each in points or [] if each not in known] + known
    seed = search.seed + len(ended)  # otherwise the first samples would be repeated
    if search.kind == "random":
        return BasicVariantGenerator(
            points_to_evaluate=points, max_concurrent=jobs, random_state=search.seed
        )
    metrics = [score_key(name) for name in objectives]
    # Imported here, because the packages are optional and slow to import.
    if search.kind == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        logging.getLogger("optuna").setLevel(logging.WARNING)  # it logs to stderr
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
    """Return the scheduler.

    ASHA compares the metric at equal seconds of the run, equal USD or equal samples, depending on
    the first objective: the leading trial there is likely to reach the target first.
    """
    schedule = config.schedule
    if schedule.kind == "asha":
        untyped: Any = AshaKeepingBase  # its types expect integer steps
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
        return PbtKeepingBase(
            space.base_draw() or {},
            time_attr="training_iteration",
            metric="behind",
            mode="min",
            perturbation_interval=schedule.every,
            quantile_fraction=schedule.quantile,
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
    return draw(low, high + 1 if whole else high)  # Ray's integers exclude the upper end


def _drawn(draw: dict[str, Any], space: Space) -> dict[str, Any]:
    fixed = {entry.name for entry in space.entries if entry.domain.kind in ("value", "grid")}
    return {name: value for name, value in draw.items() if name not in fixed}


def trial_count(config: TuningConfig, space: Space) -> int:
    """Return the number of trials."""
    grids: Sequence[int] = [
        len(entry.domain.edges) for entry in space.entries if entry.domain.kind == "grid"
    ]
    count = config.search.trials
    for each in grids:
        count *= each
    return count


# ------------------------------------------------------------------ the search


def _ignore(_line: str) -> None:
    pass


NOTIFY: ContextVar[Callable[[str], None]] = ContextVar("tell", default=_ignore)
"""Receives each line. Not an attribute of the callback, because Ray Tune pickles that."""


class ProgressCallback(Callback):
    """Records finished trials, and reports them.

    Args:
        objectives: reported objectives of a trial.
        wanted: number of trials.
        file: receives finished trials.
        known: keys of recorded trials, which only repeat their reports.
    """

    def __init__(
        self,
        objectives: Sequence[ObjectiveName],
        wanted: int,
        file: TrialsFile,
        known: Collection[str] = (),
    ) -> None:
        self._objectives = tuple(objectives)
        self._wanted = wanted
        self._file, self._known = file, frozenset(known)
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._began_s = time.monotonic()
        self._done: set[str] = set()
        self._best: float | None = None

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """See Ray."""
        self._reports.setdefault(trial.trial_id, []).append(plain_report(result))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        reports = self._reports.pop(trial.trial_id, [])
        if key_of(trial.config) in self._known:
            self._note_best(trial)
            return
        if reports:
            self._file.add(trial.config, reports)
        self._ended(trials, trial)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """See Ray."""
        self._ended(trials, trial)

    def _ended(self, trials: Sequence[Trial], trial: Trial) -> None:
        ended = {each.trial_id for each in trials if each.status in (Trial.TERMINATED, Trial.ERROR)}
        self._done.add(trial.trial_id)
        done = len(ended | {trial.trial_id})
        spent_s = time.monotonic() - self._began_s
        what = f"{trial.trial_id} {self._text(trial)}"
        NOTIFY.get()(progress_text(done, self._wanted, spent_s, len(self._done), what))

    def _text(self, trial: Trial) -> str:
        reported = trial.last_result or {}
        if reported.get("status") == "failed" or score_key(self._objectives[0]) not in reported:
            why = str(reported.get("why") or "its process died").splitlines()[0]
            return f"failed: {why}"
        texts = [score_text(name, float(reported[score_key(name)])) for name in self._objectives]
        early = "" if "status" in reported else "ended early, "
        if reported.get("status") == "diverged":
            return f"diverged, {', '.join(texts)}"
        if self._note_best(trial):
            texts.append("best so far")
        return early + ", ".join(texts)

    def _note_best(self, trial: Trial) -> bool:
        """Return whether a trial is better than the previous ones, and remember the best."""
        reported = trial.last_result or {}
        score = reported.get(score_key(self._objectives[0]))
        if reported.get("status", "failed") in ("failed", "diverged") or score is None:
            return False
        if self._best is not None and float(score) >= self._best:
            return False
        self._best = float(score)
        return True


def score_text(objective: ObjectiveName, value: float) -> str:
    """Return an objective's value as text."""
    kind = kind_of(value)
    if kind == "failed":
        return "failed"
    if objective == "loss":
        return f"loss {number_text(value)}"
    if kind == "unmet":
        return "target not reached"
    return duration_text(value) if objective == "time_to_target" else f"{number_text(value)} USD"


def plain_report(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a trial has reported, without those of Ray Tune."""
    found = {name: plain(value) for name, value in result.items() if name not in _OF_RAY}
    return {k: v for k, v in found.items() if v is None or isinstance(v, (str, bool, int, float))}


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search to run.

    Attributes:
        config: the search.
        space: search space.
        out: output directory.
        tried: validated configurations at the edges of the space.
    """

    config: TuningConfig
    space: Space
    out: Path
    tried: Sequence[Experiment]

    @property
    def is_real(self) -> bool:
        """Whether trials train on real actors."""
        return self.config.trials.kind == "real"

    @property
    def jobs(self) -> int:
        """Number of parallel trials."""
        own = self.config.trials.jobs
        if own is not None:
            return own
        return 1 if self.is_real else default_jobs()

    @property
    def spec(self) -> CandidateSpec:
        """Common settings of its trials."""
        trials = self.config.trials
        runs = str(self.out / "runs") if self.is_real else None
        return CandidateSpec(
            self.space.base, self.config.objectives, trials.seeds, self.config.prices, runs
        )

    @property
    def file(self) -> TrialsFile:
        """File of the finished trials."""
        return TrialsFile(self.out / TRIALS_FILE)

    @property
    def wanted(self) -> int:
        """Number of trials."""
        return trial_count(self.config, self.space)

    @property
    def digest(self) -> str:
        """Digest of everything that must not change when a search is resumed."""
        return digest(self.config) + digest(self.space.base.experiment())


def run_search(plan: SearchPlan, notify: Callable[[str], None]) -> ResultGrid:
    """Run all trials that are not recorded; Ctrl-C ends the search with the finished ones.

    Recorded trials repeat their reports, so that the search algorithm and the scheduler learn from
    them as well.

    Args:
        plan: the search; its directory exists.
        notify: called with every finished trial, and with long phases.

    Raises:
        RunDirectoryError: the file of the trials cannot be read.
        ClusterError: the cluster does not start, or cannot be reached.
    """
    with ExitStack() as stack:
        ended = plan.file.read(tuple(param_space(plan.space)))
        shutil.rmtree(plan.out / TUNE_FOLDER, ignore_errors=True)  # pickled by Ray and never read
        stack.enter_context(_quiet(notify))
        with ticking("starting the cluster of the trials", notify):
            stack.enter_context(_cluster(plan))
        stack.enter_context(sigterm_as_ctrl_c())  # Ray has set its own handler
        with ticking("running trials", notify):
            return _tuner(plan, ended).fit()


def _tuner(plan: SearchPlan, ended: Mapping[str, TrialRecord]) -> tune.Tuner:
    config = plan.config
    return tune.Tuner(
        _trainable(plan, ended),
        param_space=param_space(plan.space),
        tune_config=tune.TuneConfig(
            num_samples=config.search.trials,
            max_concurrent_trials=None if config.search.kind == "random" else plan.jobs,
            search_alg=search_of(config, plan.space, plan.jobs, list(ended.values())),
            scheduler=schedule_of(config, plan.space),
            reuse_actors=not plan.is_real,
            trial_dirname_creator=_folder_of,
        ),
        run_config=tune.RunConfig(
            name=TUNE_FOLDER,
            storage_path=str(plan.out),
            callbacks=[ProgressCallback(config.objectives, plan.wanted, plan.file, ended.keys())],
            verbose=0,
        ),
    )


def _folder_of(trial: Any) -> str:
    """Return the number of a trial, which is stable in a resumed search."""
    return str(trial.trial_id).rpartition("_")[2]


def _trainable(plan: SearchPlan, ended: Mapping[str, TrialRecord]) -> Any:
    """Return the trainable with the resources of one trial."""
    known = {key: each.reports for key, each in ended.items()}
    space, spec = plan.space, plan.spec

    def trial(drawn: dict[str, Any]) -> None:
        reports = known.get(key_of(drawn))
        if reports is None:
            run_candidate(space.values(drawn), spec)
        for each in reports or ():
            tune.report(dict(each))

    def resources(drawn: dict[str, Any]) -> tune.PlacementGroupFactory:
        if key_of(drawn) in known:
            return tune.PlacementGroupFactory([{"CPU": _TRIAL_CPUS}])
        return candidate_resources(space.values(drawn), spec)

    if plan.is_real:
        return tune.with_resources(trial, resources)
    return tune.with_resources(trial, {"cpu": 1})


@contextmanager
def _cluster(plan: SearchPlan) -> Iterator[None]:
    """Connect to the cluster of the trials, or start it.

    Raises:
        ClusterError: as for `connect`, with the keys of the search, ``trials.cluster.*``.
    """
    config = plan.config.trials.cluster
    regions: Sequence[str] = (_TRIALS_REGION,)
    cpus = float(plan.jobs)
    if plan.is_real:
        regions, cpus = cluster_cpus(plan.tried, plan.jobs)
    elif not isinstance(config, LocalClusterConfig):
        regions = ()
    name = f"geo_ray-{plan.config.name}"
    with ExitStack() as stack:
        try:
            stack.enter_context(connect(config, regions, namespace=name, cpus_per_region=cpus))
        except GeoRayError as error:
            raise _with_own_keys(error) from error.__cause__
        yield


def _with_own_keys(error: GeoRayError) -> GeoRayError:
    """Return an error about the section ``cluster`` with the keys of the search."""
    first, newline, log = error.message.partition("\n")
    message = _CLUSTER_KEY.sub("trials.cluster", first) + newline + log
    fix = _CLUSTER_KEY.sub("trials.cluster", error.fix)
    return type(error)(message, fix=fix).with_traceback(error.__traceback__)


def _interrupt(_number: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """In the main thread, let SIGTERM end the search like Ctrl-C, with its current results."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet(notify: Callable[[str], None]) -> Iterator[None]:
    """Suppress Ray's lines and tables; progress goes to ``notify``."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    token = NOTIFY.set(notify)
    try:
        yield
    finally:
        NOTIFY.reset(token)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
