"""What a run amounts to so far: a pure fold over its events, shared by summary, end table, page."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.observe.events.schema import FAULT_KINDS, REPAIR_KINDS, Event
from geo_ray.observe.metrics.counters import LinkTotals, StepTotals


@dataclass(slots=True)
class RegionTotals:
    """One region's part of a run."""

    steps: StepTotals = field(default_factory=StepTotals)
    compute_s: float = 0.0  # time that was spent, work that was lost included
    wait_s: float = (
        0.0  # the end included, where it stood still for an exchange after its last step
    )
    blocked_s: float = 0.0  # in exchanges that it stood still for
    exchanges: int = 0
    staleness: float = 0.0  # of the newest exchange
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULT_KINDS, 0))
    _until_s: float = 0.0  # the newest step's end, and what it has waited for since
    _since_s: float = 0.0

    @property
    def fault_count(self) -> int:
        """The number of faults; the repair of a fault is no further one."""
        return sum(count for kind, count in self.faults.items() if kind not in REPAIR_KINDS)

    def begin(self) -> None:
        """Take in that the run goes on: a step's waiting reaches back to here at most."""
        self._since_s = 0.0

    def step(self, event: Event) -> None:
        """Take a step in, whose own waiting has all that was since the step before."""
        self.steps.add(event["step"], event["samples"], event.number("loss"))
        self.compute_s += event["compute_s"] or 0.0
        self.wait_s += max(0.0, (event["wait_s"] or 0.0) - self._since_s)
        self._until_s, self._since_s = event.t_s, 0.0

    def stood_still(self, start_s: float, end_s: float) -> None:
        """Take in that it stood still for an exchange."""
        self.blocked_s += max(0.0, end_s - start_s)
        waited_s = max(0.0, end_s - max(start_s, self._until_s))
        self.wait_s += waited_s
        self._since_s += waited_s
        self._until_s = max(self._until_s, end_s)


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
    _goes_on: bool = False  # resumed, and no exchange since

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
                region.step(event)
            case "exchange":
                region = self.region(event["region"])
                region.exchanges += 1
                if event["blocking"] and event["start_s"] is not None:
                    region.stood_still(event["start_s"], event.t_s)
                region.staleness = event["staleness"] or 0.0
                sent = event["bytes_out"] + event["bytes_in"]
                before = event.fields.get("bytes_before")
                if event["region"] != self._home:  # what the averager's region says stays there
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

    def forget(self, keep: int) -> None:
        """Drop what is remembered of single steps and rounds, but for the newest.

        For who follows a run without an end. Sums stay as they are; only a resumption from more
        than ``keep`` steps ago would count some twice.
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
        """Forget the rounds that a resumption makes anew, once its first one is known."""
        if self._goes_on:
            self.rounds = {number for number in self.rounds if number < first}
            self._goes_on = False

    def _start(self, event: Event) -> None:
        self.started, self.stop_cause = event, None
        self.best = None  # a resumption says what is kept
        self.finished = self.failed = None
        self._began_s, self._home = event.t_s, event.fields.get("averager")
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
