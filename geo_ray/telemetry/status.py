"""The status of a run: its record, its computation from events, and its text for people.

`StatusFold` derives the state of the run and of each region, `MembersFold` the members and the
results of membership requests, `RunNow` the current rates of each region.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.base.notebooks import ShownModel
from geo_ray.base.text import (
    bytes_text,
    coarse_text,
    counted,
    duration_text,
    metrics_text,
    number_text,
    printable,
)
from geo_ray.telemetry.events import FAULT_KINDS, REPAIR_KINDS, Event
from geo_ray.telemetry.summary import Target
from geo_ray.telemetry.throughput import Throughput, memory_text, speed_texts
from geo_ray.telemetry.totals import LinkTotals, Rate, RegionTotals, RunTotals

_WITHOUT_STEPS: Final = (
    "done",
    "lost",
    "left",
    "absent",
    "stopped",
    "trains on",  # at an unknown speed
    "joining",
    "did not join",
)

Ended = Literal["finished", "stopped", "failed"]


class RunActorStatus(StrictModel):
    """The current or last run actor of a run."""

    host: str = Field(description="name of its machine")
    pid: int = Field(description="process id there")
    since: str = Field(description="time at which it took the run, by its clock")
    token: int = Field(description="fencing token of its lease; grows with every restart")
    alive: bool | None = Field(description="whether it is running; null if unknown")
    how: str = Field(description="evidence for `alive`, in words")
    doing: str = Field(default="", description="its current or last activity")


class RegionStatus(StrictModel):
    """One region."""

    name: str
    state: str = Field(
        description="lost, left, absent, done, starting, computing, waiting, joining, leaving, "
        "stopped, did not join, or trains on (without a run actor that could observe it)"
    )
    lost_cause: str | None = Field(
        default=None, description="reason of its loss; null for a member"
    )
    step: int = Field(description="newest step")
    steps: int | None = Field(default=None, description="its planned steps, if known")
    exchanges: int = Field(
        description="exchanges with the averager; number of rounds in round-based strategies"
    )
    loss: float | None = Field(description="mean of its newest 20 steps; null before the first")
    samples: int = Field(description="samples of steps that were not repeated")
    samples_per_s: float = Field(description="samples per second over its last 10 s")
    tokens_per_s: float | None = Field(
        default=None, description="tokens per second; null if the task states no tokens_per_row"
    )
    mfu: float | None = Field(
        default=None,
        description="model FLOPs utilization: operations per second for its model, divided by the "
        "peak of its GPUs; null if either is unknown",
    )
    device_bytes: int | None = Field(
        default=None, description="largest memory of a worker on its GPU; null without a GPU"
    )
    device_total_bytes: int | None = Field(default=None, description="memory of that GPU")
    ranks: int | None = Field(
        default=None, description="processes of its process group; null for other regions"
    )
    restarts: int = Field(default=0, description="times that its process group was started again")
    workers_lost: int = Field(description="number of worker deaths; of lost ranks, for a group")

    @property
    def has_speed(self) -> bool:
        """Whether its samples per second are known."""
        return self.state not in _WITHOUT_STEPS

    @property
    def memory(self) -> tuple[int, int] | None:
        """Largest memory of a worker on its GPU, and the memory of the GPU."""
        if self.device_bytes is None or self.device_total_bytes is None:
            return None
        return self.device_bytes, self.device_total_bytes


class CheckpointStatus(StrictModel):
    """The newest checkpoint."""

    id: int
    step: int
    age_s: float | None = Field(description="run time since then; null if unknown")
    bytes: int
    healthy: bool = Field(description="whether a resume can use it")


class TargetStatus(StrictModel):
    """The target value of the training."""

    metric: str
    value: float
    direction: Literal["at_least", "at_most"]
    reached_s: float | None = Field(description="run time when it was first reached; null: not yet")


class SpentStatus(StrictModel):
    """Resources used by the run."""

    seconds: float = Field(description="seconds on the run's clock")
    wan_bytes: int = Field(description="between regions")
    usd: float | None = Field(description="null without a plan to follow, or without prices")


class RunStatus(ShownModel):
    """State of a run."""

    run: str = Field(description="its directory")
    phase: str = Field(description="current phase, or kind of end")
    is_going: bool | None = Field(description="whether the run is active; null if unknown")
    waits_s: float | None = Field(
        default=None,
        description="seconds within which its dead run actor will be restarted; null: no restart",
    )
    strategy: str | None = Field(default=None, description="null before training began")
    averager: str | None = Field(default=None, description="region of the averager")
    address: str | None = Field(
        default=None, description="where the run is served to regions that join; null: it is not"
    )
    server_pid: int | None = Field(
        default=None, description="process id of the averager at that address"
    )
    holders: tuple[str, ...] = Field(
        default=(),
        description="where regions reach the other processes that hold slices of the model",
    )
    standby: str | None = Field(
        default=None,
        description="where a standby of the server would serve it; null: none is ready",
    )
    standby_pid: int | None = Field(default=None, description="process id of the standby")
    wants_standby: bool = Field(
        default=False, description="whether the configuration asks for a standby"
    )
    regions: tuple[RegionStatus, ...] = ()
    refused: str | None = Field(
        default=None, description="the newest requested change of members, if it was refused"
    )
    round: int | None = Field(
        default=None, description="newest round; null if the strategy has no rounds"
    )
    loss: float | None = Field(
        default=None, description="mean of the newest 20 steps over regions, weighted by samples"
    )
    samples_per_s: float = Field(
        default=0.0, description="samples per second of all members, over the last 10 s"
    )
    tokens_per_s: float | None = Field(
        default=None, description="tokens per second of all members; null if unknown"
    )
    mfu: float | None = Field(
        default=None, description="utilisation of the GPUs of all members; null if unknown"
    )
    mfu_is_estimated: bool = Field(
        default=False, description="whether operations are estimated from the parameters"
    )
    left_s: float | None = Field(
        default=None, description="remaining seconds, estimated from the slowest member"
    )
    eval_step: int | None = Field(default=None, description="step of the newest evaluation")
    eval: dict[str, float | None] = Field(default={}, description="its metrics over all regions")
    target: TargetStatus | None = None
    checkpoint: CheckpointStatus | None = None
    spent: SpentStatus
    run_actor: RunActorStatus | None = Field(default=None, description="null for a simulation")
    code: str | None = Field(default=None, description="code of the error that ended the run")
    message: str | None = Field(
        default=None, description="message of that error, or reason of the stop or interruption"
    )
    fix: str | None = Field(default=None, description="remedy")

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        line = f"{self.run}: {self.phase}"
        if self.loss is not None:
            line += f", mean loss {number_text(self.loss)}"
        if self.is_going and self.left_s is not None:
            line += f", about {coarse_text(self.left_s)} left"
        if self.code is not None:
            line += f", {self.code}"
        rows = [
            (
                each.name,
                each.state,
                f"{each.step:,}" + ("" if each.steps is None else f" of {each.steps:,}"),
                number_text(each.loss),
                number_text(each.samples_per_s) if each.has_speed else "-",
            )
            for each in self.regions
        ]
        return line, ("region", "state", "step", "mean loss", "samples/s"), rows


_STATES: Final = {
    "region_lost": "lost",
    "region_drained": "left",
    "region_joining": "joining",
    "region_joined": "member",
    "join_failed": "did not join",
}


@dataclass(slots=True)
class MemberNow:
    """Membership of a region of the configuration.

    Attributes:
        state: ``member``, ``absent`` (not present when the run last began, and not joined since),
            ``joining``, ``leaving``, ``lost``, ``left`` or ``did not join``.
        step: newest step of any region when the state began; None: before the start.
        refused: newest request about it, if it was refused, with the reason.
    """

    state: str = "absent"
    step: int | None = None
    refused: str | None = None


class MembersFold:
    """Folds the events of a run into its members, and results of requests. Pure."""

    def __init__(self) -> None:
        self._regions: dict[str, MemberNow] = {}
        self._step = 0
        self.refused: str | None = None
        """The newest request with its reason, if it was refused."""

    def of(self, region: str) -> MemberNow:
        """Return the membership of a region."""
        return self._regions.setdefault(region, MemberNow())

    def feed(self, event: Event) -> None:
        """Process the next event."""
        match event.kind:
            case "run_started":
                self._begin(frozenset(event["regions"]))
            case "run_finished" | "run_failed":
                self.end()
            case "step":
                self._step = max(self._step, int(event["step"]))
            case "members_accepted":
                self.refused = self.of(event["region"]).refused = None
                if event["verb"] == "drain" and self.of(event["region"]).state == "member":
                    self._set(event["region"], "leaving")
            case "members_refused":
                region = self.of(event["region"])
                self.refused = f"{event['verb']} {event['region']}: {event['cause']}"
                region.refused = self.refused
                if event["verb"] == "drain" and not event.fields.get("request"):
                    self._come_back(event["region"])  # it was accepted but failed
            case kind if kind in _STATES:
                self._set(event["region"], _STATES[kind])

    def end(self) -> None:
        """Cancel pending joins and departures, because the run is no longer active."""
        for name, region in self._regions.items():
            if region.state == "joining":
                self._set(name, "did not join")
            self._come_back(name)

    def _begin(self, there: frozenset[str]) -> None:
        self.end()
        for name in [name for name, each in self._regions.items() if each.state == "member"]:
            if name not in there:
                self._set(name, "absent")
        for name in sorted(there):
            if self.of(name).state != "member":
                self._set(name, "member")

    def _come_back(self, name: str) -> None:
        if self.of(name).state == "leaving":
            self._set(name, "member")

    def _set(self, name: str, state: str) -> None:
        region = self.of(name)
        region.state, region.step = state, self._step


@dataclass(frozen=True, slots=True)
class RegionRates:
    """Rates of one region over the last 10 s of run time."""

    samples: Rate = field(default_factory=Rate)
    compute: Rate = field(default_factory=Rate)
    waiting: Rate = field(default_factory=Rate)
    sent: Rate = field(default_factory=Rate)
    received: Rate = field(default_factory=Rate)

    def start(self, t_s: float) -> None:
        """Reset the rates."""
        for rate in (self.samples, self.compute, self.waiting, self.sent, self.received):
            rate.start(t_s)

    def wait_fraction(self, now_s: float) -> float:
        """Give the fraction of waiting in the last 10 s of compute and wait, 0 to 1."""
        wait, compute = self.waiting.per_s(now_s), self.compute.per_s(now_s)
        return wait / (wait + compute) if wait + compute > 0 else 0.0


@dataclass(slots=True)
class RegionNow:
    """Current numbers of one region.

    Attributes:
        gone: reason why the run continues without it; "" for a member.
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

        For a former member, give the reason.
        """
        if self.step >= total_steps:
            return "done"
        if self.gone:
            return self.gone
        if not self.begun:
            return "starting"
        return "waiting" if self.rates.wait_fraction(now_s) > 0.5 else "computing"


class RunNow:
    """Folds events into the state of the run.

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
                for name, region in self.regions.items():  # a resumed run may lack some regions
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
                src, dst = self.regions.get(event["src"]), self.regions.get(event["dst"])
                if src is not None:  # otherwise it is the server of a run that regions join
                    src.rates.sent.add(event.t_s, sum(new.values()))
                if dst is not None:
                    dst.rates.received.add(event.t_s, sum(new.values()))
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


_NEWEST = 20  # number of steps over which a loss is averaged
_AWAY: Final = ("lost", "left", "absent", "joining", "did not join")


class StatusFold:
    """The part of a status that the events determine.

    Args:
        target: the target metric of the training, if any.
    """

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self._now = RunNow(())
        self.totals = RunTotals()
        self._lost: dict[str, tuple[str, float]] = {}  # region -> cause and time
        self._members = MembersFold()
        self.averager: str | None = None
        self.address: str | None = None  # of the server of a run that regions join
        self.holders: tuple[str, ...] = ()  # addresses of other holders
        self.standby: str | None = None  # of its standby
        self.server_pid: int | None = None
        self.standby_pid: int | None = None
        self.saved_s: dict[object, float] = {}  # checkpoint -> time
        self._reached_s: float | None = None
        self._restarts: dict[str, int] = {}

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self._now.feed(event)
        self.totals.feed(event)
        self._members.feed(event)
        match event.kind:
            case "run_started":
                self._lost = {}
                self.averager = event.fields.get("averager") or None  # "": in no region
                self.address, self.standby = event.fields.get("address"), None
                self.holders = tuple(event.fields.get("holders", ()))
                self.server_pid, self.standby_pid = event.fields.get("pid"), None
            case "server_replaced":
                self.address, self.standby = event["address"], None
                self.server_pid, self.standby_pid = event.fields.get("pid"), None
            case "server_standby_ready":
                self.standby, self.standby_pid = event["address"], event.fields.get("pid")
            case "server_standby_lost":
                self.standby = self.standby_pid = None
            case "averager_moved":
                self.averager = event["region"]
            case "region_lost":
                self._lost[event["region"]] = event["cause"], event.t_s
            case "region_joining":
                self.totals.region(event["region"])
            case "region_started":
                self._restarts[event["region"]] = self._restarts.get(event["region"], 0) + 1
            case "region_joined":
                self.totals.region(event["region"])
                self._lost.pop(event["region"], None)
            case "step" if event.t_s > self._lost.get(event["region"], ("", event.t_s))[1]:
                del self._lost[event["region"]]  # it has rejoined
            case "checkpoint":
                self.saved_s[event["id"]] = event.t_s
            case "eval" if self._target is not None and self._target.reached(event):
                self._reached_s = event.t_s if self._reached_s is None else self._reached_s

    @property
    def refused(self) -> str | None:
        """The newest requested change of members with its reason, if it was refused."""
        return self._members.refused

    @property
    def round(self) -> int | None:
        """The newest round."""
        return self._now.round

    def regions(self, *, is_going: bool, trains_on: bool = False) -> tuple[RegionStatus, ...]:
        """Return all regions that have taken part, in the order of the configuration.

        Args:
            is_going: whether the run is active.
            trains_on: whether training continues although the run has no run actor.
        """
        stands = "trains on" if trains_on else "stopped"
        return tuple(
            self._region(name, totals, None if is_going else stands)
            for name, totals in self.totals.regions.items()
        )

    def target(self) -> TargetStatus | None:
        """The target and whether it is reached."""
        if self._target is None:
            return None
        target = self._target.model_dump(include={"metric", "value", "direction"})
        return TargetStatus(**target, reached_s=self._reached_s)

    def _steps_of(self, name: str) -> int | None:
        """Return the planned steps of a region.

        For a region that joined later: those of the others, if these are equal.
        """
        started = self.totals.started
        configured = {} if started is None else started.fields.get("steps") or {}
        same = set(configured.values())
        return configured.get(name, same.pop() if len(same) == 1 else None)

    def _region(self, name: str, totals: RegionTotals, unseen: str | None) -> RegionStatus:
        """Return the state of one region; ``unseen`` is the state in a run without a run actor."""
        steps = self._steps_of(name)
        now, now_s = self._now.regions.get(name, RegionNow()), self._now.now_s
        state = now.state(now_s, totals.steps.step + 1 if steps is None else steps)
        if state != "done" and unseen is not None:
            state = unseen
        cause, _ = self._lost.get(name, (None, 0.0))
        on_the_way = self._members.of(name).state
        if on_the_way in ("left", "absent"):
            state = on_the_way
        if unseen is None and on_the_way in ("joining", "leaving"):
            state = on_the_way
            cause = None
        elif on_the_way == "did not join" and cause is None and state != "left":
            state = on_the_way
        is_there = unseen is None and cause is None and state not in _AWAY
        loss = totals.steps.end_loss(_NEWEST)
        samples_per_s = now.rates.samples.per_s(now_s) if is_there else 0.0
        throughput = self.totals.throughput
        memory, started = throughput.memory(name), self.totals.started
        ranks = None if started is None else started.fields.get("ranks", {}).get(name)
        return RegionStatus(
            name=name,
            state=state if cause is None else "lost",
            lost_cause=cause,
            step=totals.steps.step,
            steps=steps,
            exchanges=totals.exchanges,
            loss=loss if math.isfinite(loss) else None,
            samples=totals.steps.samples,
            samples_per_s=samples_per_s,
            tokens_per_s=throughput.tokens_per_s(samples_per_s) if is_there else None,
            mfu=throughput.mfu({name: samples_per_s}) if is_there else None,
            device_bytes=None if memory is None else memory[0],
            device_total_bytes=None if memory is None else memory[1],
            ranks=ranks,
            restarts=0 if ranks is None else self._restarts.get(name, 0),
            workers_lost=totals.faults["worker_lost"],
        )


def mean_loss(regions: tuple[RegionStatus, ...]) -> float | None:
    """The mean over members, weighted by the samples of a step; None before the first."""
    known = [
        (region.loss, region.samples / max(1, region.step))
        for region in regions
        if region.loss is not None and region.state not in _AWAY
    ]
    weight = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / weight if weight > 0 else None


def speed_of(
    regions: tuple[RegionStatus, ...], throughput: Throughput
) -> tuple[float | None, float | None]:
    """Return tokens per second and utilisation of the members that are training together."""
    samples_per_s = {each.name: each.samples_per_s for each in regions if each.has_speed}
    if not samples_per_s:
        return None, None
    total = sum(samples_per_s.values())
    return throughput.tokens_per_s(total), throughput.mfu(samples_per_s)


def left_s(regions: tuple[RegionStatus, ...]) -> float | None:
    """Return the seconds until the slowest member has taken its steps; None if unknown."""
    longest = 0.0
    for region in regions:
        if region.state in (*_AWAY, "done") or region.steps is None or region.step >= region.steps:
            continue
        if region.samples_per_s <= 0 or region.samples <= 0:
            return None
        samples = (region.steps - region.step) * region.samples / region.step
        longest = max(longest, samples / region.samples_per_s)
    return longest or None


_LEAST_WIDTH: Final = 40


def status_lines(status: RunStatus, width: int | None = None) -> list[str]:
    """Describe a run in lines; each line except the first begins with its topic.

    Args:
        status: of the run.
        width: columns of the terminal; longer lines are wrapped and indented. None: no limit.
    """
    head = [f"{status.run}: {status.phase}"]
    if status.strategy is not None:
        head.append(status.strategy)
    if status.is_going and status.left_s is not None:
        head.append(f"about {coarse_text(status.left_s)} left")
    rows = [("", ", ".join(head))]
    rows += [] if status.message is None else [("cause", _one_line(status.message))]
    rows += [] if status.fix is None else [("fix", _one_line(status.fix))]
    rows.append(("run actor", _run_actor(status)))
    if status.address is not None and status.is_going is not False:
        standby = ", no standby at present" if status.wants_standby else ""
        if status.standby is not None:
            standby = f", standby at {status.standby}{_process(status.standby_pid)}"
        served = f"{status.address}{_process(status.server_pid)}{standby}"
        rows.append(("served at", served))
        rows += [("holders", ", ".join(status.holders))] if status.holders else []
    members = [region for region in status.regions if region.lost_cause is None]
    rows += [
        ("member" if number == 0 else "", _region(each)) for number, each in enumerate(members)
    ]
    rows += [
        ("lost", f"{each.name} after step {each.step:,}: {_one_line(each.lost_cause)}")
        for each in status.regions
        if each.lost_cause is not None
    ]
    rows += [] if status.refused is None else [("refused", _one_line(status.refused))]
    rows += [("training", _training(status))] if status.regions else []
    rows += [("saved", _saved(status))] if status.regions else []
    rows.append(("spent", _spent(status)))
    wide = max(len(name) for name, _ in rows)
    lines = _wrapped("", rows[0][1], width)
    for name, text in rows[1:]:
        lines += _wrapped(f"  {name:<{wide}}  ", text, width)
    return lines


def _wrapped(head: str, text: str, width: int | None) -> list[str]:
    line = printable(head + text)
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        printable(text),
        max(width, _LEAST_WIDTH),
        initial_indent=head,
        subsequent_indent=" " * (len(head) or 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _run_actor(status: RunStatus) -> str:
    run_actor = status.run_actor
    if run_actor is None:
        return "none recorded: the run is starting, or is a simulation"
    return (
        f"host {run_actor.host}, process {run_actor.pid}, since {run_actor.since}: {run_actor.how}"
    )


def _region(region: RegionStatus) -> str:
    steps = f"step {region.step:,}"
    if region.steps is not None:
        steps += f" of {region.steps:,}"
    ranks = [] if region.ranks is None else [counted(region.ranks, "rank")]
    loss = f"mean loss {number_text(region.loss)}"
    parts = [*ranks, steps, counted(region.exchanges, "exchange"), loss]
    if region.has_speed:
        parts.append(f"{number_text(region.samples_per_s)} samples/s")
        parts += speed_texts(region.tokens_per_s, region.mfu)
    if region.memory is not None:
        parts.append(f"GPU memory {memory_text(region.memory)}")
    if region.workers_lost:
        what = "worker" if region.ranks is None else "rank"
        parts.append(f"{counted(region.workers_lost, what)} lost")
    if region.restarts:
        parts.append(counted(region.restarts, "restart"))
    return f"{region.name}: {', '.join(parts)}, {region.state}"


def _training(status: RunStatus) -> str:
    parts = [f"mean loss {number_text(status.loss)} of the newest {_NEWEST} steps"]
    if status.is_going is not False and any(region.has_speed for region in status.regions):
        parts.append(f"{number_text(status.samples_per_s)} samples/s")
        parts += speed_texts(status.tokens_per_s, status.mfu, estimated=status.mfu_is_estimated)
    if status.round is not None:
        parts.append(f"round {status.round:,}")
    if len(status.regions) > 1 and status.averager is not None:
        parts.append(f"averager in {status.averager}")
    if status.eval_step is not None:
        parts.append(f"at step {status.eval_step:,} {metrics_text(status.eval)}")
    target = status.target
    if target is not None:
        bound = "at least" if target.direction == "at_least" else "at most"
        reached = (
            "not reached"
            if target.reached_s is None
            else f"reached after {duration_text(target.reached_s)}"
        )
        parts.append(f"target {target.metric} {bound} {number_text(target.value)}: {reached}")
    return ", ".join(parts)


def _saved(status: RunStatus) -> str:
    found = status.checkpoint
    if found is None:
        return "no checkpoint" if status.is_going is False else "no checkpoint yet"
    # Ages count from the last event, so they are meaningless after the end of the run.
    age = ""
    if found.age_s is not None and status.is_going is not False:
        age = f", {coarse_text(found.age_s)} ago"
    unhealthy = "" if found.healthy else ", taken while the run was diverging"
    return (
        f"checkpoint {found.id} at step {found.step:,}{age}, {bytes_text(found.bytes)}{unhealthy}"
    )


def _spent(status: RunStatus) -> str:
    spent = status.spent
    parts = [duration_text(spent.seconds), f"{bytes_text(spent.wan_bytes)} between regions"]
    if spent.usd is not None:
        parts.append(f"{number_text(spent.usd)} USD")
    return ", ".join(parts)


def _process(pid: int | None) -> str:
    return f" (process {pid})" if pid else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
