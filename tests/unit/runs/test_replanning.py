"""Plans made anew in the middle of a run: from what it has seen, and only where it pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from geo_ray.base.errors import PlanError, PlanInfeasibleError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import ModelId, Plan
from geo_ray.planner.profile import Profile
from geo_ray.planner.timing import Timing
from geo_ray.runs.plan_inputs import evaluations_s
from geo_ray.runs.planning import Sources, inputs_of, make_plan
from geo_ray.runs.replanning import State, replanned, state_of
from geo_ray.telemetry.events import Event
from geo_ray.transport.links import LinkRecord, LinkTable, save_links

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
SETS = ("task.options={size: 0.1M}", "plan.deadline_h=100")


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def experiment(*overrides: str) -> Experiment:
    return load_tree(CONFIG, [*SETS, *overrides], Experiment)


@pytest.fixture
def plan() -> Plan:
    return make_plan(experiment(), CONFIG.parent, "optimal", Sources()).plan


def step(region: str, number: int, compute_s: float, t_s: float, more_s: float = 0.0) -> Event:
    """A step that computed for some seconds and took some more beside that."""
    fields = {"region": region, "step": number, "samples": 8, "loss": 1.0, "wait_s": more_s}
    return Event(
        "step", t_s, {**fields, "compute_s": compute_s, "start_s": t_s - compute_s - more_s}
    )


def as_planned(plan: Plan, steps: int, slower: float = 1.0) -> State:
    seconds = {r.region: r.fixed_s + slower * (r.step_s - r.fixed_s) for r in plan.regions}
    return State(steps, seconds)


def decide(plan: Plan, state: State, *overrides: str, links: Path = Path("none.json")):
    return replanned(experiment(*overrides), CONFIG.parent, plan, state, links, Sources())


def test_a_run_that_goes_as_planned_stays(plan):
    decision = decide(plan, as_planned(plan, 5000))
    assert not decision.changed and "stays" in decision.reason
    kept = decision.plan
    assert [region.batch_sizes for region in kept.regions] == [
        region.batch_sizes for region in plan.regions
    ]
    assert (kept.steps, kept.base_steps) == (plan.steps, plan.base_steps)
    start_usd = plan.seconds["start"] / 3600 * (plan.usd_per_h + plan.fixed_usd_per_h)
    assert kept.total_usd == pytest.approx(0.75 * (plan.total_usd - start_usd), rel=0.02)


def test_machines_that_are_far_slower_than_planned_are_left(plan):
    slow = as_planned(plan, 5000, slower=4.0)
    decision = decide(plan, slow)
    assert decision.changed and decision.gain > 0.05
    before, after = ([r.workers for r in p.regions] for p in (plan, decision.plan))
    assert before != after


def test_near_the_end_nothing_pays(plan):
    late = as_planned(plan, 19990, slower=4.0)
    assert not decide(plan, late).changed


def test_a_codec_stays_what_checkpoints_hold(plan):
    decision = decide(plan, as_planned(plan, 100, slower=4.0))
    assert decision.plan.codec == plan.codec


def test_links_that_were_seen_count_more_than_a_table(plan, tmp_path):
    pairs = [(a, b) for a in ("us", "eu", "asia") for b in ("us", "eu", "asia") if a != b]
    slow = [
        LinkRecord(src=a, dst=b, goodput_mbps=0.05, rtt_s=0.1, samples=9, measured_at_unix_s=1.0)
        for a, b in pairs
    ]
    fast = [record.model_copy(update={"goodput_mbps": 200.0}) for record in slow]
    save_links(LinkTable(links=tuple(fast)), tmp_path / "fast.json")
    save_links(LinkTable(links=tuple(slow)), tmp_path / "slow.json")
    sources = Sources(links=tmp_path / "fast.json")
    often = ("emulate=null", "plan.intervals=[32]")
    given = make_plan(experiment(*often), CONFIG.parent, "optimal", sources).plan
    state = as_planned(given, 5000)
    seen = decide(given, state, "emulate=null", links=tmp_path / "slow.json")
    assert seen.changed and seen.plan.interval > given.interval


def test_a_run_at_its_end_or_of_other_regions_is_refused(plan):
    with pytest.raises(PlanError, match="no steps left"):
        decide(plan, as_planned(plan, 20000))
    others = plan.model_copy(update={"regions": plan.regions[:2]})
    with pytest.raises(PlanError, match="CONFIG has other regions"):
        decide(others, as_planned(plan, 100))


def test_events_tell_how_far_a_run_is():
    events = [
        step("us", 1, 0.1, 7.1),
        step("us", 2, 0.3, 7.4),
        step("us", 3, 0.1, 7.5),
        step("eu", 1, 0.2, 7.2),
    ]
    found = state_of(events)
    assert found.steps == 1 and found.step_s == pytest.approx({"us": 0.1, "eu": 0.2})
    assert found.run_h == pytest.approx(7.5 / 3600)
    started = {"regions": ["us"], "startup_s": 30.0, "averager": "us"}
    later = [Event("run_started", 8.0, started), step("us", 4, 0.1, 9.0)]
    whole = state_of([Event("run_started", 0.0, started), *events, *later])
    assert whole.run_h == pytest.approx((30 + 30 + 9) / 3600)  # of both starts, without the pause
    with pytest.raises(PlanError, match="not taken a step"):
        state_of([])


def test_the_deadline_of_the_rest_counts_more_than_the_gain(plan):
    """Going on would be cheaper and too late, so the run changes, the start included."""
    state = as_planned(plan, 5000)
    on_s = decide(plan, state).plan.total_s
    hours = 0.8 * on_s / 3600
    found = decide(plan, state, f"plan.deadline_h={hours}")
    assert found.changed and "exceed the limits" in found.reason
    assert found.plan.seconds["start"] == 120 and found.plan.total_s <= hours * 3600
    # A start that takes longer than what is left keeps nothing: neither plan is printed.
    with pytest.raises(PlanInfeasibleError, match="deadline"):
        decide(plan, state, f"plan.deadline_h={hours}", f"plan.startup_s={on_s}")
    # and where going on keeps the limits, it goes on
    stays = decide(plan, state, f"plan.deadline_h={on_s * 1.01 / 3600}", f"plan.startup_s={on_s}")
    assert not stays.changed


def test_what_machines_send_each_other_is_no_speed_of_theirs():
    """A run as it was planned, whose workers' computing holds none of the network's time."""
    lan = ("plan.lan_s_per_machine=0.5", "plan.deadline_h=1000")
    plan = make_plan(experiment(*lan), CONFIG.parent, "optimal", Sources()).plan
    assert all(region.fixed_s > 0.1 * region.step_s for region in plan.regions)
    events = [
        step(region.region, number, region.step_s - region.fixed_s, number, region.fixed_s)
        for region in plan.regions
        for number in (4998, 4999, 5000)
    ]
    going_on = decide(plan, state_of(events), *lan, "plan.startup_s=1e6").plan
    for then, now in zip(plan.regions, going_on.regions, strict=True):
        assert now.step_s == pytest.approx(then.step_s)
        assert now.machines[0].rows_per_s == pytest.approx(then.machines[0].rows_per_s)


def test_a_run_faster_than_what_is_fixed_of_its_steps_has_no_endless_speed():
    lan = ("plan.lan_s_per_machine=0.5", "plan.deadline_h=1000", "plan.startup_s=1e6")
    plan = make_plan(experiment(*lan), CONFIG.parent, "optimal", Sources()).plan
    state = State(5000, {region.region: 0.9 * region.fixed_s for region in plan.regions})
    for then, now in zip(plan.regions, decide(plan, state, *lan).plan.regions, strict=True):
        faster = then.step_s / (0.9 * then.fixed_s)
        assert now.machines[0].rows_per_s == pytest.approx(faster * then.machines[0].rows_per_s)


def tiered(place: Path, factor: float = 0.25, **more: object) -> Sources:
    """Prices of machines that are 10 hours old, by a share of the amount."""
    record = {"cloud": "own", "type": "box", "currency": "USD", "unit": "hour", "amount": 2.0}
    record |= {"source": "me", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e12, **more}
    record["age_tiers"] = [{"after_h": 10, "factor": factor}]
    out = {k: v for k, v in record.items() if k not in ("type", "age_tiers", "availability")}
    out |= {"item": "egress", "to": "*", "unit": "GB", "amount": 0.01}
    names = ("us", "eu", "asia")
    records = [{**each, "region": name} for name in names for each in (record, out)]
    file = place / "tiers.json"
    file.write_text(json.dumps({"records": records}))
    return Sources((file,))


def boxes(cap: int = 4) -> str:
    machines = f"machines: [{{type: box, cap: {cap}, rows_per_s: 30}}], server: box"
    places = (f"{name}: {{cloud: own, at: {name}, rows: 1000, {machines}}}" for name in NAMES)
    return f"plan.regions={{{', '.join(places)}}}"


NAMES = ("us", "eu", "asia")


def test_machines_that_run_cost_what_their_age_says_and_new_ones_the_full_price(tmp_path):
    sources = tiered(tmp_path)
    small = "train.steps=2000"  # the rest is far shorter than ten hours
    plan = make_plan(experiment(boxes(), small), CONFIG.parent, "optimal", sources).plan
    state = as_planned(plan, 1000)

    def on(age_h: float) -> Plan:
        aged = replace(state, run_h=age_h)
        args = (experiment(boxes(), small), CONFIG.parent, plan, aged, Path("none"), sources)
        decision = replanned(*args)
        assert not decision.changed
        return decision.plan

    young, old = on(0.0), on(12.0)
    for term in ("machines on_demand", "servers and disks"):
        assert old.usd[term] == pytest.approx(0.25 * young.usd[term])
    assert any("12 h" in note for note in old.notes)


def test_a_change_keeps_what_runs_before_it_rents_more_and_says_since_when(tmp_path):
    """Slow machines of a run ten hours old: more are rented, which are new."""
    sources, long = tiered(tmp_path), ("plan.startup_s=0", "plan.deadline_h=1000")
    plan = make_plan(experiment(boxes(2), *long), CONFIG.parent, "optimal", sources).plan
    state = replace(as_planned(plan, 1000, slower=4.0), run_h=12.0)
    late_h = decide_with(sources, plan, state, boxes(2), *long).plan.total_s / 3600 / 2
    found = decide_with(sources, plan, state, boxes(8), f"plan.deadline_h={late_h}")
    assert found.changed
    grown = 0
    for then, now in zip(plan.regions, found.plan.regions, strict=True):
        had = sum(machines.count for machines in then.machines)
        kept = sum(m.count for m in now.machines if m.since_h == 0)
        new = sum(m.count for m in now.machines if m.since_h == 12.0)
        assert kept == min(had, kept + new) and now.server_since_h == 0
        grown += new
        for machines in now.machines:
            expected = 0.5 if machines.since_h == 0 else at_full_price(found.plan.total_s / 3600)
            assert machines.usd_per_h == pytest.approx(expected)
    assert grown > 0
    # The next one counts on: what was new is as old as since then.
    state = replace(as_planned(found.plan, 2000), run_h=20.0)
    late = ("plan.deadline_h=1000", "plan.startup_s=1e6")  # so that going on is best
    again = decide_with(sources, found.plan, state, boxes(8), *late)
    assert not again.changed
    assert {m.since_h for region in again.plan.regions for m in region.machines} == {0.0, 12.0}
    hours = again.plan.total_s / 3600
    after_2_h = 2.0 * min(hours, 2) + 0.5 * max(0, hours - 2)  # eight hours old by then
    paid = sum(
        m.count * (after_2_h if m.since_h else 0.5 * hours)
        for region in again.plan.regions
        for m in region.machines
    )
    assert again.plan.usd["machines on_demand"] == pytest.approx(paid)


def at_full_price(hours: float) -> float:
    """Mean over so many hours of a new machine."""
    return (2.0 * min(hours, 10) + 0.5 * max(0, hours - 10)) / hours


def test_what_runs_may_stay_though_quota_is_gone_and_the_cloud_sold_out(tmp_path):
    plan = make_plan(experiment(boxes()), CONFIG.parent, "optimal", tiered(tmp_path)).plan
    sold_out = tiered(tmp_path, availability="none")
    state = as_planned(plan, 1000)
    for cap in (4, 0):
        stays = decide_with(sold_out, plan, state, boxes(cap))
        assert not stays.changed
        assert [r.workers for r in stays.plan.regions] == [r.workers for r in plan.regions]


def decide_with(sources: Sources, plan: Plan, state: State, *overrides: str):
    config = experiment(*overrides)
    return replanned(config, CONFIG.parent, plan, state, Path("none.json"), sources)


def test_evaluations_that_are_done_do_not_count_again():
    found = experiment("train.steps=100", "train.eval_every=10")
    model = ModelId.model_construct()
    profile = Profile.model_construct(model=model, hardware="", evaluation_s=2.0)
    left = [evaluations_s(found, profile, done) / 2 for done in (0, 9, 10, 55, 99, 100)]
    assert left == [10, 10, 9, 5, 1, 1]


@pytest.mark.parametrize(
    "strategy",
    [
        "{kind: decoupled, interval: 9, fragments: 2}",
        "{kind: diloco_streaming, interval: 8, tau: 1}",
    ],
)
def test_a_run_goes_on_with_its_own_interval_whatever_may_be_chosen_today(strategy: str) -> None:
    def timing(intervals: str) -> Timing:
        asked = experiment(f"strategy={strategy}", f"plan.intervals={intervals}")
        request = inputs_of(asked, CONFIG.parent, Sources()).request
        return request.work.pattern.timing(asked.strategy.traits.exchange.interval)

    assert timing("[64]") == timing("[8, 9]") == timing("[4, 8, 9, 64]")
