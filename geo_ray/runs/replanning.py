"""Decides whether another plan is better for the rest of a run, with hysteresis.

This module only advises: `cloud/autoscaler/policy.py` enforces the budget. Running machines are
distinguished from machines to rent. A decision may cover only some of the run's regions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from geo_ray.base.errors import PlanError, PlanInfeasibleError
from geo_ray.base.text import age_text, duration_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.config import Objective
from geo_ray.planner.exchange import NO_LIMITS, Limits
from geo_ray.planner.plan import Plan, RegionPlan
from geo_ray.planner.policies import Kind, fixed, optimal
from geo_ray.planner.request import Rental, Request, Site
from geo_ray.planner.timing import HOUR_S, JobWork
from geo_ray.runs import directory, planning
from geo_ray.runs.build import wire_plan
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.plan_inputs import evaluations_s
from geo_ray.runs.planning import Inputs, Sources, inputs_of
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.totals import RunTotals
from geo_ray.transport.links import LinkRecord, load_links

LEAST_GAIN: Final = 0.05
_EXCHANGES: Final = 32  # newest ones of a region, from which its goodput is estimated


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a new plan.

    Attributes:
        plan: the plan to follow from now on.
        changed: whether it is the new plan.
        gain: fraction of the rest that the new plan saves, after the cost of the change.
        reason: explanation with the numbers.
    """

    plan: Plan
    changed: bool
    gain: float
    reason: str


def replan(
    present: Plan, new: Plan | None, objective: Objective = "cost", limits: Limits = NO_LIMITS
) -> Decision:
    """Keep the present plan or switch to the new one.

    Args:
        present: the present plan for the rest of the job, with current measurements.
        new: the best plan for the rest, including its start, during which nothing is computed and
            its machines, servers and disks are paid; None if no plan meets the limits.
        objective: objective of the plan.
        limits: limits of the rest; at least one of the two plans meets them.
    """
    if new is None:
        return Decision(present, False, 0.0, "stays: no other plan meets deadline and budget")
    before, after, unit = present.total_usd, new.total_usd, "USD"
    if objective == "time":
        before, after, unit = present.total_s, new.total_s, "s"
    gain = 1 - after / before
    numbers = f"{before:.4g} {unit} without the change, {after:.4g} {unit} with it"
    if not limits.keeps(present.total_s, present.total_usd):
        over = f"{duration_text(present.total_s)} and {present.total_usd:.4g} USD"
        return Decision(
            new, True, gain, f"changes: without the change, {over} exceed the limits; {numbers}"
        )
    if gain < LEAST_GAIN:
        return Decision(present, False, gain, f"stays: {numbers}; {LEAST_GAIN:.0%} is required")
    return Decision(new, True, gain, f"changes: {numbers}, {gain:.0%} less")


def with_running(site: Site, present: RegionPlan, run_h: float) -> Site:
    """Return the machines that a region could keep and rent; kept ones come first.

    Args:
        site: the region without running machines.
        present: its running machines.
        run_h: age of the run's first machines.
    """
    running = _running(present)
    rentals: list[Rental] = []
    for rental in site.rentals:
        retained = _retained(rental, running.get((rental.type, rental.market), {}), run_h)
        left = max(0, rental.cap - sum(each.cap for each in retained))
        rentals += [*retained, replace(rental, cap=left, since_h=run_h)]
    found = replace(site, rentals=rentals, server_since_h=run_h)
    if site.server is not None and present.server == site.server:
        since_h = present.server_since_h
        usd = partial(site.fixed_usd, age_h=_age_h(run_h, since_h))
        found = replace(found, fixed_usd=usd, server_since_h=since_h)
    sinces_h = {found.server_since_h, *(rental.since_h for rental in rentals)}
    later_h = {edge_h - _age_h(run_h, since_h) for edge_h in site.edges_h for since_h in sinces_h}
    return replace(found, edges_h=frozenset(edge_h for edge_h in later_h if edge_h > 0))


def counts_of(present: RegionPlan) -> dict[Kind, int]:
    """Return the running machines by type and market."""
    return {kind: sum(by_since.values()) for kind, by_since in _running(present).items()}


def _running(present: RegionPlan) -> Mapping[Kind, Mapping[float, int]]:
    """Return their number by rental time; a plan has an entry per batch."""
    found: defaultdict[Kind, Counter[float]] = defaultdict(Counter)
    for each in present.machines:
        found[each.type, each.market][each.since_h] += each.count
    return found


def _retained(rental: Rental, running: Mapping[float, int], run_h: float) -> list[Rental]:
    """Return the running machines, the oldest first."""
    return [
        replace(
            rental,
            usd=partial(rental.usd, age_h=_age_h(run_h, since_h)),
            cap=0 if rental.left_out else count,
            since_h=since_h,
        )
        for since_h, count in sorted(running.items())
    ]


def _age_h(run_h: float, since_h: float) -> float:
    return max(0.0, run_h - since_h)


@dataclass(frozen=True, slots=True)
class State:
    """Progress and speed of a run.

    Attributes:
        steps: steps that every region has taken.
        step_s: median step time by region, from the rows to the applied step, like `step_s` of a
            plan: computation, the exchange inside the region, and the server.
        run_h: age of its first machines.
        exchange_mbps: goodput by region of whole exchanges with the process that serves a run.
    """

    steps: int
    step_s: Mapping[str, float]
    run_h: float = 0.0
    exchange_mbps: Mapping[str, float] = field(default_factory=dict)


def state_of(events: Iterable[Event]) -> State:
    """Fold a run's events.

    Raises:
        PlanError: the run has no step yet.
    """
    steps: dict[str, int] = {}
    times_s: dict[str, list[float]] = {}
    sent_bytes: dict[str, int] = {}  # of the newest exchange, in both directions
    rates_mbps: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=_EXCHANGES))
    totals = RunTotals()
    for event in events:
        totals.feed(event)
        if event.kind == "exchange":
            sent_bytes[event["region"]] = event["bytes_sent"] + event["bytes_received"]
        elif event.kind == "step":
            took_s, size = event.fields.get("exchange_s", 0.0), sent_bytes.get(event["region"], 0)
            if took_s > 0 and size > 0:
                rates_mbps[event["region"]].append(8e-6 * size / took_s)
            steps[event["region"]] = max(event["step"], steps.get(event["region"], 0))
            # Asynchronous workers begin at different times, so the time of a step is that of the
            # last worker.
            whole_s = max(event.t_s - event.number("start_s"), event.number("compute_s"))
            times_s.setdefault(event["region"], []).append(whole_s / event.fields.get("steps", 1))
    if not steps:
        raise PlanError("the run has not taken a step yet", fix="Try again later.")
    middle = {region: statistics.median(values) for region, values in times_s.items()}
    lasted_s = (totals.startup_s or 0.0) + totals.elapsed_s
    mbps = {region: statistics.median(values) for region, values in rates_mbps.items()}
    return State(min(steps.values()), middle, lasted_s / HOUR_S, mbps)


def decide(
    experiment: Experiment,
    base_dir: Path,
    run_dir: Path,
    sources: Sources,
    age_h: float | None = None,
) -> Decision:
    """Decide whether the run in a directory should keep its plan; see `replanned`.

    Args:
        experiment: the configuration.
        base_dir: base of its relative paths.
        run_dir: directory of the run.
        sources: prices, links and measured steps.
        age_h: age of the run's first machines; None: the duration of its starts and the run.

    Raises:
        RunDirectoryError: there is no run.
        PlanError: it follows no plan, or as for `replanned`.
    """
    if experiment.groups:
        raise PlanError(
            "a run of groups cannot be planned again: its machines stay the same",
            fix="Plan a new run with `geo-ray plan`.",
        )
    run, _ = directory.reopen(run_dir, read_only=True)
    present = directory.followed_plan(run)
    if present is None:
        raise PlanError(
            f"{run_dir} follows no plan", fix="Begin a run with `geo-ray train --plan`."
        )
    state = state_of(read_events(run.path / EVENTS_FILE))
    if age_h is not None:
        state = replace(state, run_h=age_h)
    return replanned(experiment, base_dir, present, state, run.links, sources)


def replanned(
    experiment: Experiment,
    base_dir: Path,
    present: Plan,
    state: State,
    run_links: Path,
    sources: Sources,
) -> Decision:
    """Decide whether to keep the present plan.

    Args:
        experiment: the configuration with current prices and limits; deadline and budget are those
            of the rest.
        base_dir: base of its relative paths.
        present: the plan that the run follows.
        state: progress of the run.
        run_links: file of its measured links; may be missing.
        sources: prices, links and measured steps.

    Raises:
        PlanError: nothing is left, or the plan is for other regions.
        GeoRayError: a plan cannot be made.
    """
    inputs, request = _asked(experiment, base_dir, present, state, run_links, sources)
    going_on = _with_interval(request, present, present.interval)
    limits = request.limits
    best = None
    try:
        best = optimal(request)
    except PlanInfeasibleError:
        if not limits.keeps(going_on.total_s, going_on.total_usd):
            raise
    decision = replan(going_on, best, request.objective, limits)
    age = age_text(state.run_h * HOUR_S)
    notes = inputs.notes
    if inputs.loss is not None:
        chosen = decision.plan
        notes += tuple(planning.plan_loss_notes(inputs.loss, chosen.interval, chosen.codec))
    # A plan that is followed counts all steps of the run.
    whole = {
        "steps": present.steps,
        "base_steps": present.base_steps,
        "lr_gain": present.lr_gain,
        "from_step": state.steps,
        "model": inputs.model,
        "notes": (*notes, f"running machines are priced from an age of {age}"),
    }
    return replace(decision, plan=decision.plan.model_copy(update=whole))


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Possible changes of an active run.

    Attributes:
        interval: whether its interval can change.
        averagers: regions to which its averager can move.
    """

    interval: bool
    averagers: Collection[str] = ()

    def __bool__(self) -> bool:
        return self.interval or bool(self.averagers)


def changed_as_it_goes(
    experiment: Experiment,
    base_dir: Path,
    present: Plan,
    state: State,
    run_links: Path,
    sources: Sources,
    free: PlanChange,
) -> Decision:
    """Decide whether another interval or averager's region is better, with the same machines.

    Such a change costs nothing. Other arguments, and errors, are as for `replanned`.
    """
    _, request = _asked(experiment, base_dir, present, state, run_links, sources)
    going_on = _with_interval(request, present, present.interval)
    found = []
    intervals = request.intervals if free.interval else [present.interval]
    for averager in (present.averager, *free.averagers):
        moved = present.model_copy(update={"averager": averager})
        for interval in intervals:
            try:
                found.append(_with_interval(request, moved, interval, request.loss_budget))
            except PlanInfeasibleError:
                continue  # its loss exceeds the limit
    retained = [plan for plan in found if request.limits.keeps(plan.total_s, plan.total_usd)]
    key = "total_s" if request.objective == "time" else "total_usd"
    best = min(retained, key=attrgetter(key), default=None)
    return replan(going_on, best, request.objective, request.limits)


def _asked(
    experiment: Experiment,
    base_dir: Path,
    present: Plan,
    state: State,
    run_links: Path,
    sources: Sources,
) -> tuple[Inputs, Request]:
    local = max(1, experiment.worker_steps)
    left = present.steps - state.steps * local
    if left < 1:
        raise PlanError("the run has no steps left", fix="There is nothing to plan.")
    inputs = inputs_of(experiment, base_dir, sources)
    evals_s = evaluations_s(experiment, inputs.profile, state.steps)
    work = replace(inputs.request.work, steps=left, evaluations_s=evals_s)
    return inputs, _of_the_rest(inputs, work, present, state, local, run_links)


def _with_interval(
    request: Request, present: Plan, interval: int, loss_budget: float = math.inf
) -> Plan:
    """Return the plan of the rest with the running machines and averager."""
    as_it_is = replace(
        request,
        averagers=[present.averager],
        intervals=[interval],
        loss_budget=loss_budget,
        work=replace(request.work, startup_s=0.0, worker_start_s=0.0),
    )
    return fixed(as_it_is, {region.region: counts_of(region) for region in present.regions})


def _of_the_rest(
    inputs: Inputs, work: JobWork, present: Plan, state: State, local: int, run_links: Path
) -> Request:
    """Return the request for the rest, with the measured speeds and links of the run."""
    request = inputs.request
    plans = {region.region: region for region in present.regions}
    if set(plans) != {site.name for site in request.sites}:
        raise PlanError(
            f"the run's plan is for regions {', '.join(plans)}, CONFIG has other regions",
            fix="Plan with the configuration of the run: its config.lock.yaml.",
        )
    links = request.links
    if run_links.exists() and not inputs.emulates_links:
        links = links.with_records(load_links(run_links).links)
    links = links.with_records(_exchanged(state, present.averager))
    return replace(
        request,
        work=work,
        sites=[
            with_running(_as_seen(s, plans[s.name], state, local), plans[s.name], state.run_h)
            for s in request.sites
        ],
        links=links,
        codecs=[present.codec],  # a checkpoint contains the state of codecs
    )


def _exchanged(state: State, server: str) -> list[LinkRecord]:
    """Return the links with the region that serves a run, from the time that exchanges took.

    A region has several connections, and an exchange has several steps. So its time is divided
    evenly among the bytes of both directions: exchanges of this size are predicted as measured.
    """
    return [
        LinkRecord(
            src=src,
            dst=dst,
            goodput_mbps=mbps,
            rtt_s=0.0,
            samples=1,
            measured_at_unix_s=time.time(),
            source="passive",
        )
        for region, mbps in state.exchange_mbps.items()
        if region != server
        for src, dst in ((region, server), (server, region))
    ]


def _as_seen(site: Site, plan: RegionPlan, state: State, local: int) -> Site:
    """Return the site with the measured speeds of its present types."""
    measured_s = state.step_s.get(plan.region, 0.0) / local
    if not measured_s > 0:
        return site
    if measured_s > plan.fixed_s:
        factor = (plan.step_s - plan.fixed_s) / (measured_s - plan.fixed_s)
    else:  # the fixed time exceeds the step, so the speed per row is unknown
        factor = plan.step_s / measured_s
    used = {machines.type for machines in plan.machines}
    rentals = [
        replace(each, rows_per_s=each.rows_per_s * factor) if each.type in used else each
        for each in site.rentals
    ]
    return replace(site, rentals=rentals)


def only_of(experiment: Experiment, members: Collection[str], leader: str) -> Experiment:
    """Return the configuration restricted to some regions.

    Args:
        experiment: configuration of the run.
        members: the remaining regions.
        leader: the averager's region.
    """
    plan = experiment.plan
    offers = {} if plan is None else {n: o for n, o in plan.regions.items() if n in members}
    return experiment.model_copy(
        update={
            "regions": tuple(r for r in experiment.regions if r.name in members),
            "plan": None if plan is None else plan.model_copy(update={"regions": offers}),
            "averager": experiment.averager.model_copy(update={"region": leader}),
        }
    )


@dataclass(frozen=True, slots=True)
class MembersPlan:
    """Advice for the rest of a run with its current members.

    Attributes:
        present: the plan that it follows, restricted to these regions.
        decision: the decision, if machines and averager could change as well. Those of groups stay
            the same: then it is about the interval.
        as_it_goes: decision about the interval and the averager's region, which an active run can
            change; None: it can change neither.
    """

    present: Plan
    decision: Decision
    as_it_goes: Decision | None


def free_of(experiment: Experiment, standby: str | None) -> PlanChange:
    """Return the possible changes of an active run.

    Args:
        experiment: its configuration.
        standby: the averager's standby region; None: no standby.
    """
    may_move = experiment.members.follow_plan and experiment.averager.max_divergence == 0
    averagers = () if standby is None or not may_move else (standby,)
    return PlanChange(can_follow(experiment), averagers)


def can_follow(experiment: Experiment) -> bool:
    """Return whether the interval of an active run may change.

    It may not if it determines the steps at which regions evaluate the same parameters, or if the
    last round must be announced one round earlier, so that codecs can send their residuals.
    """
    follows = experiment.members.follow_plan and experiment.train.keep_best is None
    reports_debt = experiment.counts_total_rows and wire_plan(experiment).owes
    return follows and not reports_debt and experiment.strategy.traits.exchange.adjustable_interval


def plan_of_members(
    run: RunDirectory,
    experiment: Experiment,
    members: Collection[str],
    leader: str,
    interval: int | None = None,
    standby: str | None = None,
) -> MembersPlan:
    """Return the advice for the rest of a run with its current members.

    Args:
        run: directory of the run.
        experiment: its configuration.
        members: current members.
        leader: the averager's region.
        interval: current interval; None: that of its plan.
        standby: the averager's standby region; None: no standby.

    Raises:
        PlanError: the run follows no plan, or one without some of the members; or the region that
            serves a run of groups is not a member.
        GeoRayError: a plan cannot be made.
    """
    followed = directory.followed_plan(run)
    if followed is None:
        raise PlanError("the run follows no plan", fix="Start it with `geo-ray train --plan`.")
    if experiment.groups and leader not in members:
        raise PlanError(
            f"region '{leader}', which serves the run, takes no part",
            fix="The run is planned again when the region has joined.",
        )
    regions = tuple(each for each in followed.regions if each.region in members)
    missing = set(members) - {each.region for each in regions}
    if missing:
        raise PlanError(
            f"the run's plan has nothing for {', '.join(sorted(missing))}",
            fix="Make a plan with all regions of the configuration.",
        )
    now = {"averager": leader, "interval": interval or followed.interval}
    present = followed.model_copy(update={"regions": regions} | now)
    events = read_events(run.path / EVENTS_FILE)
    # Former members take no more steps: the rest is divided among the members.
    state = state_of(e for e in events if e.kind != "step" or e["region"] in members)
    asked = only_of(experiment, members, leader)
    question = (asked, run.base_dir, present, state, run.links, Sources())
    free = free_of(experiment, standby if standby in members else None)
    if experiment.groups:
        decision = changed_as_it_goes(*question, PlanChange(interval=True))
        return MembersPlan(present, decision, decision if free.interval else None)
    as_it_goes = changed_as_it_goes(*question, free) if free else None
    return MembersPlan(present, replanned(*question), as_it_goes)
