"""From a configuration to a plan, and every possible rejection."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.api import plan as plan_api
from geo_ray.base.errors import (
    ConfigError,
    CurrencyError,
    GeoRayError,
    LinkUnknownError,
    PlanError,
    PlanInfeasibleError,
    PriceBookError,
    PriceUnknownError,
)
from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.actual_cost import Bill
from geo_ray.planner.config import Residency, allowed_averagers
from geo_ray.planner.exchange import Limits
from geo_ray.planner.plan import Plan, differing_machines, load_plan
from geo_ray.runs.follow_plan import changes_of
from geo_ray.runs.planning import Sources, make_plan
from geo_ray.runs.replanning import replan

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
SMALL = ("task.options={size: 0.1M}",)
US = "plan.regions.us"


def planned(*overrides: str, policy: str = "optimal", prices: tuple[Path, ...] = (), **more):
    experiment = load_tree(CONFIG, [*SMALL, *overrides], Experiment)
    return make_plan(experiment, CONFIG.parent, policy, Sources(prices), **more)


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*words: str):
    return CliRunner().invoke(root, ["plan", str(CONFIG), "--set", SMALL[0], *words])


def test_the_shipped_configuration_has_a_plan(tmp_path):
    result = run("--explain", "--out", "p.json", "--pareto", "p.html")
    assert result.exit_code == 0, result.output
    for words in ("averager", "USD", "egress", "compute", "cheaper than the next faster plan"):
        assert words in re.sub(r"\s+", " ", result.output)
    plan = load_plan(tmp_path / "p.json")
    assert {region.region for region in plan.regions} == {"us", "eu", "asia"}
    assert plan.total_s <= 24 * 3600
    page = (tmp_path / "p.html").read_text()
    assert "<svg" in page and "chosen" in page
    assert not list(tmp_path.glob("*.part"))


def test_json_is_the_plan_and_nothing_else():
    result = run("--json", "--policy", "cloudless")
    assert result.exit_code == 0, result.output
    plan = Plan.model_validate_json(result.stdout)
    assert plan.policy == "cloudless" and json.loads(result.stdout)["version"] == 1


def test_a_dry_run_says_what_to_know_before_believing_it():
    result = run("--dry-run")
    assert result.exit_code == 0, result.output
    assert "USD" in result.stdout.splitlines()[0]
    assert "speeds were configured" in result.output  # the terminal shows progress, too


def test_a_dry_run_gives_json_to_programs():
    found = json.loads(run("--dry-run", "--json").stdout)
    low, high = found["usd_range"]
    assert low <= found["usd"] <= high and found["seconds"] > 0


def test_what_all_would_cost_is_what_its_policy_says(tmp_path):
    far = ("--set", "plan.deadline_h=null")
    assert run(*far, "--policy", "everything", "--out", "all.json").exit_code == 0
    whole = load_plan(tmp_path / "all.json")
    said = " ".join(run(*far).output.split())
    assert f"(policy `everything`), would cost {whole.total_usd:.2f} USD" in said
    assert f"every {whole.interval} steps with" in said


@pytest.mark.slow
def test_every_plan_of_the_front_shows_how_it_differs(tmp_path):
    found = planned(with_front=True).front
    rows = [
        (plan.averager, plan.interval, plan.codec, machines)
        for plan, machines in zip(found, differing_machines(found), strict=True)
    ]
    assert len(set(rows)) == len(rows) > 2
    assert run("--pareto", "p.html").exit_code == 0
    assert found[0].machines_text in unescape((tmp_path / "p.html").read_text())
    assert differing_machines([]) == []
    assert differing_machines(found[:1]) == [""]


@pytest.mark.parametrize("words", [("--policy", "optimal"), ("--dry-run",), ("--pareto", "p.html")])
def test_what_the_rest_of_a_run_is_not_planned_with_is_refused(words, tmp_path):
    (tmp_path / "begun").mkdir()
    error = run("--from", "begun", *words).exception
    assert isinstance(error, ConfigError)
    assert f"{words[0]}: not allowed with --from" in error.message
    assert not isinstance(run("--from", "begun").exception, ConfigError)  # it is no run


def test_a_deadline_is_hours_and_no_time_of_day():
    with pytest.raises(ConfigError, match="deadline_h"):
        planned("plan.deadline_h=18:00")


def test_rows_of_regions_add_up_to_the_batch():
    plan = planned().plan
    rows = {region.region: sum(region.batch_sizes) for region in plan.regions}
    assert rows == {"us": 128, "eu": 64, "asia": 64}


def test_the_policies_are_in_order():
    whole, right_sized = planned(policy="everything").plan, planned(policy="cloudless").plan
    hours = right_sized.total_s / 3600 * (1 + 1e-6)
    best = planned(f"plan.deadline_h={hours}").plan
    assert best.total_usd <= right_sized.total_usd <= whole.total_usd
    # The straggler has all it has in both; fewer machines elsewhere are preempted less often.
    assert right_sized.total_s <= whole.total_s * (1 + 1e-9)
    assert right_sized.total_s == pytest.approx(whole.total_s, rel=0.01)


def test_the_machines_that_there_are_have_a_price_too():
    names = ("us", "eu", "asia")
    have = [
        f"plan.regions.{n}.machines=[{{type: g5.xlarge, cap: 4, count: 2, rows_per_s: 100}}]"
        for n in names
    ]
    plan = planned(*have, "strategy.interval=64", policy="fixed").plan
    machines = [m for region in plan.regions for m in region.machines]
    assert {(m.type, m.count) for m in machines} == {("g5.xlarge", 2)}
    assert (plan.policy, plan.interval, plan.averager) == ("fixed", 64, "us")
    # The parameter server has a machine of its own; both of these send and get by 2.5 Gbit/s.
    lan_s = 2 * 2 * 32 * plan.model.num_params / 2.5e9
    assert plan.regions[0].step_s == pytest.approx(128 / 200 + lan_s)
    none = "plan.regions.us.machines=[{type: g5.xlarge, cap: 4, rows_per_s: 100}]"
    with pytest.raises(PlanInfeasibleError, match="'us' has data but no machines"):
        planned(*have, none, policy="fixed")
    many = none.replace("cap: 4", "cap: 4, count: 5")
    with pytest.raises(PlanInfeasibleError, match="the cap is 4"):
        planned(*have, many, policy="fixed")


def test_a_bill_at_a_plans_own_prices_is_what_it_predicts():
    plan = planned().plan
    bill = Bill.of(plan)
    hub = plan.averager
    far = [region.region for region in plan.regions if region.region != hub]
    both = [pair for name in far for pair in ((name, hub), (hub, name))]
    alike = bill.usd(plan.total_s, dict.fromkeys(both, 1e9))
    prices = sum(plan.usd_per_gb[name][hub] + plan.usd_per_gb[hub][name] for name in far)
    assert alike["egress"] == pytest.approx(prices)
    machines = sum(usd for term, usd in plan.usd.items() if "machines" in term or "work" in term)
    assert alike["machines"] == pytest.approx(machines)
    assert alike["servers and disks"] == pytest.approx(plan.usd["servers and disks"])


def test_markets_decide_what_is_paid():
    dear = planned(
        *(
            f"plan.regions.{name}.machines=[{{type: g5.xlarge, cap: 4, rows_per_s: 120}}]"
            for name in ("us", "eu", "asia")
        )
    ).plan
    assert {m.market for region in dear.regions for m in region.machines} == {"on_demand"}
    assert dear.total_usd > planned().plan.total_usd
    paid = {m.usd_per_h for region in dear.regions for m in region.machines}
    assert sorted(paid) == pytest.approx([1.006, 1.258, 1.459])


@pytest.mark.parametrize("policy", ["optimal", "everything"])
def test_a_batch_that_cannot_be_done_in_time_leaves_the_others(policy):
    batches = "plan.batch_sizes=[16, 256]"
    assert planned(batches, "plan.deadline_h=1", policy=policy).request.work.rows_per_step == 256
    with pytest.raises(PlanInfeasibleError, match=r"plan\.deadline_h 0\.06: "):
        planned(batches, "plan.deadline_h=0.06", policy=policy)


@pytest.mark.parametrize("policy", ["cloudless", "everything"])
@pytest.mark.parametrize("limit", ["deadline_h=0.1", "budget_usd=3"])
def test_a_policy_that_looks_at_no_limits_does_not_exceed_them(policy, limit):
    with pytest.raises(PlanInfeasibleError, match=f"the plan of `{policy}`") as caught:
        planned(f"plan.{limit}", policy=policy)
    found = re.search(r"plan\.\w+ to [\d.]+\d", str(caught.value))
    assert found
    assert planned(found[0].replace(" to ", "="), policy=policy).plan.policy == policy


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (("plan=null",), ConfigError, "no section 'plan'"),
        (("regions=[{name: us}, {name: mars}]",), ConfigError, "mars, eu, asia"),
        (("plan.deadline_h=0.01",), PlanInfeasibleError, "plan.deadline_h 0.01: "),
        (("plan.budget_usd=0.01",), PlanInfeasibleError, "budget 0.01 USD"),
        ((f"{US}.machines=[]",), PlanInfeasibleError, "'us' has data but no available machines"),
        (
            (f"{US}.machines=[{{type: g5.xlarge, cap: 0, rows_per_s: 1}}]",),
            PlanInfeasibleError,
            "'us' has data",
        ),
        (
            (f"{US}.machines=[{{type: x9.huge, cap: 1, rows_per_s: 1}}]",),
            PriceUnknownError,
            "x9.huge in us-east-1",
        ),
        ((f"{US}.at=eu-central-1",), PriceBookError, "'us' and 'eu' are both in"),
        ((f"{US}.cloud=tencent",), PriceUnknownError, "tencent"),
        (("emulate=null",), LinkUnknownError, "us"),
        (("plan.codecs=[gzip]",), ConfigError, "gzip"),
        (("plan.loss_budget=0", "plan.intervals=[64]"), PlanInfeasibleError, "loss_budget"),
        (
            ("plan.residency.gradients={eu: [eu]}", "plan.residency.checkpoints={us: [us]}"),
            PlanInfeasibleError,
            "residency.checkpoints",
        ),
        (("plan.residency.data={eu: [us]}",), PlanInfeasibleError, "may not be in 'eu'"),
        (("plan.residency.gradients={eu: [mars]}",), PlanInfeasibleError, "unknown region 'mars'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_what_keeps_a_plan_from_being_made_is_named(overrides, error, words):
    with pytest.raises(error, match=re.escape(words)) as caught:
        planned(*overrides)
    assert isinstance(caught.value, GeoRayError) and caught.value.fix


@pytest.mark.parametrize(
    "override",
    [
        f"{US}.machines=[{{type: a, cap: -1, rows_per_s: 1}}]",
        f"{US}.colour=red",
        "plan.spot.lost_s=-1",
    ],
)
def test_nonsense_in_the_section_is_refused_when_it_is_read(override):
    with pytest.raises(ConfigError, match="plan"):
        planned(override)


def test_an_unknown_currency_is_an_error(tmp_path):
    record = {
        "cloud": "own",
        "region": "x",
        "type": "box",
        "amount": 7.0,
        "currency": "CNY",
        "unit": "hour",
        "source": "me",
        "fetched_at": "2026-11-20T00:00:00Z",
        "valid_for_s": 1e9,
    }
    out = {**record, "item": "egress", "type": None, "to": "internet", "unit": "GB", "amount": 0.8}
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"records": [record, out]}))
    own = (
        f"{US}={{cloud: own, at: x, rows: 1000, machines: "
        "[{type: box, cap: 4, rows_per_s: 100}]}"
    )
    with pytest.raises(CurrencyError, match="CNY"):
        planned(own, prices=(file,))
    rate = {"currency": "CNY", "usd": 0.14, "on": "2026-11-20", "source": "me"}
    file.write_text(json.dumps({"records": [record, out], "rates": [rate]}))
    plan = planned(own, prices=(file,)).plan
    assert plan.regions[0].machines[0].usd_per_h == pytest.approx(0.98)


def test_stale_prices_of_everything_are_noted(tmp_path):
    """Not only of machines: a plan is equally wrong with an old price of traffic or disks."""
    record = {"cloud": "own", "region": "x", "currency": "USD", "source": "me"}
    fresh = {"fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e12}
    stale = {"fetched_at": "2020-11-20T00:00:00Z", "valid_for_s": 1.0}
    records = [
        {**record, **fresh, "type": "box", "amount": 1.0, "unit": "hour"},
        {**record, **stale, "type": "hub", "amount": 1.0, "unit": "hour"},
        {**record, **stale, "item": "disk", "type": "ssd", "amount": 0.1, "unit": "GB-month"},
        {**record, **stale, "item": "egress", "to": "internet", "amount": 0.1, "unit": "GB"},
    ]
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"records": records}))
    machines = "machines: [{type: box, cap: 4, rows_per_s: 100}]"
    own = f"{US}={{cloud: own, at: x, rows: 1000, %s {machines}}}"
    some = planned(own % "", prices=(file,)).plan.notes
    more = planned(own % "server: hub, disk: ssd, disk_gb: 5,", prices=(file,)).plan.notes
    counts = [int(re.search(r"(\d+) prices are stale", " ".join(n))[1]) for n in (some, more)]
    assert counts[1] == counts[0] + 2 and counts[0] >= 1
    assert re.search(r"the oldest of \d+ d ago", " ".join(some)), some


def test_residency_moves_the_averager():
    assert planned().plan.averager != "eu"
    assert planned("plan.residency.gradients={eu: [eu], asia: [eu, asia]}").plan.averager == "eu"
    assert allowed_averagers(Residency(), ["a", "b"]) == ["a", "b"]


def test_an_age_is_that_of_a_runs_machines():
    alone = run("--age-h", "5")
    assert alone.exit_code == 2 and "--from" in alone.output
    with pytest.raises(ConfigError, match="not an age"):
        plan_api.replan("runs/none", CONFIG, age_h=-1.0)


def test_a_replacement_must_pay_off():
    present = planned().plan
    dearer = present.model_copy(update={"usd": {"machines": present.total_usd * 1.2}})
    assert replan(dearer, present).changed
    slightly = present.model_copy(update={"usd": {"machines": present.total_usd * 1.04}})
    kept = replan(slightly, present)
    assert not kept.changed and kept.plan is slightly and "5%" in kept.reason
    slower = present.model_copy(update={"seconds": {"compute": present.total_s * 2}})
    assert replan(slower, present, "time").changed
    assert replan(slightly, None).plan is slightly


@pytest.mark.parametrize("limit", ["deadline_s", "budget_usd"])
def test_limits_count_more_than_the_gain(limit):
    """A run that would be late changes, although that costs more than continuing."""
    present = planned().plan
    new = present.model_copy(update={"usd": {"machines": present.total_usd * 2}})
    assert not replan(present, new).changed
    limits = Limits(**{limit: 0.9 * (present.total_s, present.total_usd)[limit == "budget_usd"]})
    changed = replan(present, new, "cost", limits)
    assert changed.changed and changed.plan is new and "exceed the limits" in changed.reason


def test_a_configuration_follows_its_plan():
    experiment = load_tree(CONFIG, SMALL, Experiment)
    plan = planned().plan
    followed = load_tree(CONFIG, [*SMALL, *changes_of(plan, experiment)], Experiment)
    for region, wanted in zip(followed.regions, plan.regions, strict=True):
        assert (region.workers, region.batch_sizes) == (wanted.workers, wanted.batch_sizes)
    assert followed.rows == experiment.rows
    assert followed.averager_region == plan.averager
    assert followed.strategy.interval == plan.interval
    short = plan.model_copy(update={"interval": 4})  # outer momentum overshoots there
    followed = load_tree(CONFIG, [*SMALL, *changes_of(short, experiment)], Experiment)
    assert followed.strategy.outer.model_dump() == {"kind": "sgd", "lr": 1.0}
    followed = load_tree(CONFIG, [*SMALL, *changes_of(plan, experiment)], Experiment)
    assert followed.strategy.outer.kind == "nesterov"
    assert followed.codec.up.kind == followed.codec.down.kind == plan.codec
    with pytest.raises(PlanError, match="steps"):
        changes_of(plan.model_copy(update={"base_steps": 1.0}), experiment)
    half = plan.model_copy(update={"steps": plan.steps / 2, "lr_gain": 4.0})
    scaled = load_tree(CONFIG, [*SMALL, *changes_of(half, experiment)], Experiment)
    assert scaled.train.steps == experiment.train.steps / 2
    assert scaled.optimizer.lr == pytest.approx(2 * experiment.optimizer.lr)  # adamw: the root
    muon = [*SMALL, "optimizer={kind: muon, lr: 0.01, adamw: {lr: 0.004}}"]
    experiment = load_tree(CONFIG, muon, Experiment)
    scaled = load_tree(CONFIG, [*muon, *changes_of(half, experiment)], Experiment)
    assert (scaled.optimizer.lr, scaled.optimizer.adamw.lr) == pytest.approx((0.02, 0.008))
    with pytest.raises(PlanError, match="regions"):
        changes_of(plan.model_copy(update={"regions": plan.regions[:1]}), experiment)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    file = tmp_path / "p.json"
    file.write_text("{}")
    result = CliRunner().invoke(root, ["simulate", str(CONFIG), "--plan", str(file)])
    assert isinstance(result.exception, PlanError) and "policy" in str(result.exception)


def test_batches_must_fit_the_workers():
    wrong = "regions=[{name: us, workers: 2, batch_sizes: [1]}, {name: eu}, {name: asia}]"
    with pytest.raises(ConfigError, match="1 entries for 2 workers"):
        planned(wrong)
    coded = "train.stragglers={kind: backup_workers, spares: 1}"
    right = "regions=[{name: us, workers: 2, batch_sizes: [1, 2]}]"
    with pytest.raises(ConfigError, match="batches of equal size"):
        planned(right, coded, "plan=null")


@pytest.mark.parametrize(
    ("strategy", "interval"),
    [
        ("{kind: bsp}", 1),
        ("{kind: fedssgd, accumulate: 4}", 4),
        ("{kind: hfa, k1: 4, k2: 4}", 16),
    ],
)
def test_strategies_without_an_interval_exchange_as_often_as_they_say(strategy, interval):
    # loss_budget: such an interval is not the planner's to choose
    plan = planned(f"strategy={strategy}", "plan.loss_budget=1").plan
    assert plan.interval == interval
    again = planned(f"strategy={strategy}", "plan.loss_budget=1", policy="everything").plan
    far = {region.region for region in again.regions} - {again.averager}
    prices = sum(
        again.usd_per_gb[name][again.averager] + again.usd_per_gb[again.averager][name]
        for name in far
    )
    gb = 4e-9 * again.model.num_params  # the first way of `everything` has no codec
    rounds = again.steps // interval + (again.steps % interval > 0)
    assert again.usd["egress"] == pytest.approx(rounds * gb * prices)


def test_an_interval_counts_the_local_steps_of_workers():
    sets = ("strategy={kind: halos, interval: 8, local_steps: 8}", "plan.intervals=[8]")
    plan = planned(*sets).plan
    assert (plan.steps, plan.interval) == (20000 * 8, 64)
    experiment = load_tree(CONFIG, [*SMALL, *sets], Experiment)
    followed = load_tree(CONFIG, [*SMALL, *sets, *changes_of(plan, experiment)], Experiment)
    assert followed.strategy.interval == 8


@pytest.mark.parametrize("kind", ["esync", "nbsync", "fedavg", "fedat", "fedgsync"])
def test_a_strategy_of_unequal_steps_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"{kind} cannot be planned"):
        planned(f"strategy={{kind: {kind}}}")
