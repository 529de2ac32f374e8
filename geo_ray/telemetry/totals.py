"""Running totals over the events of a run. Pure.

Bytes between regions, steps and rates over a window (`LinkTotals`, `StepTotals`, `Rate`), bytes
sent until a given time (`SentUntil`), the newest gradient noise, and `RunTotals`, which
the summary, the final table and the live page use.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from geo_ray.telemetry.events import FAULT_KINDS, REPAIR_KINDS, Event
from geo_ray.telemetry.throughput import Throughput

Link = tuple[str, str]  # (source region, destination region)


class LinkTotals:
    """WAN bytes per link and class, from the cumulative numbers of `wan` events.

    The counters restart at zero when a run is resumed (`restart`). Within one run segment only
    increases above the highest value count, so both ends may report a link. Bytes of a region to
    itself stay inside the region and are not counted.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[Link, str], int] = defaultdict(int)
        self._now: dict[tuple[Link, str], int] = defaultdict(int)

    def restart(self) -> None:
        """Begin a new run segment: the next counters start at zero and add to the totals."""
        for key, count in self._now.items():
            self._before[key] += count
        self._now.clear()

    def feed(self, src: str, dst: str, bytes_by_class: Mapping[str, int]) -> dict[str, int]:
        """Process one `wan` event; give the new bytes per class."""
        if src == dst:
            return {}
        new: dict[str, int] = {}
        for name, count in bytes_by_class.items():
            key = ((src, dst), name)
            new[name] = max(0, count - self._now[key])
            self._now[key] += new[name]
        return new

    def links(self) -> dict[tuple[Link, str], int]:
        """Give all bytes so far by (link, class)."""
        return {
            key: self._before.get(key, 0) + self._now.get(key, 0)
            for key in sorted(self._before.keys() | self._now.keys())
        }

    def by_class(self) -> dict[str, int]:
        """Give all bytes so far by class."""
        total: dict[str, int] = defaultdict(int)
        for (_, name), count in self.links().items():
            total[name] += count
        return dict(total)

    def by_link(self) -> dict[Link, int]:
        """Give all bytes so far by (source, destination)."""
        total: dict[Link, int] = defaultdict(int)
        for (link, _), count in self.links().items():
            total[link] += count
        return dict(total)

    def bytes_sent(self, region: str) -> int:
        """Give what ``region`` sent to other regions, in bytes."""
        return sum(count for ((src, _), _), count in self.links().items() if src == region)

    def bytes_received(self, region: str) -> int:
        """Give what ``region`` received from other regions, in bytes."""
        return sum(count for ((_, dst), _), count in self.links().items() if dst == region)


class Rate:
    """Amount per second over the last ``window_s`` seconds of event time.

    Args:
        window_s: length of the window in seconds.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()  # (t_s, amount)
        self._sum = 0.0
        self._first_s: float | None = None

    def start(self, t_s: float) -> None:
        """Start the window at ``t_s`` if it is empty."""
        if self._first_s is None:
            self._first_s = t_s

    def add(self, t_s: float, amount: float) -> None:
        """Count ``amount`` at ``t_s`` seconds."""
        self.start(t_s)
        self._points.append((t_s, amount))
        self._sum += amount

    def per_s(self, now_s: float) -> float:
        """Give the amount per second at ``now_s``; 0 before any time has passed."""
        while self._points and self._points[0][0] <= now_s - self._window_s:
            self._sum -= self._points.popleft()[1]
        if self._first_s is None or not self._points:
            self._sum = 0.0
            return 0.0
        elapsed_s = min(self._window_s, now_s - self._first_s)
        return self._sum / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(slots=True)
class StepTotals:
    """Applied steps of one region; steps repeated by a resumed run replace the old ones."""

    rows: list[tuple[int, int, float]] = field(default_factory=list)  # (step, samples, loss)
    samples: int = 0

    def add(self, step: int, samples: int, loss: float) -> None:
        """Count one step, and remove steps counted at or after it."""
        while self.rows and self.rows[-1][0] >= step:
            self.samples -= self.rows.pop()[1]
        self.rows.append((step, samples, loss))
        self.samples += samples

    def forget(self, keep: int) -> None:
        """Drop all rows but the newest; earlier steps that a resume repeats then count twice."""
        del self.rows[: max(0, len(self.rows) - keep)]

    @property
    def step(self) -> int:
        """The newest step, 0 if there is none."""
        return self.rows[-1][0] if self.rows else 0

    def end_loss(self, last: int = 20) -> float:
        """Give the sample-weighted mean loss of the ``last`` steps; NaN if none is finite."""
        tail = [row for row in self.rows[-last:] if math.isfinite(row[2])]
        weight = sum(max(1, samples) for _, samples, _ in tail)
        if not tail:
            return math.nan
        return sum(max(1, samples) * loss for _, samples, loss in tail) / weight


def _no_faults() -> dict[str, int]:
    return dict.fromkeys(FAULT_KINDS, 0)


@dataclass(slots=True)
class RegionTotals:
    """One region's part of a run."""

    steps: StepTotals = field(default_factory=StepTotals)
    compute_s: float = 0.0  # including lost work
    wait_s: float = 0.0  # including the blocking exchange after its last step
    blocked_s: float = 0.0  # in blocking exchanges
    exchanges: int = 0
    staleness: float = 0.0  # of the newest exchange
    faults: dict[str, int] = field(default_factory=_no_faults)
    _until_s: float = 0.0  # end of the newest step, and waiting since then
    _since_s: float = 0.0

    @property
    def fault_count(self) -> int:
        """Number of faults; repairs are not counted."""
        return sum(count for kind, count in self.faults.items() if kind not in REPAIR_KINDS)

    def begin(self) -> None:
        """Note that the run continues: the waiting of a step starts here at the earliest."""
        self._since_s = 0.0

    def step(self, event: Event) -> None:
        """Count a step, whose waiting covers the time since the previous step."""
        self.steps.add(event["step"], event["samples"], event.number("loss"))
        self.compute_s += event["compute_s"] or 0.0
        self.wait_s += max(0.0, (event["wait_s"] or 0.0) - self._since_s)
        self._until_s, self._since_s = event.t_s, 0.0

    def stood_still(self, start_s: float, end_s: float) -> None:
        """Count a blocking exchange."""
        self.blocked_s += max(0.0, end_s - start_s)
        waited_s = max(0.0, end_s - max(start_s, self._until_s))
        self.wait_s += waited_s
        self._since_s += waited_s
        self._until_s = max(self._until_s, end_s)


@dataclass(slots=True)
class RunTotals:
    """Totals of a run and of each region, as used by `Summary`.

    Feed the events in order; a second `run_started` is a resume.
    """

    started: Event | None = None
    startup_s: float | None = None  # over all run segments; None if the run did not start
    joined_s: float = 0.0  # from the start of the clock to the first step, over all run segments
    finished: Event | None = None
    failed: Event | None = None
    regions: dict[str, RegionTotals] = field(default_factory=dict)
    wan: LinkTotals = field(default_factory=LinkTotals)
    rounds: set[int] = field(default_factory=set)
    payload_before: int = 0  # bytes of payloads between regions, before coding
    payload_after: int = 0  # bytes of payloads between regions, as sent
    newest_eval: Event | None = None  # combined over regions
    best: Event | None = None  # newest `best_kept` of this configuration
    noise: dict[str | None, Event] = field(default_factory=dict)  # newest by region; None: all
    throughput: Throughput = field(default_factory=Throughput)
    stop_cause: str | None = None
    stop_reason: Literal["target", "patience"] | None = None
    elapsed_s: float = 0.0
    _leader: str | None = None  # the averager's region
    _began_s: float | None = None  # of a run segment without a step yet
    _goes_on: bool = False  # resumed, without an exchange since

    def region(self, name: str) -> RegionTotals:
        """Give the totals of region ``name``; created if unknown."""
        return self.regions.setdefault(name, RegionTotals())

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self.elapsed_s = max(self.elapsed_s, event.t_s)
        self.throughput.feed(event)
        match event.kind:
            case "run_started":
                self._start(event)
            case "step":
                region = self.region(event["region"])
                self._join(event)
                region.step(event)
            case "exchange":
                region = self.region(event["region"])
                region.exchanges += 1
                if event["blocking"] and event["start_s"] is not None:
                    region.stood_still(event["start_s"], event.t_s)
                region.staleness = event["staleness"] or 0.0
                sent = event["bytes_sent"] + event["bytes_received"]
                before = event.fields.get("bytes_before")
                if (
                    event["region"] != self._leader
                ):  # exchanges of the averager's region stay inside it
                    self.payload_after += sent
                    self.payload_before += sent if before is None else 2 * before
                if event["round"] is not None:
                    self._take_back(event["round"])
                    self.rounds.add(event["round"])
            case "eval" if event["region"] is None:
                self.newest_eval = event
            case "best_kept":
                self.best = event
            case "noise":
                self.noise[event["region"]] = event
            case "wan":
                self.wan.feed(event["src"], event["dst"], event["bytes_by_class"])
            case "averager_moved":
                self._leader = event["region"]
            case "stop_requested":
                self.stop_cause = event["cause"]
                self.stop_reason = event.fields.get("reason")
            case "run_finished":
                self.finished = event
            case "run_failed":
                self.finished, self.failed = None, event
            case kind if kind in FAULT_KINDS:
                self.region(event["region"]).faults[kind] += 1

    def forget(self, keep: int) -> None:
        """Drop data about single steps and rounds, except the newest.

        For following a run without an end. Sums do not change; only a resume from more than
        ``keep`` steps ago would count some steps twice.
        """
        for region in self.regions.values():
            region.steps.forget(keep)
        if len(self.rounds) > keep:
            self.rounds = set(sorted(self.rounds)[-keep:])

    def _join(self, step: Event) -> None:
        if self._began_s is not None and step["start_s"] is not None:
            self.joined_s += max(0.0, step["start_s"] - self._began_s)
            self._began_s = None

    def _take_back(self, first: int) -> None:
        """Drop the rounds that a resume repeats, once its first round is known."""
        if self._goes_on:
            self.rounds = {number for number in self.rounds if number < first}
            self._goes_on = False

    def _start(self, event: Event) -> None:
        self.started, self.stop_cause, self.stop_reason = event, None, None
        self.best = None  # a resume reports the saved best model
        self.finished = self.failed = None
        self._began_s, self._leader = event.t_s, event.fields.get("averager")
        self._goes_on = bool(self.rounds)
        self.wan.restart()
        startup_s = event.fields.get("startup_s")
        if startup_s is not None:
            self.startup_s = (self.startup_s or 0.0) + startup_s
        for region in self.regions.values():
            region.begin()
        for name in event["regions"]:
            self.region(name)

    @property
    def codec(self) -> dict[str, str]:
        """Codecs by direction, ``up`` and ``down``; directions without a codec are omitted."""
        codecs = {} if self.started is None else self.started.fields.get("codec") or {}
        return {direction: kind for direction, kind in codecs.items() if kind is not None}

    @property
    def steps(self) -> int:
        """The highest step that any region has applied."""
        return max((region.steps.step for region in self.regions.values()), default=0)

    @property
    def samples(self) -> int:
        """Samples over all regions, without repeated steps."""
        return sum(region.steps.samples for region in self.regions.values())

    @property
    def faults(self) -> dict[str, int]:
        """Number of faults by kind."""
        return {
            kind: sum(region.faults[kind] for region in self.regions.values())
            for kind in FAULT_KINDS
        }


class SentUntil:
    """Bytes on the wire by (source, destination) until a given time.

    Between two events of a pair, bytes are interpolated linearly. The simulator writes its events
    with every evaluation, so the numbers are exact at those times.

    Args:
        until_s: seconds since the start of the run; infinity for the whole run.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._books = LinkTotals()
        self._total: dict[Link, int] = defaultdict(int)
        self._before: dict[Link, tuple[float, int]] = {}
        self._after: dict[Link, tuple[float, int]] = {}

    def feed(self, event: Event) -> None:
        """Take the next event."""
        if event.kind == "run_started":
            self._books.restart()
        if event.kind != "wan":
            return
        link = (event["src"], event["dst"])
        self._total[link] += sum(self._books.feed(*link, event["bytes_by_class"]).values())
        now = (event.t_s, self._total[link])
        if event.t_s <= self._until_s:
            self._before[link] = now
        else:
            self._after.setdefault(link, now)

    def by_link(self) -> dict[Link, float]:
        """Give the bytes by (source, destination), for pairs with traffic until then."""
        found = {link: self._at(link) for link in self._total}
        return {link: count for link, count in found.items() if count}

    def _at(self, link: Link) -> float:
        t0_s, low = self._before.get(link, (0.0, 0))
        if link not in self._after:
            return float(low)
        t1_s, high = self._after[link]
        return low + (high - low) * (self._until_s - t0_s) / (t1_s - t0_s)


def newest_noise(events: Mapping[str | None, Event]) -> dict[str, float | None] | None:
    """|G|^2, tr(Sigma) and B_simple; None if not measured.

    Combined over all regions if that was measured, otherwise the mean of the regions' own
    measurements, weighted by the rows of a step; both values are averaged before the division.

    Args:
        events: newest measurement by region; None is the combination of all regions.
    """
    chosen = [events[None]] if None in events else list(events.values())
    rows = sum(event["rows"] for event in chosen)
    if not rows:
        return None
    grad_sq, trace = (
        sum(event["rows"] * event.number(name) for event in chosen) / rows
        for name in ("grad_sq", "trace")
    )
    b_simple = max(0.0, trace) / grad_sq if grad_sq > 0 else None
    return {"grad_sq": grad_sq, "trace": trace, "b_simple": b_simple}
