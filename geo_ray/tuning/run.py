"""Makes a search with Ray Tune, from a file's content to its result; or goes on with one."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray import tune
from ray.tune import Result, ResultGrid

from geo_ray.config.canonical import JSONValue
from geo_ray.config.cluster import LocalClusterConfig
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.errors import GeoRayError, TuningDirectoryError
from geo_ray.runtime.cluster.connect import connect
from geo_ray.tuning.config import TuningConfig
from geo_ray.tuning.directory import check_directory
from geo_ray.tuning.ended import ENDED_FILE, EndedTrial, key_of, read_ended
from geo_ray.tuning.objective import Goal, Status
from geo_ray.tuning.progress import TELL, ProgressCallback
from geo_ray.tuning.real import cluster_cpus, real_resources, real_trial
from geo_ray.tuning.result import TrialPoint, TrialRow, Tuning, no_scores, ordered
from geo_ray.tuning.search import param_space, schedule_of, search_of, trial_count
from geo_ray.tuning.space import Space
from geo_ray.tuning.trial import TrialSpec, simulated_trial
from geo_ray.tuning.watch import score_key
from geo_ray.util.atomic_file import save_text
from geo_ray.util.ticking import ticking

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
