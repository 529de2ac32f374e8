"""Draws the plots of docs/results from the archived records.

Each chart names its figures by record and figure name, so that a plot shows nothing that no record
has. The same records give the same SVG files. `python -m benchmarks.plots` writes all of them to
docs/results/plots; `--out` names another folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common.support import REPOSITORY

ARCHIVE = REPOSITORY / "docs" / "results" / "archive"
PLOTS = REPOSITORY / "docs" / "results" / "plots"

# Mid tones, readable on a light and on a dark page.
TEXT = "#75828f"
INSIDE = "#22303c"  # on a bar
COLORS = ("#4c8bc9", "#cc7722", "#3f9a63", "#9070c4")
WIDTH_IN = 5.8
BAR_IN = 0.17

XEON_20, XEON_21 = "2026-11-20-2-core-xeon", "2026-11-21-2-core-xeon"
XEON_22, EPYC_23 = "2026-11-22-2-core-xeon", "2026-11-23-2-core-epyc"
EPYC_24, RECOVERY_25 = "2026-11-24-2-core-epyc", "2026-11-25-recovery"
EPYC_27 = "2026-11-27-2-core-epyc"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of a record.

    Attributes:
        record: path below the archive, without `.json`.
        figure: name of the figure in the record.
        run: index of a single run; None takes the figure's value.
        most: name of a figure with the upper end of the range; None takes the range of the runs.
    """

    record: str
    figure: str
    run: int | None = None
    most: str | None = None

    def value(self) -> float:
        """The number that the bar shows."""
        figure = figures(self.record)[self.figure]
        number = figure["value"] if self.run is None else figure["runs"][self.run]
        return float(number)

    def range(self) -> tuple[float, float] | None:
        """The least and the greatest run; None with fewer than two or if a run has no value."""
        if self.most is not None:
            return self.value(), float(figures(self.record)[self.most]["value"])
        runs = figures(self.record)[self.figure]["runs"]
        if self.run is not None or len(runs) < 2 or None in runs:
            return None
        return min(runs), max(runs)


@dataclass(frozen=True, slots=True)
class Chart:
    """Horizontal bars, grouped by row.

    Attributes:
        name: name of the SVG file; begins with the topic page's name.
        axis: label of the axis, with the unit.
        series: names of the bars of a row, as the legend has them.
        rows: label of each row and its bars, in the order of ``series``; None leaves one out.
        reference: position and label of a vertical line; None draws none.
        scale: factor from the record to the axis, such as 100 for percent.
        digits: decimal places of the labels.
    """

    name: str
    axis: str
    series: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Bar | None]]]
    reference: tuple[float, str] | None = None
    scale: float = 1.0
    digits: int = 2

    def bars(self) -> Iterator[tuple[int, int, Bar]]:
        """Row, series and bar of each figure."""
        for row, (_, bars) in enumerate(self.rows):
            for series, bar in enumerate(bars):
                if bar is not None:
                    yield row, series, bar

    def label(self, bar: Bar) -> str:
        """The number as the plot shows it."""
        return f"{bar.value() * self.scale:.{self.digits}f}"


@cache
def figures(record: str) -> Mapping[str, dict[str, Any]]:
    """The figures of an archived record by name."""
    content = json.loads((ARCHIVE / f"{record}.json").read_text("utf-8"))
    return {figure["name"]: figure for figure in content["figures"]}


def _peers(label: str, record: str) -> tuple[str, list[Bar | None]]:
    return label, [Bar(record, f"{peer}_over_geo_ray") for peer in ("torchft", "hivemind")]


def _slow_link(mbps: int) -> tuple[str, list[Bar | None]]:
    bars: list[Bar | None] = []
    for case in ("diloco_fp32", "diloco_int4", "streaming_fp32", "streaming_int4"):
        name = f"share_{mbps}_{case}"
        records = (f"{XEON_21}/slow_links", f"{XEON_22}/slow_links")
        bars.append(next((Bar(r, name) for r in records if name in figures(r)), None))
    return f"{mbps} Mbit/s", bars


def _strategies() -> list[tuple[str, list[Bar | None]]]:
    record = f"{EPYC_23}/all_strategies"
    reached = [
        name.removeprefix("reached_")
        for name, figure in figures(record).items()
        if name.startswith("reached_") and figure["value"] == 1
    ]
    bars: list[tuple[str, list[Bar | None]]] = [
        (name.replace("_int4", ", int4"), [Bar(record, f"speed_{name}")])
        for name in reached
        if name != "bsp"
    ]
    return sorted(bars, key=lambda row: -row[1][0].value() if row[1][0] else 0.0)


def _cloudless(label: str, name: str) -> tuple[str, list[Bar | None]]:
    return label, [Bar(f"{XEON_20}/sync_cloudless", f"speedup_over_hub_free_{name}")]


def _dgt(label: str, case: str) -> tuple[str, list[Bar | None]]:
    return label, [Bar(f"{XEON_21}/dgt", f"saving_{case}")]


def _wan(label: str, loss: str) -> tuple[str, list[Bar | None]]:
    record = f"{EPYC_23}/wan_goodput"
    names = ("goodput_bbr", "one_stream_bbr", "goodput_cubic", "one_stream_cubic")
    return label, [Bar(record, f"{name}_loss_{loss}") for name in names]


def _overlay(label: str, name: str) -> tuple[str, list[Bar | None]]:
    record = f"{XEON_21}/overlay"
    return label, [Bar(record, f"equal_{regions}_{name}") for regions in (8, 9)]


def _plan(label: str, record: str, policy: str) -> tuple[str, list[Bar | None]]:
    return label, [Bar(record, f"{kind}_error_{policy}") for kind in ("time", "usd")]


def _tuning(label: str, name: str) -> tuple[str, list[Bar | None]]:
    return label, [
        Bar(f"{EPYC_27}/tune_gain_{seeds}", name) for seeds in ("one_seed", "three_seeds")
    ]


def _recovery(label: str, role: str) -> tuple[str, list[Bar | None]]:
    bar = Bar(f"{RECOVERY_25}/{role.split('_')[0]}", f"{role}_p50", most=f"{role}_worst")
    return label, [bar]


def _bill(label: str, name: str) -> tuple[str, list[Bar | None]]:
    return label, [Bar(f"{EPYC_24}/autoscale", f"usd_{name}{end}") for end in ("", "_no_floor")]


def _online(label: str, run: int) -> tuple[str, list[Bar | None]]:
    names = ("competitive_ratio", "load_competitive_ratio", "foresight_over_pd_ors")
    return label, [Bar(f"{EPYC_27}/online_scheduling", name, run) for name in names]


def charts() -> list[Chart]:
    """All charts, by topic page."""
    return [
        Chart(
            "training-other-systems",
            "time to the same loss over that of geo_ray",
            ("torchft", "hivemind"),
            [
                _peers("10 Mbit/s", f"{XEON_22}/peers_10mbps"),
                _peers("20 Mbit/s, after a fix", f"{XEON_22}/peers"),
                _peers("20 Mbit/s, merge: correct", f"{XEON_22}/peers_live"),
                _peers("20 Mbit/s", f"{XEON_21}/peers"),
            ],
            (1.0, "geo_ray"),
        ),
        Chart(
            "training-slow-links",
            "fraction of the tokens per second without exchanges",
            ("diloco, fp32", "diloco, int4", "diloco_streaming, fp32", "diloco_streaming, int4"),
            [_slow_link(mbps) for mbps in (10, 50, 100, 1000)],
            digits=3,
        ),
        Chart(
            "strategies-speed",
            "time of bsp to an accuracy of 0.93 over that of the strategy",
            ("speed",),
            _strategies(),
            (1.0, "bsp"),
        ),
        Chart(
            "strategies-real-actors",
            "time of asgd to the target over that of the strategy",
            ("speed",),
            [
                _cloudless("sma, interval 4, 3 seeds", "sma_f4"),
                _cloudless("asgd_ga, interval 4, 3 seeds", "asgd_ga_f4"),
                _cloudless("asgd_ga, interval 8, 1 seed", "asgd_ga_f8"),
                _cloudless("ama, interval 4, 1 seed", "ama_f4"),
            ],
            (1.0, "asgd"),
        ),
        Chart(
            "codecs-dgt",
            "time saved against a reliable transfer, %",
            ("saving",),
            [
                _dgt("VGG, no loss, default options", "vgg_loss_0_put_back"),
                _dgt("VGG, no loss", "vgg_loss_0"),
                _dgt("VGG, 1 % loss", "vgg_loss_0.01"),
                _dgt("VGG, 3 % loss", "vgg_loss_0.03"),
                _dgt("AlexNet, no loss", "alexnet_loss_0"),
                _dgt("AlexNet, 1 % loss", "alexnet_loss_0.01"),
                _dgt("AlexNet, 3 % loss", "alexnet_loss_0.03"),
                _dgt("GoogLeNet, no loss", "googlenet_loss_0"),
                _dgt("GoogLeNet, 1 % loss", "googlenet_loss_0.01"),
                _dgt("GoogLeNet, 3 % loss", "googlenet_loss_0.03"),
            ],
            digits=0,
        ),
        Chart(
            "transport-goodput",
            "goodput over the TCP payload limit",
            ("geo_ray, BBR", "one TCP stream, BBR", "geo_ray, CUBIC", "one TCP stream, CUBIC"),
            [_wan("no loss", "0"), _wan("0.1 % loss", "0.001"), _wan("1 % loss", "0.01")],
        ),
        Chart(
            "transport-overlays",
            "seconds per round, equal lines",
            ("8 regions", "9 regions"),
            [
                _overlay("ring", "ring"),
                _overlay("netstorm", "netstorm"),
                _overlay("tsengine", "tsengine"),
                _overlay("BINARY", "binary"),
                _overlay("RACK", "rack"),
                _overlay("BINARY, whole messages", "binary_whole"),
                _overlay("RACK, whole messages", "rack_whole"),
                _overlay("star", "star"),
            ],
            digits=1,
        ),
        Chart(
            "planning-runs",
            "deviation of the run from its plan, %",
            ("time", "dollars"),
            [
                _plan("optimal", f"{XEON_22}/plan_runs_optimal", "optimal"),
                _plan("cloudless", f"{XEON_22}/plan_runs", "cloudless"),
                _plan("everything", f"{XEON_22}/plan_runs", "everything"),
                _plan("cloudless, other profile", f"{XEON_22}/plan_runs_optimal", "cloudless"),
                _plan("everything, other profile", f"{XEON_22}/plan_runs_optimal", "everything"),
            ],
            (5.0, "target, at most"),
            scale=100,
            digits=1,
        ),
        Chart(
            "planning-tuning",
            "time to the target, defaults over best trial",
            ("one seed per trial", "three seeds per trial"),
            [
                _tuning("reported by the search", "searched_gain"),
                _tuning("other seeds, simulated", "sim_time_to_target_gain"),
                _tuning("other seeds, WAN lab", "time_to_target_gain"),
            ],
            (1.3, "target, at least"),
        ),
        Chart(
            "recovery-seconds",
            "seconds until full rate: median, line to the worst",
            ("median",),
            [
                _recovery("worker of two, train.elastic", "worker"),
                _recovery("bridge", "bridge"),
                _recovery("averager's bridge, with standby", "host"),
                _recovery("only worker of a region", "worker1"),
                _recovery("primary shard of a server", "server"),
                _recovery("averager's region, no standby", "home"),
            ],
            (10.0, "target, at most"),
            digits=1,
        ),
        Chart(
            "autoscaling-bills",
            "bill of a job on generated days, USD: median, line from least to most",
            ("servers on demand", "servers anywhere"),
            [
                _bill("autoscaler", "autoscaler"),
                _bill("zone failover", "zone_failover"),
                _bill("spot", "spot"),
                _bill("on demand", "on_demand"),
            ],
            digits=1,
        ),
        Chart(
            "scheduling-bound",
            "utility over that of the policy",
            ("bound over pd_ors", "bound over pd_ors_load", "jobs known ahead, over pd_ors"),
            [
                _online("10 machines, 10 jobs", 0),
                _online("10 machines, 50 jobs", 1),
                _online("10 machines, 100 jobs", 2),
                _online("50 machines, 50 jobs", 3),
                _online("100 machines, 100 jobs", 4),
            ],
            (1.5, "target, at most"),
        ),
    ]  # fmt: skip


def _places(chart: Chart) -> tuple[dict[tuple[int, int], float], list[float], float]:
    """Where each bar lies, the middle of each row, and the height of all, in bars."""
    places: dict[tuple[int, int], float] = {}
    centers = []
    top = 0.0
    for row, (_, bars) in enumerate(chart.rows):
        present = [series for series, bar in enumerate(bars) if bar is not None]
        for place, series in enumerate(present):
            places[row, series] = top + place
        centers.append(top + (len(present) - 1) / 2)
        top += len(present) + 0.7
    return places, centers, top - 0.7


def draw(chart: Chart, folder: Path) -> Path:
    """Write a chart as SVG and return its path; each bar has the id ``bar-ROW-SERIES``."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "geo_ray",
        "font.size": 10,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
    }
    places, centers, height = _places(chart)
    ends = {
        (row, series): max(bar.range() or [bar.value()]) * chart.scale
        for row, series, bar in chart.bars()
    }
    right = 1.1 * max(ends.values())
    with matplotlib.rc_context(style):
        drawing, axes = pyplot.subplots(
            figsize=(WIDTH_IN, BAR_IN * height + 0.75), layout="constrained"
        )
        for row, series, bar in chart.bars():
            value, y = bar.value() * chart.scale, places[row, series]
            (patch,) = axes.barh(y, value, 0.84, color=COLORS[series], linewidth=0)
            patch.set_gid(f"bar-{row}-{series}")
            if (span := bar.range()) is not None:
                least, most = (edge * chart.scale for edge in span)
                axes.plot([least, value], [y, y], color=INSIDE, linewidth=1.2)
                axes.plot([value, most], [y, y], color=TEXT, linewidth=1.2)
            end = ends[row, series]
            width = (5 + 5.4 * len(chart.label(bar))) / 270 * right
            if chart.reference is not None and 0 < chart.reference[0] - end < width:
                end = chart.reference[0]  # the label begins behind the line, not on it
            note = axes.annotate(
                chart.label(bar), (end, y), (4, 0), textcoords="offset points", va="center",
                fontsize=8.5,
            )  # fmt: skip
            note.set_gid(f"label-{row}-{series}")
        if chart.reference is not None:
            at, name = chart.reference
            axes.axvline(at, color=TEXT, linewidth=1, linestyle=(0, (4, 3)), label=name, zorder=0)
        if len(chart.series) > 1:
            for series, name in enumerate(chart.series):
                axes.barh(0, 0, color=COLORS[series], label=name)
        if len(chart.series) > 1 or chart.reference is not None:
            drawing.legend(
                loc="outside upper left", ncols=3 if len(chart.series) < 3 else 2, frameon=False,
                fontsize=8.5, handlelength=1.4, columnspacing=1.2, borderpad=0.1,
            )  # fmt: skip
        axes.set_yticks(centers, [label for label, _ in chart.rows])
        axes.set_ylim(height - 0.4, -0.7)
        axes.set_xlim(0, right)
        axes.set_xlabel(chart.axis, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{chart.name}.svg"
        drawing.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(drawing)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PLOTS, metavar="FOLDER", help="%(default)s")
    folder = parser.parse_args().out
    for chart in charts():
        print(draw(chart, folder))


if __name__ == "__main__":
    main()
