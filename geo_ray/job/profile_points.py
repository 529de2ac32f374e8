"""What the events of a short run say about steps, evaluations and exchanges."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from geo_ray.config.experiment import Experiment
from geo_ray.errors import LinkUnknownError, ProfileError
from geo_ray.observe.events.schema import Event
from geo_ray.planning.profile import ExchangePoint, NoisePoint, StepPoint
from geo_ray.transport.links.table import LinkTable

WARM_UP: Final = 3
"""First steps that do not count: memory is touched, connections are new."""

_FEWEST: Final = 5


def step_points(
    events: Sequence[Event], experiment: Experiment, machines: Mapping[str, str]
) -> list[StepPoint]:
    """Median step of every region, per local step of a worker.

    Args:
        events: of the run.
        experiment: its configuration; every worker of a region has the same rows.
        machines: instance type by region.

    Raises:
        ProfileError: a region has too few steps.
    """
    local = max(1, experiment.worker_steps)
    points = []
    for region in experiment.regions:
        times_s = [time_s / local for _, time_s in _steps(events, region.name)]
        if len(times_s) < _FEWEST:
            raise ProfileError(
                f"region '{region.name}': {len(times_s)} steps beyond the first {WARM_UP}, "
                f"{_FEWEST} are needed",
                fix="Give `geo-ray profile` more --steps.",
            )
        middle_s = statistics.median(times_s)
        spread = statistics.median(abs(time_s - middle_s) for time_s in times_s) / middle_s
        points.append(
            StepPoint(
                region=region.name,
                machine=machines[region.name],
                workers=region.workers,
                rows=experiment.data.batch_size,
                step_s=middle_s,
                spread=spread,
                steps=len(times_s) * local,
            )
        )
    return points


def evaluation_s(events: Sequence[Event]) -> float | None:
    """What an evaluation adds to the step in which it happens; None if there was none.

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
    """From the start of the run's clock to that of its first step: workers join and get the model.

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
    """What exchanges took beside bytes, round trip and waiting for others; None without any.

    Args:
        events: of the run.
        averager: its region, whose own exchanges cross no link.
        codec: of the updates.
        links: as they were in the run.
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
        sent_s = 8e-6 * event["bytes_out"] / there.goodput_mbps
        sent_s += 8e-6 * event["bytes_in"] / back.goodput_mbps + there.rtt_s
        held_s = event.fields.get("held_s") or 0.0
        over_s[region].append(event.t_s - event.number("start_s") - held_s - sent_s)
        up.append(event["bytes_out"])
        down.append(event["bytes_in"])
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
    """The newest noise: of all regions together if it was measured, else of the largest region."""
    newest: dict[str | None, Event] = {}
    for event in events:
        if event.kind == "noise":
            newest[event["region"]] = event
    if not newest:
        return None
    best = newest.get(None) or max(newest.values(), key=lambda event: int(event["rows"]))
    names = ("grad_sq", "trace", "rows", "workers", "count")
    return NoisePoint(**{name: best[name] for name in names})


def _steps(events: Sequence[Event], region: str) -> list[tuple[int, float]]:
    """Number and seconds of each step, from its rows to its being taken in."""
    return [
        (event["step"], event.t_s - event.number("start_s"))
        for event in events
        if event.kind == "step" and event["region"] == region and event["step"] > WARM_UP
    ]
