"""Profiles a job: short runs on real actors, folded into step and exchange measurements.

Every run is a `geo-ray train` with fewer steps, so the measured workers, servers, exchanges and
links are the real ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from geo_ray.base.errors import InterruptedRunError, LinkUnknownError, ProfileError
from geo_ray.base.explain import explain
from geo_ray.codecs.registry import sections_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.planner.profile import ExchangePoint, NoisePoint, Profile, StartPoint, StepPoint
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.run_client import cluster_of
from geo_ray.sweep.trial import RealTrial, run_trial, validated
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.transport.links import LinkTable, load_links, table_of

WARM_UP: Final = 3
"""Warm-up steps that are not measured: memory and connections are new."""

_FEWEST: Final = 5


def step_points(
    events: Sequence[Event], experiment: Experiment, machines: Mapping[str, str]
) -> list[StepPoint]:
    """Return the median step of every region, per local step of a worker.

    Args:
        events: events of the run.
        experiment: its configuration; all workers of a region have the same rows.
        machines: instance type by region.

    Raises:
        ProfileError: a region has too few steps.
    """
    local = max(1, experiment.worker_steps)
    points = []
    for region in experiment.regions:
        if region.group is None:
            times_s = [time_s / local for _, time_s in _steps(events, region.name)]
        else:
            times_s = [time_s / local for time_s in _group_steps(events, region.name)]
        if len(times_s) < _FEWEST:
            raise ProfileError(
                f"region '{region.name}': {len(times_s)} steps after the first {WARM_UP}, but "
                f"{_FEWEST} are needed",
                fix="Give `geo-ray profile` more --steps.",
            )
        middle_s = statistics.median(times_s)
        spread = statistics.median(abs(time_s - middle_s) for time_s in times_s) / middle_s
        points.append(
            StepPoint(
                region=region.name,
                machine=machines[region.name],
                workers=_workers_of(region),
                rows=experiment.data.batch_size,
                step_s=middle_s,
                spread=spread,
                steps=len(times_s) * local,
            )
        )
    return points


def _workers_of(region: RegionConfig) -> int:
    """Return the workers of a region; the ranks of a group."""
    return region.workers if region.group is None else region.group.world_size


def _group_steps(events: Sequence[Event], region: str) -> list[float]:
    """Return the seconds of each step of a group, without exchanges.

    An event covers the steps since the one before it, and has their mean time.
    """
    found, before = [], 0
    for event in events:
        if event.kind == "step" and event["region"] == region:
            count = event["step"] - before
            if before >= WARM_UP:
                found += [event["compute_s"] / count] * count
            before = event["step"]
    return found


def evaluation_s(events: Sequence[Event]) -> float | None:
    """Return the time that an evaluation adds to its step; None without evaluations.

    The first worker evaluates before it computes, and the region's step waits for it.
    """
    found = []
    for region in {event["region"] for event in events if event.kind == "step"}:
        steps = dict(_steps(events, region))
        after = {e["step"] + 1 for e in events if e.kind == "eval" and e["region"] == region}
        with_s = [time_s for step, time_s in steps.items() if step in after]
        plain_s = [time_s for step, time_s in steps.items() if step not in after]
        if with_s and plain_s:
            found.append(max(0.0, statistics.mean(with_s) - statistics.median(plain_s)))
    return max(found, default=None)


def first_step_s(events: Sequence[Event]) -> float:
    """Return the seconds from the start of the run's clock to its first step.

    Raises:
        ProfileError: there was no step.
    """
    starts_s = [event.number("start_s") for event in events if event.kind == "step"]
    if not starts_s:
        raise ProfileError(
            "the short run has taken no step", fix="Give `geo-ray profile` more --steps."
        )
    return min(starts_s)


def exchange_point(
    events: Sequence[Event], averager: str, codec: str | None, links: LinkTable
) -> ExchangePoint | None:
    """Return the overhead of exchanges beyond bytes, round trip and waiting; None without any.

    Args:
        events: events of the run.
        averager: the averager's region, whose own exchanges cross no link.
        codec: codec of the updates.
        links: links during the run.
    """
    over_s: dict[str, list[float]] = defaultdict(list)
    up, down = [], []
    for event in events:
        region = event["region"] if event.kind == "exchange" else averager
        if region == averager:
            continue
        try:
            there, back = links.get(region, averager), links.get(averager, region)
        except LinkUnknownError:
            continue
        sent_s = 8e-6 * event["bytes_sent"] / there.goodput_mbps
        sent_s += 8e-6 * event["bytes_received"] / back.goodput_mbps + there.rtt_s
        held_s = event.fields.get("held_s") or 0.0
        over_s[region].append(event.t_s - event.number("start_s") - held_s - sent_s)
        up.append(event["bytes_sent"])
        down.append(event["bytes_received"])
    if not up:
        return None
    slowest_s = max(statistics.median(values) for values in over_s.values())
    return ExchangePoint(
        codec=codec,
        overhead_s=max(0.0, slowest_s),
        up_bytes=round(statistics.median(up)),
        down_bytes=round(statistics.median(down)),
        count=len(up),
    )


def noise_point(events: Sequence[Event]) -> NoisePoint | None:
    """Return the newest noise: of all regions if measured, else of the largest region."""
    newest: dict[str | None, Event] = {}
    for event in events:
        if event.kind == "noise":
            newest[event["region"]] = event
    if not newest:
        return None
    best = newest.get(None) or max(newest.values(), key=itemgetter("rows"))
    names = ("grad_sq", "trace", "rows", "workers", "count")
    return NoisePoint(**{name: best[name] for name in names})


def _steps(events: Sequence[Event], region: str) -> list[tuple[int, float]]:
    """Return number and seconds of each step, from its rows to the applied step."""
    return [
        (event["step"], event.t_s - event.number("start_s"))
        for event in events
        if event.kind == "step" and event["region"] == region and event["step"] > WARM_UP
    ]


@dataclass(frozen=True, slots=True)
class Corner:
    """A short run.

    Attributes:
        workers: workers of every region, or as many as it has.
        rows: rows per step and worker.
        codec: codec of its exchanges; None for fp32.
    """

    workers: int
    rows: int
    codec: str | None = None


def corners(
    workers: Sequence[int], rows: Sequence[int], codecs: Sequence[str | None], *, full: bool
) -> list[Corner]:
    """Return the runs to make: three extremes that determine the fit, or the whole grid.

    Many workers are measured with few rows, where the contribution of each is the largest part.

    Args:
        workers: numbers of workers; at least one.
        rows: batch sizes; at least one.
        codecs: used in turn, because a codec does not change a step.
        full: every combination.
    """
    counts, sizes = sorted(set(workers)), sorted(set(rows))
    extremes = [(counts[0], sizes[0]), (counts[0], sizes[-1]), (counts[-1], sizes[0])]
    grid = [(count, size) for count in counts for size in sizes]
    chosen = list(dict.fromkeys(grid if full else extremes))
    while len(chosen) < len(set(codecs)):  # every codec has a separate run
        chosen.append(chosen[-1])
    return [Corner(*each, codecs[i % len(codecs)]) for i, each in enumerate(chosen)]


def missing(
    wanted: Sequence[Corner], experiment: Experiment, machines: Mapping[str, str], known: Profile
) -> list[Corner]:
    """Return the corners whose steps or exchanges ``known`` lacks."""
    steps = {point.key for point in known.steps}
    codecs = {point.codec for point in known.exchanges}
    alone = len(experiment.regions) == 1
    found = []
    for corner in wanted:
        keys = {
            (r.name, machines[r.name], min(_workers_of(r), corner.workers), corner.rows)
            for r in experiment.regions
        }
        measures_exchanges = not (alone or experiment.groups)
        if not keys <= steps or (measures_exchanges and corner.codec not in codecs):
            found.append(corner)
    return found


def experiment_of(
    corner: Corner, experiment: Experiment, steps: int, run_dir: str, base_dir: Path
) -> Experiment:
    """Return the configuration of a short run.

    Args:
        corner: workers, rows and codec.
        experiment: the profiled configuration.
        steps: number of measured steps.
        run_dir: directory of the run.
        base_dir: base of relative paths in the configuration.

    Raises:
        ProfileError: the strategy does not work with so few workers or rows.
    """
    if experiment.groups:
        return _of_groups(experiment, steps, run_dir, base_dir)
    tree = experiment.model_dump(mode="json")
    for region in tree["regions"]:
        region["workers"] = min(region["workers"], corner.workers)
        region["batch_sizes"] = None
        speeds = (tree["emulate"] or {}).get("rows_per_s_by_region", {})
        if len(speeds.get(region["name"], [])) > 1:
            speeds[region["name"]] = speeds[region["name"]][: region["workers"]]
    tree["name"], tree["run"]["dir"] = "profile", run_dir
    tree["data"]["batch_size"] = corner.rows
    tree["checkpoint"]["every_s"] = None
    tree["train"] |= {
        "steps": WARM_UP + steps,
        "eval_every": WARM_UP + steps // 2,
        "target": None,
        "patience": None,
        "keep_best": None,
        "stragglers": None,
        "count": None,
        "noise_every": 1,
    }
    tree["codec"] = sections_of(corner.codec)
    often = {**tree, "strategy": {**tree["strategy"], "interval": max(1, steps // 4)}}
    if tree["strategy"].get("interval", 0) > steps // 4:
        try:
            return validated(often, base_dir)
        except ValidationError:
            pass  # other keys constrain the interval, so keep the configured one
    try:
        return validated(tree, base_dir)
    except ValidationError as error:
        raise ProfileError(
            f"{corner.workers} workers with {corner.rows} rows cannot be measured: "
            f"{'; '.join(explain(error, Experiment, {}))}",
            fix="Choose other --workers and --batch-sizes.",
        ) from None


def _of_groups(experiment: Experiment, steps: int, run_dir: str, base_dir: Path) -> Experiment:
    """Return the configuration of a short run of groups, which have a fixed size.

    An exchange ends the warm-up, if the strategy allows for so short an interval.
    """
    tree = experiment.model_dump(mode="json")
    tree["name"], tree["run"]["dir"], tree["checkpoint"]["every_s"] = "profile", run_dir, None
    tree["train"] |= {"target": None, "patience": None, "eval_every": 0}
    interval = int(tree["strategy"].get("interval", 1))
    for each in dict.fromkeys((min(interval, WARM_UP), interval)):
        tree["train"]["steps"] = each * (1 + -(-steps // each))
        try:
            return validated({**tree, "strategy": {**tree["strategy"], "interval": each}}, base_dir)
        except ValidationError as error:
            failed = error
    raise ProfileError(f"groups cannot be measured: {'; '.join(explain(failed, Experiment, {}))}")


def measure(
    experiment: Experiment,
    base_dir: Path,
    corners: Sequence[Corner],
    machines: Mapping[str, str],
    known: Profile,
    steps: int,
    observer: RunObserver,
    began_unix_s: float,
) -> Generator[Profile]:
    """Run every corner and add its measurements to ``known``; yields the profile after each.

    All runs use one cluster, whose start takes most of the time for local ones. Only the first run
    measures the duration of a start, and it has the most workers: later runs reuse processes that
    Ray has started in advance.

    Args:
        experiment: the configuration.
        base_dir: base of its relative paths.
        corners: short runs to make.
        machines: instance type by region.
        known: the current profile; may be empty.
        steps: measured steps of each run.
        observer: receives the progress of every run.
        began_unix_s: start of the user's command.

    Raises:
        InterruptedRunError: by the user; yielded profiles remain valid.
        GeoRayError: a run ends early.
    """
    if not corners:
        return
    profile = known
    place = directory.local_root(experiment).absolute() / "profiles" / "runs"
    noted_unix_s = began_unix_s
    with cluster_of(experiment, observer) as cluster:
        before_s = time.time() - noted_unix_s  # a separate run takes that long to start
        ordered = sorted(corners, key=attrgetter("workers"), reverse=True)
        for number, corner in enumerate(ordered, 1):
            what = f"{number}/{len(corners)} {corner.workers} workers, {corner.rows} rows"
            short = experiment_of(corner, experiment, steps, str(place), base_dir)
            run = directory.create(short, base_dir)
            real = RealTrial(stands=cluster, began_unix_s=time.time() - before_s)
            try:
                summary = run_trial(short, run, _Numbered(observer, what), real)
            except InterruptedRunError:
                shutil.rmtree(run.path)
                raise InterruptedRunError(
                    f"interrupted in run {number} of {len(corners)}",
                    fix="Repeat the command: finished measurements are reused.",
                ) from None
            profile = _with_run(profile, short, run, corner, machines)
            if number == 1 and not short.groups:
                profile = _with_start(profile, short, run, summary.startup_s or 0.0)
            shutil.rmtree(run.path)  # logs of failed runs stay
            with suppress(OSError):  # other files may be there
                place.rmdir()
            now_unix_s = time.time()
            spent_s = profile.spent_s + now_unix_s - noted_unix_s
            noted_unix_s = now_unix_s
            profile = profile.model_copy(update={"spent_s": spent_s})
            yield profile


class _Numbered(RunObserver):
    """Forwards events, and phases with the name of their run."""

    def __init__(self, observer: RunObserver, what: str) -> None:
        self._observer, self._what = observer, what

    def status(self, text: str) -> None:
        self._observer.status(f"{self._what}: {text}")

    def on_event(self, event: Event) -> None:
        self._observer.on_event(event)


def _with_run(
    profile: Profile,
    short: Experiment,
    run: RunDirectory,
    corner: Corner,
    machines: Mapping[str, str],
) -> Profile:
    """Return the profile with the measurements of one run."""
    events = list(read_events(run.path / EVENTS_FILE))
    if short.groups:  # their exchanges are with the process that serves the run
        return profile.with_steps(step_points(events, short, machines))
    links = _links(short, run.links)
    point = exchange_point(events, short.averager_region, corner.codec, links)
    took_s = evaluation_s(events)
    profile = profile.with_steps(step_points(events, short, machines))
    profile = profile.with_exchanges([] if point is None else [point])
    return profile.model_copy(
        update={
            "links": profile.links.with_records(links.links),
            "noise": noise_point(events) or profile.noise,
            "evaluation_s": max(took_s or 0.0, profile.evaluation_s),
        }
    )


def _with_start(
    profile: Profile, short: Experiment, run: RunDirectory, startup_s: float
) -> Profile:
    workers = sum(region.workers for region in short.regions)
    start_s = startup_s + first_step_s(list(read_events(run.path / EVENTS_FILE)))
    return profile.with_start(StartPoint(workers=workers, start_s=start_s))


def hardware(experiment: Experiment) -> str:
    """Return a short description of the hardware."""
    cores = os.cpu_count() or 1
    return f"{platform.machine()}, {cores} cores, {experiment.device}"


def _links(experiment: Experiment, learned: Path) -> LinkTable:
    """Return the emulated links of the configuration, or else the run's measured links."""
    specs = experiment.links()
    if specs:
        return table_of(specs)
    return load_links(learned) if learned.exists() else LinkTable()
