"""What a run amounts to so far: a pure fold over its events, shared by summary, end table, page."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.observe.events.schema import FAULT_KINDS, Event
from geo_ray.observe.metrics.counters import LinkTotals, StepTotals


@dataclass(slots=True)
class RegionTotals:
    """One region's part of a run."""

    steps: StepTotals = field(default_factory=StepTotals)
    compute_s: float = 0.0  # time that was spent, work that was lost included
    wait_s: float = 0.0
    blocked_s: float = 0.0  # in exchanges that it stood still for
    exchanges: int = 0
    staleness: float = 0.0  # of the newest exchange
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULT_KINDS, 0))


@dataclass(slots=True)
class RunTotals:
    """Everything that `Summary` says about a run, and per region.

    Feed it the events in order; a second `run_started` is a resumption.
    """

    started: Event | None = None
    startup_s: float | None = None  # of all stretches; None if nothing was started
    joined_s: float = 0.0  # from the start of the clock to the first step, of all stretches
    finished: Event | None = None
    failed: Event | None = None
    regions: dict[str, RegionTotals] = field(default_factory=dict)
    wan: LinkTotals = field(default_factory=LinkTotals)
    rounds: set[int] = field(default_factory=set)
    payload_before: int = 0  # bytes of payloads between regions, as vectors
    payload_after: int = 0  # the same as they were sent
    newest_eval: Event | None = None  # combined over regions
    best: Event | None = None  # newest `best_kept` of this configuration
    noise: dict[str | None, Event] = field(default_factory=dict)  # newest by region; None: all
    stop_cause: str | None = None
    elapsed_s: float = 0.0
    _home: str | None = None  # the averager's region
    _began_s: float | None = None  # of a stretch that has no step yet

    def region(self, name: str) -> RegionTotals:
        """Give the totals of region ``name``, new ones if it is not known."""
        return self.regions.setdefault(name, RegionTotals())

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self.elapsed_s = max(self.elapsed_s, event.t_s)
        match event.kind:
            case "run_started":
                self._start(event)
            case "step":
                region = self.region(event["region"])
                self._join(event)
                region.steps.add(event["step"], event["samples"], event.number("loss"))
                region.compute_s += event["compute_s"] or 0.0
                region.wait_s += event["wait_s"] or 0.0
            case "exchange":
                region = self.region(event["region"])
                region.exchanges += 1
                if event["blocking"] and event["start_s"] is not None:
                    region.blocked_s += max(0.0, event.t_s - event["start_s"])
                region.staleness = event["staleness"] or 0.0
                sent = event["bytes_out"] + event["bytes_in"]
                before = event.fields.get("bytes_before")
                if event["region"] != self._home:  # what the averager's region says stays there
                    self.payload_after += sent
                    self.payload_before += sent if before is None else 2 * before
                if event["round"] is not None:
                    self.rounds.add(event["round"])
            case "eval" if event["region"] is None:
                self.newest_eval = event
            case "best_kept":
                self.best = event
            case "noise":
                self.noise[event["region"]] = event
            case "wan":
                self.wan.feed(event["src"], event["dst"], event["bytes_by_class"])
            case "hub_moved":
                self._home = event["region"]
            case "stop_requested":
                self.stop_cause = event["cause"]
            case "run_finished":
                self.finished = event
            case "run_failed":
                self.finished, self.failed = None, event
            case kind if kind in FAULT_KINDS:
                self.region(event["region"]).faults[kind] += 1

    def _join(self, step: Event) -> None:
        if self._began_s is not None and step["start_s"] is not None:
            self.joined_s += max(0.0, step["start_s"] - self._began_s)
            self._began_s = None

    def _start(self, event: Event) -> None:
        self.started, self.stop_cause = event, None
        self.best = None  # a resumption says what is kept
        self.finished = self.failed = None
        self._began_s, self._home = event.t_s, event.fields.get("averager")
        self.wan.restart()
        startup_s = event.fields.get("startup_s")
        if startup_s is not None:
            self.startup_s = (self.startup_s or 0.0) + startup_s
        for name in event["regions"]:
            self.region(name)

    @property
    def codec(self) -> dict[str, str]:
        """The codecs by direction, ``up`` and ``down``; without those that are none."""
        told = {} if self.started is None else self.started.fields.get("codec") or {}
        return {direction: kind for direction, kind in told.items() if kind is not None}

    @property
    def steps(self) -> int:
        """The highest step that any region has applied."""
        return max((region.steps.step for region in self.regions.values()), default=0)

    @property
    def samples(self) -> int:
        """Samples whose steps stand, over all regions."""
        return sum(region.steps.samples for region in self.regions.values())

    @property
    def faults(self) -> dict[str, int]:
        """How often each kind of fault happened."""
        return {
            kind: sum(region.faults[kind] for region in self.regions.values())
            for kind in FAULT_KINDS
        }
