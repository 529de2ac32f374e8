"""View models of the report and the live page, and their computation from events.

Values are plain and complete, so renderers do no I/O. `HistoryFold` folds the events of a run
into curves and notes of bounded size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.text import number_text
from geo_ray.telemetry.events import FAULT_KINDS, MEMBER_KINDS, Event
from geo_ray.telemetry.participation import Participation, TimeRange, absences
from geo_ray.telemetry.status import RegionStatus, RunStatus
from geo_ray.telemetry.summary import Cost
from geo_ray.telemetry.totals import Link, LinkTotals, Rate, RunTotals

Floats = NDArray[np.float64]


class BoundedCurve:
    """A bounded series: means over enough points that there are at most ``most`` means.

    Args:
        most: maximum number of means, even and at least 4.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._each = 1  # points per mean
        self._done: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Add the next point; non-finite points are skipped."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self._open.append((x, y))
        if len(self._open) < self._each:
            return
        self._done.append(_mean(self._open))
        self._open.clear()
        if len(self._done) == self._most:
            pairs = zip(self._done[::2], self._done[1::2], strict=True)
            self._done = [_mean(pair) for pair in pairs]
            self._each *= 2

    def points(self) -> tuple[Floats, Floats]:
        """Give places and means, the newest last; float64 (N,) each."""
        rows = [*self._done, *([_mean(self._open)] if self._open else [])]
        both = np.array(rows, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def __len__(self) -> int:
        return len(self._done) + bool(self._open)


def _mean(
    points: list[tuple[float, float]] | tuple[tuple[float, float], ...],
) -> tuple[float, float]:
    count = len(points)
    return sum(x for x, _ in points) / count, sum(y / count for _, y in points)


@dataclass(frozen=True, slots=True)
class MapRegion:
    """A region on the map.

    Attributes:
        name: of the region.
        state: as in `RegionStatus`; ``member`` if unknown.
        is_leader: whether it hosts the averager.
        detail: further description.
    """

    name: str
    state: str
    is_leader: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MapLink:
    """One direction of a link with traffic.

    Attributes:
        src: sending region.
        dst: receiving region.
        mbps: current load, or mean load of the run, in megabits per second.
        bytes: transferred bytes.
        limit_mbps: capacity, if known.
    """

    src: str
    dst: str
    mbps: float
    bytes: int
    limit_mbps: float | None = None

    @property
    def fraction(self) -> float | None:
        """Load as a fraction of the capacity; None if unknown."""
        return None if self.limit_mbps is None else self.mbps / self.limit_mbps


@dataclass(frozen=True, slots=True)
class MapView:
    """Regions and the links between them.

    Attributes:
        regions: in the order of the configuration.
        links: the busiest first.
    """

    regions: tuple[MapRegion, ...]
    links: tuple[MapLink, ...]


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A machine, or several identical ones.

    Attributes:
        region: region of the run.
        machine: the cloud's id of the machine, or the number of machines.
        type: the cloud's instance type, and the market.
        state: state in a word.
        usd_per_hour: price of the row; None: unknown.
        age_s: billed time; None: unknown.
        note: reason for its rental or departure.
    """

    region: str
    machine: str
    type: str
    state: str
    usd_per_hour: float | None
    age_s: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class MachinesView:
    """The machines of a run.

    Attributes:
        source: source of the rows: ``autoscaler`` or ``plan``.
        rows: rows by region.
        paid_usd: cost so far, by the autoscaler's accounting; None: no accounting.
    """

    source: str
    rows: tuple[MachineRow, ...]
    paid_usd: float | None = None

    @property
    def usd_per_hour(self) -> float:
        """Total price per hour of the rows with known prices."""
        return sum(row.usd_per_hour or 0.0 for row in self.rows)


@dataclass(frozen=True, slots=True)
class CurveView:
    """One line of a chart over the time of the run.

    Attributes:
        label: label of the line.
        t_s: seconds of the run, rising, float64 (N,).
        value: float64 (N,).
        breaks_s: times at which a new line begins, because the region was absent.
    """

    label: str
    t_s: Floats
    value: Floats
    breaks_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MembersView:
    """Participation over time.

    Attributes:
        ranges: time ranges by region and worker.
        marks: events at a moment: seconds, and a description.
        end_s: end of the known time.
    """

    ranges: dict[str, list[TimeRange]]
    marks: tuple[tuple[float, str], ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class HistoryView:
    """Curves and notes over time.

    Attributes:
        losses: loss over all regions first, then by region.
        evals: evaluations by metric, over all regions.
        exchanges: duration of exchanges in seconds, from sending to merging.
        usd: cost; None: the run follows no plan, or prices are missing.
        members: participation over time.
        notes: newest notable events: seconds, and a description.
    """

    losses: tuple[CurveView, ...]
    evals: tuple[CurveView, ...]
    exchanges: CurveView
    usd: CurveView | None
    members: MembersView
    notes: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class PlannedTotals:
    """Totals of a plan.

    Attributes:
        seconds: duration.
        usd: cost.
    """

    seconds: float
    usd: float


@dataclass(frozen=True, slots=True)
class RunView:
    """All data shown about a run.

    Attributes:
        status: state of the run.
        map: regions and links.
        history: curves and notes over time.
        machines: machines; None if unknown.
        cost: terms of the plan and of the run; None: the run follows no plan.
        planned: totals of the plan; None: the run follows no plan.
        problems: descriptions of files that could not be read.
    """

    status: RunStatus
    map: MapView
    history: HistoryView
    machines: MachinesView | None = None
    cost: Cost | None = None
    planned: PlannedTotals | None = None
    problems: tuple[str, ...] = field(default=())


UsdOf: TypeAlias = Callable[[RunTotals], float | None]
"""Function that prices the work of a run so far; None: unknown."""

_ALL_POINTS: Final = 600
_REGION_POINTS: Final = 4000  # in total over all regions
_LEAST_POINTS: Final = 40
_USD_POINTS: Final = 200
_NOTES: Final = 50
_BANDS: Final = 200  # per region or worker
_LOAD_S: Final = 15.0  # window of the load of a link
_NOTED: Final = (
    *FAULT_KINDS,
    *("worker_left", "checkpoint_failed", "stop_requested", "run_failed", "run_paused"),
    *("run_resumed", "region_drained", "region_joined", "join_failed", "members_refused"),
    *(
        "averager_moved",
        "server_replaced",
        "replanned",
        "interval_changed",
        "averager_moves",
        "best_failed",
    ),
)


def no_usd(totals: RunTotals) -> float | None:
    """See `UsdOf`, for a run without a plan."""
    return None


class HistoryFold:
    """Folds events into curves, notes and loads of links.

    Args:
        usd_of: prices the work so far.
    """

    def __init__(self, usd_of: UsdOf = no_usd) -> None:
        self._usd_of = usd_of
        self._loss = BoundedCurve(_ALL_POINTS)
        self._losses: dict[str, BoundedCurve] = {}
        self._exchanges = BoundedCurve(_ALL_POINTS)
        self._evals: dict[str, BoundedCurve] = {}
        self._usd: list[tuple[float, float]] = []
        self._usd_gap_s, self._usd_at_s = 1.0, 0.0
        self._wan = LinkTotals()
        self._loads: dict[Link, Rate] = {}
        self._participation = Participation()
        self._notes: deque[tuple[float, str]] = deque(maxlen=_NOTES)
        self._now_s = 0.0

    def feed(self, event: Event, totals: RunTotals) -> None:
        """Process the next event, with the totals that include it."""
        self._now_s = max(self._now_s, event.t_s)
        if event.kind in MEMBER_KINDS:
            self._participation.feed(event)
            self._shorten()
        if event.kind in _NOTED:
            self._notes.append((event.t_s, note_text(event)))
        match event.kind:
            case "run_started":
                self._wan.restart()
                points = max(
                    _LEAST_POINTS, _REGION_POINTS // max(1, len(event["regions"])) // 2 * 2
                )
                for name in event["regions"]:
                    self._losses.setdefault(name, BoundedCurve(min(points, _ALL_POINTS)))
            case "step":
                loss = event.number("loss")
                self._loss.add(event.t_s, loss)
                curve = self._losses.setdefault(event["region"], BoundedCurve(_LEAST_POINTS))
                curve.add(event.t_s, loss)
            case "exchange" if event["start_s"] is not None:
                self._exchanges.add(event.t_s, event.t_s - event["start_s"])
            case "eval" if event["region"] is None:
                for metric in event["metrics"]:
                    value = event["metrics"][metric]
                    curve = self._evals.setdefault(metric, BoundedCurve(_ALL_POINTS))
                    curve.add(event.t_s, float("nan") if value is None else value)
            case "wan":
                self._note_bytes(event)
        self._price(event, totals)

    def links(self, limits: Mapping[Link, float], most: int) -> tuple[MapLink, ...]:
        """Give the links with traffic, the busiest first.

        Args:
            limits: capacities of links in megabits per second, where known.
            most: maximum number of links.
        """
        found = [
            MapLink(
                src=link[0],
                dst=link[1],
                mbps=self._loads[link].per_s(self._now_s) * 8e-6 if link in self._loads else 0.0,
                bytes=count,
                limit_mbps=limits.get(link),
            )
            for link, count in self._wan.by_link().items()
            if count
        ]
        return tuple(sorted(found, key=attrgetter("mbps", "bytes"), reverse=True)[:most])

    def history(self) -> HistoryView:
        """Give curves and notes over time."""
        ranges = self._participation.until(self._now_s)
        losses = [_curve("all regions", self._loss)]
        losses += [
            _curve(name, curve, absences(ranges.get(name, ())))
            for name, curve in self._losses.items()
        ]
        usd = None
        if self._usd:
            points = np.array(self._usd, dtype=np.float64)
            usd = CurveView("spent", points[:, 0], points[:, 1])
        return HistoryView(
            losses=tuple(losses),
            evals=tuple(_curve(name, curve) for name, curve in self._evals.items()),
            exchanges=_curve("exchange", self._exchanges),
            usd=usd,
            members=MembersView(ranges, tuple(self._participation.marks), self._now_s),
            notes=tuple(self._notes),
        )

    def prune(self) -> None:
        """Drop data outside the windows of rates; called periodically."""
        for load in self._loads.values():
            load.per_s(self._now_s)

    def _note_bytes(self, event: Event) -> None:
        link = (event["src"], event["dst"])
        new = sum(self._wan.feed(*link, event["bytes_by_class"]).values())
        load = self._loads.get(link)
        if load is None:
            load = self._loads[link] = Rate(_LOAD_S)
        load.add(event.t_s, new)

    def _price(self, event: Event, totals: RunTotals) -> None:
        if totals.started is None or event.t_s < self._usd_at_s:
            return
        usd = self._usd_of(totals)
        self._usd_at_s = event.t_s + self._usd_gap_s
        if usd is None:
            return
        self._usd.append((event.t_s, usd))
        if len(self._usd) > _USD_POINTS:
            self._usd = self._usd[::2]
            self._usd_gap_s *= 2

    def _shorten(self) -> None:
        """Limit the ranges of long runs to the newest ones."""
        for ranges in self._participation.ranges.values():
            del ranges[: max(0, len(ranges) - _BANDS)]
        marks = self._participation.marks
        del marks[: max(0, len(marks) - _BANDS)]


def map_of(status: RunStatus, links: tuple[MapLink, ...]) -> MapView:
    """Create map regions from a status."""
    regions = tuple(
        MapRegion(each.name, each.state, each.name == status.averager, _detail(each))
        for each in status.regions
    )
    return MapView(regions, links)


def note_text(event: Event) -> str:
    """Describe an event in a line of plain text."""
    parts = ["averager moved" if event.kind == "averager_moved" else event.kind.replace("_", " ")]
    for name in (
        "region",
        "address",
        "worker",
        "step",
        "averager",
        "interval",
        "code",
        "cause",
        "message",
    ):
        if event.fields.get(name) is not None:
            value = " ".join(str(event.fields[name]).split())
            parts.append(
                value if name in ("region", "address", "cause", "message") else f"{name} {value}"
            )
    return ": ".join([parts[0], ", ".join(parts[1:])]) if len(parts) > 1 else parts[0]


def _detail(region: RegionStatus) -> str:
    return (
        f"step {region.step:,}, mean loss {number_text(region.loss)}, "
        f"{number_text(round(region.samples_per_s, 1))} samples/s"
    )


def _curve(
    label: str, curve: BoundedCurve, absent: Sequence[tuple[float, float]] = ()
) -> CurveView:
    """Return a curve without means that span an absence."""
    t_s, value = curve.points()
    here = np.ones(len(t_s), dtype=np.bool_)
    for start_s, end_s in absent:
        here &= (t_s <= start_s) | (t_s >= end_s)
    return CurveView(label, t_s[here], value[here], tuple(end_s for _, end_s in absent))
