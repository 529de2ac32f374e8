"""Plans made anew in the middle of a run: from what it has seen, and only where it pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.errors import PlanError, PlanInfeasibleError
from geo_ray.job.planning import Sources, make_plan
from geo_ray.job.replanning import State, replanned, state_of
from geo_ray.observe.events.schema import Event
from geo_ray.planning.plan import Plan
from geo_ray.transport.links.record import LinkRecord
from geo_ray.transport.links.table import LinkTable, save_links

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
    start_usd = plan.seconds["start"] / 3600 * (plan.usd_per_h + plan.stands_usd_per_h)
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
    with pytest.raises(PlanError, match="CONFIG has others"):
        decide(others, as_planned(plan, 100))


def test_events_tell_how_far_a_run_is():
    def step(region: str, number: int, compute_s: float) -> Event:
        fields = {"region": region, "step": number, "compute_s": compute_s}
        return Event("step", 1.0, fields)

    events = [step("us", 1, 0.1), step("us", 2, 0.3), step("us", 3, 0.1), step("eu", 1, 0.2)]
    assert state_of(events) == State(1, {"us": 0.1, "eu": 0.2})
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
