"""The sections of the report page whose curves can be looked at over several x axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from geo_ray.observe.events.columns import RegionRecord, RunRecord, standing
from geo_ray.observe.report.charts import ALL, MANY, Curve
from geo_ray.observe.report.presence import absences, presence_of
from geo_ray.observe.report.sections import none, section
from geo_ray.observe.report.series import Floats, bytes_at, smooth
from geo_ray.observe.report.views import AXES, SAMPLES, STEPS, TIME, WAN, switched, view
from geo_ray.observe.text import duration_text

_Returns: TypeAlias = Mapping[str, tuple[float, ...]]
"""When each region was a member again after an absence, in seconds."""


def curve_sections(run: RunRecord) -> str:
    """Draw training loss and evaluations over time, steps, samples, and bytes if there are any."""
    so_far = _SoFar.of(run)
    bands = presence_of(run.changes).until(run.totals.elapsed_s)
    returns = {
        name: tuple(end_s for _, end_s in absences(of_region)) for name, of_region in bands.items()
    }
    axes = [axis for axis in AXES if axis != WAN or so_far.wan_bytes.any()]
    return switched(axes, _loss(run, so_far, axes, returns) + _evals(run, so_far, axes, returns))


@dataclass(frozen=True, slots=True)
class _SoFar:
    """What all regions together had done by a time.

    Attributes:
        samples_s: when steps that stand were applied, rising, float64 (N,).
        samples: training samples by then, float64 (N,).
        wan_s: when bytes were counted, rising, float64 (M,).
        wan_bytes: bytes between regions by then, float64 (M,).
    """

    samples_s: Floats
    samples: Floats
    wan_s: Floats
    wan_bytes: Floats

    @staticmethod
    def of(run: RunRecord) -> _SoFar:
        steps = [(region.steps, region.standing()) for region in run.regions.values()]
        t_s = np.concatenate([np.zeros(0), *(columns["t_s"][stand] for columns, stand in steps)])
        counts = np.concatenate([np.zeros(0), *(c["samples"][stand] for c, stand in steps)])
        order = np.argsort(t_s, kind="stable")
        return _SoFar(
            t_s[order],
            np.cumsum(counts[order]),
            run.wan_total["t_s"],
            run.wan_total["bytes"],
        )

    def samples_at(self, t_s: Floats) -> Floats:
        known = np.concatenate([[0.0], self.samples])
        return known[np.searchsorted(self.samples_s, t_s, side="right")]

    def wan_at(self, t_s: Floats) -> Floats:
        return bytes_at(self.wan_s, self.wan_bytes, t_s)


def _loss(run: RunRecord, so_far: _SoFar, axes: list[str], returns: _Returns) -> str:
    charts = ""
    for axis in axes:
        curves: list[Curve] = []
        for index, (name, region) in enumerate(run.regions.items()):
            t_s, x, loss = _loss_over(axis, region, so_far)
            after = _after(t_s, [*returns.get(name, ()), *_places(_on(axis, run))])
            breaks = tuple(x[after].tolist())
            bold = smooth(loss, breaks=after)
            if len(run.regions) <= MANY and not np.array_equal(bold, loss, equal_nan=True):
                curves.append(Curve("", x, loss, index, faint=True, breaks=breaks))
            curves.append(Curve(name, x, bold, index, breaks=breaks))
        curves.sort(key=lambda curve: not curve.faint)
        whose = " of the region" if axis == SAMPLES else ""
        charts += view(axis, "training loss", curves, whose=whose, log=True, at=_on(axis, run))
    note = (
        "Bold: moving mean; the number beside a name is its end. Faint: every step. The table's "
        "loss at the end is another mean: of the last 20 steps, by rows."
    )
    if len(run.regions) > MANY:
        note = "Moving mean of each region; under the pointer, a line tells its name."
    resumed = resumptions(run)
    if resumed:
        times = ", ".join(duration_text(t_s) for t_s, _ in resumed)
        note += f" The run was resumed at {times}, the dashed lines: over time, curves pause there."
    return section("Training loss", f'<div class="charts">{charts}</div>', note)


def resumptions(run: RunRecord) -> list[tuple[float, str]]:
    """When the run was resumed, and that in words."""
    times_s = [event.t_s for event in run.incidents if event.kind == "run_started"]
    return [(t_s, f"resumed at {duration_text(t_s)}") for t_s in times_s]


def _places(marks: list[tuple[float, str]]) -> list[float]:
    """Where the marks are."""
    return [place for place, _ in marks]


def _after(t_s: Floats, starts: list[float]) -> list[int]:
    """Return which points are the first after a region's returns, and after resumptions."""
    return [int(index) for index in np.searchsorted(t_s, sorted(starts)) if index < len(t_s)]


def _loss_over(axis: str, region: RegionRecord, so_far: _SoFar) -> tuple[Floats, Floats, Floats]:
    """Return times, places and losses."""
    steps, stands = region.steps, region.standing()
    t_s, loss = steps["t_s"], steps["loss"]
    if axis == TIME:
        return t_s, t_s, loss
    if axis == WAN:
        return t_s, so_far.wan_at(t_s), loss
    x = steps["step"] if axis == STEPS else steps["samples"]
    return t_s[stands], (x[stands] if axis == STEPS else np.cumsum(x[stands])), loss[stands]


def _on(axis: str, run: RunRecord) -> list[tuple[float, str]]:
    """Marks of an axis: only over time does a resumption have a place of its own."""
    return resumptions(run) if axis == TIME else []


def _evals(run: RunRecord, so_far: _SoFar, axes: list[str], returns: _Returns) -> str:
    series: list[tuple[str | None, str, int]] = [
        (name, name, index) for index, name in enumerate(run.regions)
    ]
    series.append((None, "all regions", ALL))  # last, so on top
    charts = ""
    for metric in dict.fromkeys(metric for _, metric in run.evals):
        for axis in axes:
            curves = []
            for region, label, index in series:
                if (region, metric) not in run.evals:
                    continue
                t_s, x, value = _eval_over(axis, run, so_far, (region, metric))
                starts = [*returns.get(region or "", ()), *_places(_on(axis, run))]
                breaks = tuple(x[_after(t_s, starts)].tolist())
                curves.append(Curve(label, x, value, index, breaks=breaks))
            whose = " of all regions" if axis == SAMPLES else ""
            charts += view(axis, f"held-out {metric}", curves, whose=whose, at=_on(axis, run))
    body = f'<div class="charts">{charts}</div>' if charts else none("nothing was evaluated")
    return section("Evaluation on held-out rows", body)


def _eval_over(
    axis: str, run: RunRecord, so_far: _SoFar, of: tuple[str | None, str]
) -> tuple[Floats, Floats, Floats]:
    """Return times, places and values."""
    columns = run.evals[of]
    t_s, value = columns["t_s"], columns["value"]
    if axis == TIME:
        return t_s, t_s, value
    if axis == WAN:
        return t_s, so_far.wan_at(t_s), value
    stands = standing(columns["step"])
    x = columns["step"] if axis == STEPS else so_far.samples_at(t_s)
    return t_s[stands], x[stands], value[stands]
