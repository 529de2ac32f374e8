"""The values that the pages draw. Plain and complete: who draws asks nobody anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.observe.metrics.cost import Cost
from geo_ray.observe.picture.bounded_curve import Floats
from geo_ray.observe.report.presence import Band
from geo_ray.observe.status.record import RunStatus


@dataclass(frozen=True, slots=True)
class MapRegion:
    """A region on the map.

    Attributes:
        name: of the region.
        state: as in `RegionStatus`; ``member`` where no more is known.
        is_home: whether the averager lives there.
        told: more about it, in words.
    """

    name: str
    state: str
    is_home: bool = False
    told: str = ""


@dataclass(frozen=True, slots=True)
class MapLink:
    """One direction of a link that has carried something.

    Attributes:
        src: region that sends.
        dst: region that receives.
        mbps: its load now, or in the mean of the run, in megabits per second.
        bytes: that it has carried.
        limit_mbps: what it can carry, if that is known.
    """

    src: str
    dst: str
    mbps: float
    bytes: int
    limit_mbps: float | None = None

    @property
    def share(self) -> float | None:
        """Its load as a part of what it can carry; None where that is not known."""
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
    """A machine, or several that are alike.

    Attributes:
        region: of the run.
        machine: the cloud's name of it, or how many of them.
        type: the cloud's name of its type, and the market.
        state: in a word.
        usd_per_hour: of all that the row stands for; None: not known.
        age_s: since when it is paid; None: not known.
        note: why it is there, or that it goes.
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
        source: whose word it is: ``autoscaler`` or ``plan``.
        rows: by region.
        paid_usd: what machines have cost so far, by the autoscaler's books; None: it has none.
    """

    source: str
    rows: tuple[MachineRow, ...]
    paid_usd: float | None = None

    @property
    def usd_per_hour(self) -> float:
        """What all of them cost, as far as that is known."""
        return sum(row.usd_per_hour or 0.0 for row in self.rows)


@dataclass(frozen=True, slots=True)
class CurveView:
    """One line of a chart over the time of the run.

    Attributes:
        label: of the line.
        t_s: seconds of the run, rising, float64 (N,).
        value: float64 (N,).
        breaks_s: when a new line begins, because the region was absent until then.
    """

    label: str
    t_s: Floats
    value: Floats
    breaks_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MembersView:
    """Who took part when.

    Attributes:
        bands: by region and worker.
        marks: what happened at a moment: seconds, and words.
        end_s: until when that is known.
    """

    bands: dict[str, list[Band]]
    marks: tuple[tuple[float, str], ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class HistoryView:
    """Everything over time.

    Attributes:
        losses: of all regions together first, then by region.
        evals: by metric, over all regions.
        exchanges: seconds of an exchange, from sending to merging.
        usd: spent so far; None: the run follows no plan, or prices are missing.
        members: who took part when.
        notes: the newest of what a person should know: seconds, and words.
    """

    losses: tuple[CurveView, ...]
    evals: tuple[CurveView, ...]
    exchanges: CurveView
    usd: CurveView | None
    members: MembersView
    notes: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class PlannedTotals:
    """What a plan says of a whole run.

    Attributes:
        seconds: it takes.
        usd: it costs.
    """

    seconds: float
    usd: float


@dataclass(frozen=True, slots=True)
class RunView:
    """All that is shown of a run.

    Attributes:
        status: how it stands.
        map: its regions and links.
        history: everything over time.
        machines: None where nothing is known of them.
        cost: the plan's terms and the run's; None: it follows no plan.
        planned: the plan's totals; None: it follows no plan.
        problems: what could not be read, in words.
    """

    status: RunStatus
    map: MapView
    history: HistoryView
    machines: MachinesView | None = None
    cost: Cost | None = None
    planned: PlannedTotals | None = None
    problems: tuple[str, ...] = field(default=())
