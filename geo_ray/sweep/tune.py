"""Run or resume a search with Ray Tune.

Real trials run in placement groups. The best trial is written as a configuration of its own.
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
from pathlib import Path
from typing import Any, Final

from ray import tune
from ray.tune import Callback, PlacementGroupFactory, Result, ResultGrid
from ray.tune.experiment import Trial
from ray.util import get_current_placement_group

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, GeoRayError, TuningDirectoryError
from geo_ray.base.files import save_text
from geo_ray.base.load import digest
from geo_ray.base.output import ticking
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.text import duration_text, number_text
from geo_ray.base.yaml import YamlTree, write_yaml
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.demand import by_label
from geo_ray.ray_cluster.placement import bundles_of, placed_in
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime import main
from geo_ray.runtime.launcher import OwnProcesses
from geo_ray.runtime.run_context import Reporting, Resumption
from geo_ray.runtime.spec import demands_of
from geo_ray.storage.folders import directory_of
from geo_ray.sweep.objective import Goal, Standing, Status, kind_of
from geo_ray.sweep.result import TrialPoint, TrialRow, Tuning, no_scores, ordered
from geo_ray.sweep.search import (
    ENDED_FILE,
    EndedTrial,
    add_ended,
    key_of,
    param_space,
    plain_report,
    read_ended,
    schedule_of,
    search_of,
    trial_count,
)
from geo_ray.sweep.search_config import ObjectiveName, TuningConfig
from geo_ray.sweep.space import Base, Space, check_directory
from geo_ray.sweep.trial import (
    TrialSpec,
    TrialWatch,
    failed_report,
    final_report,
    report_of,
    score_key,
    simulated_trial,
    watch_of,
)

_DRIVER_CPUS: Final = 0.01
_ON_CLUSTER: Final = "cluster={kind: existing}"
_STANDING: Final = "standing.json"


def real_trial(values: Mapping[str, JSONValue], spec: TrialSpec) -> None:
    """Train a candidate with every seed, and report to Ray Tune; failing is a result.

    With a checkpoint of Ray Tune's the run goes on from there, with this trial's values.
    """
    try:
        ended = [
            _trained(experiment, spec, reports=number == 0)
            for number, experiment in enumerate(_experiments(values, spec))
        ]
    except GeoRayError as error:
        tune.report(failed_report(spec.objectives, str(error)))
        return
    tune.report(final_report(ended, spec))


def real_resources(values: Mapping[str, JSONValue], spec: TrialSpec) -> PlacementGroupFactory:
    """What a trial reserves: its driver, and every process of its run, in the run's regions."""
    driver: tuple[dict[str, float], dict[str, str]] = ({"CPU": _DRIVER_CPUS}, {})
    bundles = [driver]
    with suppress(ConfigError):  # no configuration: the trial says so
        bundles += bundles_of(demands_of(_experiments(values, spec)[0]))
    return PlacementGroupFactory(
        [amounts for amounts, _ in bundles],
        strategy="PACK",
        bundle_label_selector=[labels for _, labels in bundles],
    )


def cluster_cpus(tried: Sequence[Experiment], jobs: int) -> tuple[tuple[str, ...], float]:
    """Regions of a local cluster for real trials, and the CPUs that each of them needs."""
    totals: dict[str, float] = {}
    for experiment in tried:
        for demand in by_label(demands_of(experiment)):
            most = max(totals.get(demand.region, 0.0), demand.total().get("CPU", 0.0))
            totals[demand.region] = most
    return tuple(totals), jobs * (max(totals.values()) + _DRIVER_CPUS)


def _experiments(values: Mapping[str, JSONValue], spec: TrialSpec) -> list[Experiment]:
    more: tuple[str, ...] = ("name=" + _trial_name(), _ON_CLUSTER)
    if spec.runs is not None:
        more += (f"run.dir={json.dumps(spec.runs)}",)
    seeds = spec.seeds or (None,)
    return [
        spec.base.experiment(values, more if seed is None else (*more, f"seed={seed}"))
        for seed in seeds
    ]


def _trial_name() -> str:
    try:
        return f"trial-{tune.get_context().get_trial_id()}"
    except (AttributeError, RuntimeError):  # asked for beside any trial: what it would reserve
        return "trial"


def _trained(
    experiment: Experiment, spec: TrialSpec, *, reports: bool
) -> tuple[Standing, TrialWatch]:
    run = directory.create(experiment, Path(spec.base.parent))
    before = _restored(run) if reports else None
    sender = _Sender(run, spec, reports=reports)
    watch = watch_of(experiment, spec, sender.tell, before)
    sinks = [sender.feed, watch.feed]
    group = get_current_placement_group()
    demands = demands_of(experiment)
    summary = main.run(
        experiment,
        run,
        Reporting(lambda _: None, sinks, time.time()),
        OwnProcesses(None if group is None else placed_in(group, demands, first=1)),
        resume=None if before is None else Resumption(),
    )
    shutil.rmtree(run.data, ignore_errors=True)
    return watch.ended(summary), watch


class _Sender:
    """Reports evaluations to Ray Tune, with the newest checkpoint if there is a new one."""

    def __init__(self, run: RunDirectory, spec: TrialSpec, *, reports: bool) -> None:
        self._run, self._spec, self._reports = run, spec, reports
        self._saved: int | None = None
        self._sent: int | None = None

    def feed(self, event: Any) -> None:
        """Take the next event."""
        if event.kind == "checkpoint":
            self._saved = int(event["id"])

    def tell(self, standing: Standing, watch: TrialWatch) -> None:
        """Report one evaluation."""
        if not self._reports:
            return
        told = report_of(standing, watch.goal, self._spec.objectives)
        if self._saved is None or self._saved == self._sent:
            tune.report(told)
            return
        folder = directory_of(self._run.checkpoints, self._saved)
        self._sent = self._saved
        with tempfile.TemporaryDirectory(prefix="geo-ray-checkpoint-") as scratch:
            shutil.copytree(folder, Path(scratch) / folder.name)
            known = {k: v for k, v in asdict(standing).items() if v is None or math.isfinite(v)}
            (Path(scratch) / _STANDING).write_text(json.dumps(known), "utf-8")
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(scratch))


def _restored(run: RunDirectory) -> Standing | None:
    """Put a checkpoint of Ray Tune's into a new run's directory; None if there is none."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        for source in Path(folder).iterdir():
            if source.is_dir():
                shutil.copytree(source, run.checkpoints / source.name, dirs_exist_ok=True)
        known = json.loads((Path(folder) / _STANDING).read_text("utf-8"))
    return Standing(**({"usd": math.nan} | known))


TELL: ContextVar[Callable[[str], None]] = ContextVar("tell", default=lambda _: None)
"""Given each line. Not the callback's own: that is stored with the search, and comes back."""


class ProgressCallback(Callback):
    """A callback of Ray Tune's.

    Args:
        objectives: what is told of a trial.
        wanted: how many trials there will be.
        path: where trials that end are written down; see `ended`.
        known: keys of trials that had ended before, and only repeat their reports.
    """

    def __init__(
        self,
        objectives: Sequence[ObjectiveName],
        wanted: int,
        path: Path,
        known: Collection[str] = (),
    ) -> None:
        self._objectives = tuple(objectives)
        self._wanted = wanted
        self._path, self._known = path, frozenset(known)
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
            add_ended(self._path, trial.config, reports)
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
        left_s = spent_s / len(self._done) * (self._wanted - done)
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        TELL.get()(f"{done}/{self._wanted}{left}: {trial.trial_id} {self._text(trial)}")

    def _text(self, trial: Trial) -> str:
        told = trial.last_result or {}
        if told.get("status") == "failed" or score_key(self._objectives[0]) not in told:
            why = str(told.get("why") or "its process died").splitlines()[0]
            return f"failed: {why}"
        texts = [score_text(name, float(told[score_key(name)])) for name in self._objectives]
        early = "" if "status" in told else "ended early, "
        if told.get("status") == "diverged":
            return f"diverged, {', '.join(texts)}"
        if self._note_best(trial):
            texts.append("the best so far")
        return early + ", ".join(texts)

    def _note_best(self, trial: Trial) -> bool:
        """Whether a trial is better than those before it; it is the best then."""
        told = trial.last_result or {}
        score = told.get(score_key(self._objectives[0]))
        if told.get("status", "failed") in ("failed", "diverged") or score is None:
            return False
        if self._best is not None and float(score) >= self._best:
            return False
        self._best = float(score)
        return True


def score_text(objective: ObjectiveName, value: float) -> str:
    """An objective's number for people."""
    kind = kind_of(value)
    if kind == "failed":
        return "failed"
    if objective == "loss":
        return f"loss {number_text(value)}"
    if kind == "unmet":
        return "target not reached"
    return duration_text(value) if objective == "time_to_target" else f"{number_text(value)} USD"


TUNE_FOLDER: Final = "tune"
SEARCH_FILE: Final = "search.json"
_TRIALS_REGION: Final = "trials"
_CLUSTER_KEY: Final = re.compile(r"(?<![\w./-])cluster(?=\.[a-z_]|=)")
_QUIET: Final = {
    "RAY_AIR_NEW_OUTPUT": "0",  # Ray's own table; the lines of `ProgressCallback` are ours
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search to make.

    Attributes:
        config: its file.
        space: what is searched.
        out: directory of everything.
        tried: configurations at the edges of the space.
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
        """Trials at once."""
        own = self.config.trials.jobs
        if own is not None:
            return own
        return 1 if self.is_real else max(1, len(os.sched_getaffinity(0)))

    @property
    def spec(self) -> TrialSpec:
        """What its trials have in common."""
        trials = self.config.trials
        runs = str(self.out / "runs") if self.is_real else None
        return TrialSpec(
            self.space.base, self.config.objectives, trials.seeds, self.config.prices, runs
        )

    @property
    def digest(self) -> str:
        """Of all that a search that goes on must have in common with the one before."""
        return digest(self.config) + digest(self.space.base.experiment())


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search came to.

    Attributes:
        tuning: its trials.
        grid: the same as Ray Tune has it.
        interrupted: whether it was cut off.
    """

    tuning: Tuning
    grid: ResultGrid
    interrupted: bool


def search(plan: SearchPlan, tell: Callable[[str], None], *, resume: bool = False) -> SearchResult:
    """Run all trials, or those that are left.

    In the main thread, Ctrl-C ends it with what there is.

    Args:
        plan: what to do.
        tell: called with every trial that ends, and with what takes long.
        resume: go on with what lies in its directory.

    Raises:
        TuningDirectoryError: what lies there is no search, or another one, or one under `pbt`.
        ClusterError: the cluster does not come up, or cannot be reached.
    """
    wanted = trial_count(plan.config, plan.space)
    folder = plan.out / TUNE_FOLDER
    with ExitStack() as stack:
        stack.enter_context(_sigterm_as_ctrl_c())
        stack.enter_context(_claimed(plan, resume=resume))
        ended = read_ended(plan.out / ENDED_FILE, tuple(param_space(plan.space)))
        shutil.rmtree(folder, ignore_errors=True)  # pickled by Ray, and not read again
        stack.enter_context(_quiet(tell))
        with ticking("starting the cluster of the trials", tell):
            stack.enter_context(_cluster(plan))
        stack.enter_context(_sigterm_as_ctrl_c())  # Ray has set a handler of its own
        with ticking("running trials", tell):
            grid = _tuner(plan, wanted, ended).fit()
    found = [_row(grid[place], plan) for place in range(len(grid))]
    rows = ordered([row for row in found if row is not None])
    goal = Goal.of(plan.space.base.experiment().train.target)
    tuning = Tuning(plan.config.objectives, goal, rows, _base_row(plan, rows), wanted)
    return SearchResult(tuning, grid, grid.num_terminated + grid.num_errors < wanted)


def _tuner(plan: SearchPlan, wanted: int, ended: Mapping[str, EndedTrial]) -> tune.Tuner:
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
            callbacks=[
                ProgressCallback(config.objectives, wanted, plan.out / ENDED_FILE, ended.keys())
            ],
            verbose=0,
        ),
    )


def _folder_of(trial: Any) -> str:
    """By its number alone, which a resumed search gives it again."""
    return str(trial.trial_id).rpartition("_")[2]


def _trainable(plan: SearchPlan, ended: Mapping[str, EndedTrial]) -> Any:
    """What Ray Tune runs, with what one trial reserves; a trial that has ended repeats itself."""
    known = {key: each.reports for key, each in ended.items()}
    space, spec = plan.space, plan.spec
    run: Callable[[Mapping[str, JSONValue], TrialSpec], None]
    run = real_trial if plan.is_real else simulated_trial

    def trial(drawn: dict[str, Any]) -> None:
        reports = known.get(key_of(drawn))
        if reports is None:
            run(space.values(drawn), spec)
        for each in reports or ():
            tune.report(dict(each))

    def resources(drawn: dict[str, Any]) -> tune.PlacementGroupFactory:
        if key_of(drawn) in known:
            return tune.PlacementGroupFactory([{"CPU": 0.01}])
        return real_resources(space.values(drawn), spec)

    if plan.is_real:
        return tune.with_resources(trial, resources)
    return tune.with_resources(trial, {"cpu": 1})


@contextmanager
def _cluster(plan: SearchPlan) -> Iterator[None]:
    """Where trials run, connected to.

    Raises:
        ClusterError: as for `connect`, with the keys as the search has them, ``trials.cluster.*``.
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
    """Return an error about the section ``cluster`` with the keys as a search has them."""
    first, newline, log = error.message.partition("\n")
    message = _CLUSTER_KEY.sub("trials.cluster", first) + newline + log
    fix = _CLUSTER_KEY.sub("trials.cluster", error.fix)
    return type(error)(message, fix=fix).with_traceback(error.__traceback__)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """In the main thread, let SIGTERM end the search as Ctrl-C does, with what there is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _claimed(plan: SearchPlan, *, resume: bool) -> Iterator[None]:
    """Have the directory of a search; one that did not come to begin leaves none."""
    was_there = plan.out.exists()
    _claim(plan, resume=resume)
    try:
        yield
    except BaseException:
        if not was_there and not (plan.out / TUNE_FOLDER).exists():
            shutil.rmtree(plan.out, ignore_errors=True)
        raise


def _claim(plan: SearchPlan, *, resume: bool) -> None:
    """Make the directory of a new search, or see that the one there is of this search.

    Raises:
        TuningDirectoryError: it is there and must not be, or is of another search.
    """
    file = plan.out / SEARCH_FILE
    content = {"digest": plan.digest, "config": plan.config.model_dump(mode="json")}
    check_directory(plan.out, resume=resume)
    if not resume:
        plan.out.mkdir(parents=True)
        save_text(file, json.dumps(content, indent=1) + "\n")
        return
    if plan.config.schedule.kind == "pbt":
        raise TuningDirectoryError(
            "a search with schedule.kind pbt cannot be resumed: its trials have become copies of "
            "each other, which only Ray Tune's pickled state knows",
            fix="Begin a new search with --out.",
        )
    try:
        known = json.loads(file.read_text("utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        raise TuningDirectoryError(
            f"{plan.out} is no search: there is no {SEARCH_FILE} in it",
            fix="Name the directory of a search, or leave out --resume and name a new one.",
        ) from None
    if known != plan.digest:
        raise TuningDirectoryError(
            f"{plan.out} is of another search: its base, space, objectives or trials have changed",
            fix="Put the file back as it was, or begin a new search with --out.",
        )


@contextmanager
def _quiet(tell: Callable[[str], None]) -> Iterator[None]:
    """Ray's own lines and tables are kept away; ours go to ``tell``."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    token = TELL.set(tell)
    try:
        yield
    finally:
        TELL.reset(token)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------- results


def _row(result: Result, plan: SearchPlan) -> TrialRow | None:
    """What became of a trial; None: it has not begun."""
    told: dict[str, Any] = dict(result.metrics or {})
    drawn = _drawn(result)
    if drawn is None:
        return None
    objectives = plan.config.objectives
    why = str(told.get("why") or "")
    status: Status = told.get("status") or ("failed" if result.error else "stopped")
    if result.error is not None and not why:
        status, why = "failed", str(result.error).strip().splitlines()[-1]
    scores = tuple(float(told[score_key(n)]) for n in objectives if score_key(n) in told)
    if status == "failed" or len(scores) < len(objectives):
        scores = no_scores(objectives)
    numbers = {k: float(v) for k, v in told.items() if _is_number(v)}
    return TrialRow(
        id=Path(result.path).name,
        values=plan.space.values(drawn),
        status=status,
        scores=scores,
        told=numbers,
        points=_points(result, Goal.of(plan.space.base.experiment().train.target).metric),
        why=why,
    )


def _drawn(result: Result) -> dict[str, Any] | None:
    """The values of a trial: of one that has told nothing they are in its folder alone."""
    if result.config:
        return dict(result.config)
    try:
        found: dict[str, Any] = json.loads((Path(result.path) / "params.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _points(result: Result, metric: str) -> tuple[TrialPoint, ...]:
    frame = result.metrics_dataframe
    if frame is None or metric not in frame.columns:
        return ()
    columns = frame[["time_s", "samples", metric]].astype(float).to_numpy()
    return tuple(
        TrialPoint(float(t_s), int(samples), float(value) if math.isfinite(value) else None)
        for t_s, samples, value in columns
        if math.isfinite(samples)
    )


def _base_row(plan: SearchPlan, rows: Sequence[TrialRow]) -> TrialRow | None:
    """The trial that is the base itself."""
    drawn = plan.space.base_draw()
    if drawn is None:
        return None
    values = plan.space.values(drawn)
    return next(
        (row for row in rows if row.values == values and row.status not in ("failed", "diverged")),
        None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_OWN_CLASS: Final = re.compile(r"(.+\.py)(:\w+)")
_NO_PATHS: Final = ("name", "run", "seed")


def write_best(base: Base, values: Mapping[str, JSONValue], note: str, path: Path) -> Path:
    """Write the base with a trial's values, as YAML that `geo-ray train` takes.

    Files that it names relative to the base's directory are named from the root on.

    Args:
        base: what the search started from.
        values: of the trial, by key.
        note: a line about it; a comment in the file.
        path: where to.

    Raises:
        RunDirectoryError: it cannot be written.
        ConfigError: the values do not make a configuration.
    """
    base.experiment(values)  # what is wrong with it is told before anything is written
    tree = apply_overrides(YamlTree(dict(base.tree())), base.overrides(values)).value
    assert isinstance(tree, dict)  # noqa: S101 - as the base's
    placed = {
        key: value if key in _NO_PATHS else _placed(value, Path(base.parent))
        for key, value in tree.items()
    }
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    save_text(path, comment + write_yaml(placed))
    return path


def _placed(value: JSONValue, parent: Path) -> JSONValue:
    """The same with paths that start at the root."""
    if isinstance(value, dict):
        return {key: _placed(each, parent) for key, each in value.items()}
    if isinstance(value, list):
        return [_placed(each, parent) for each in value]
    if not isinstance(value, str):
        return value
    own = _OWN_CLASS.fullmatch(value)
    file, rest = (own[1], own[2]) if own else (value, "")
    is_path = "/" in file or "." in file
    if is_path and not Path(file).is_absolute() and (parent / file).exists():
        return str((parent / file).absolute()) + rest
    return value
