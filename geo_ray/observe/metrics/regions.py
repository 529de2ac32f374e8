"""How each region of a running job stands at this moment, as `Progress` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.observe.events.schema import FAULT_KINDS, REPAIR_KINDS, Event
from geo_ray.observe.metrics.counters import LinkTotals, Rate


@dataclass(frozen=True, slots=True)
class RegionRates:
    """RegionRates of one region; they look back over 10 s of run time."""

    samples: Rate = field(default_factory=Rate)
    compute: Rate = field(default_factory=Rate)
    waiting: Rate = field(default_factory=Rate)
    sent: Rate = field(default_factory=Rate)
    received: Rate = field(default_factory=Rate)

    def start(self, t_s: float) -> None:
        """Forget what was before."""
        for rate in (self.samples, self.compute, self.waiting, self.sent, self.received):
            rate.start(t_s)

    def wait_share(self, now_s: float) -> float:
        """Give the part of the last 10 s of compute and wait that was wait, 0 to 1."""
        wait, compute = self.waiting.per_s(now_s), self.compute.per_s(now_s)
        return wait / (wait + compute) if wait + compute > 0 else 0.0


@dataclass(slots=True)
class RegionNow:
    """The newest numbers of one region.

    Attributes:
        gone: why the run goes on without it, in a word; "" while it takes part.
        begun: whether it has made a step since the run was started or resumed.
    """

    step: int = 0
    begun: bool = False
    loss: float = float("nan")
    staleness: float | None = None
    faults: int = 0
    gone: str = ""
    rates: RegionRates = field(default_factory=RegionRates)

    def start(self, now_s: float, step: object) -> None:
        """Note that the run was started, or resumed from a checkpoint at ``step``."""
        self.begun = False
        self.step = step if isinstance(step, int) else self.step
        self.rates.start(now_s)

    def state(self, now_s: float, total_steps: int) -> str:
        """Give ``starting``, ``computing``, ``waiting`` (more wait than compute) or ``done``.

        Of a region that takes part no more, why.
        """
        if self.step >= total_steps:
            return "done"
        if self.gone:
            return self.gone
        if not self.begun:
            return "starting"
        return "waiting" if self.rates.wait_share(now_s) > 0.5 else "computing"


class RunNow:
    """Folds events into how the run stands.

    Args:
        regions: names, in the order to show.
    """

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.regions = {name: RegionNow() for name in regions}
        self.simulated = False
        self.round: int | None = None
        self.newest_eval: Event | None = None
        self.now_s = 0.0
        self._wan = LinkTotals()

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self.now_s = max(self.now_s, event.t_s)
        match event.kind:
            case "run_started":
                self.simulated = event["simulated"]
                self._wan.restart()
                for name in event["regions"]:
                    self._region(name).start(event.t_s, event.fields.get("resumed_step"))
                for name, region in self.regions.items():  # a resumed run may be without some
                    region.gone = "" if name in event["regions"] else region.gone or "absent"
            case "step":
                self._step(self._region(event["region"]), event)
            case "exchange":
                self._region(event["region"]).staleness = event["staleness"]
                if event["round"] is not None:
                    self.round = max(self.round or 0, event["round"])
            case "eval" if event["region"] is None:
                self.newest_eval = event
            case "wan":
                new = self._wan.feed(event["src"], event["dst"], event["bytes_by_class"])
                self._region(event["src"]).rates.sent.add(event.t_s, sum(new.values()))
                self._region(event["dst"]).rates.received.add(event.t_s, sum(new.values()))
            case "region_drained":
                self._region(event["region"]).gone = "drained"
            case "region_joined":
                self._region(event["region"]).gone = ""
            case kind if kind in FAULT_KINDS:
                self._region(event["region"]).faults += kind not in REPAIR_KINDS
                if kind == "region_lost":
                    self._region(event["region"]).gone = "lost"

    def _region(self, name: str) -> RegionNow:
        return self.regions.setdefault(name, RegionNow())

    @staticmethod
    def _step(region: RegionNow, event: Event) -> None:
        region.step, region.begun = event["step"], True
        region.loss = event.number("loss")
        region.rates.samples.add(event.t_s, event["samples"])
        region.rates.compute.add(event.t_s, event["compute_s"] or 0.0)
        region.rates.waiting.add(event.t_s, event["wait_s"] or 0.0)
