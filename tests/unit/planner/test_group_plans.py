"""Plans of regions that are process groups: whole gangs, accelerators, memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import geo_ray
from geo_ray.api import check
from geo_ray.api.clusters import up_offer
from geo_ray.api.plan import PlanInputs, ProfileGrid
from geo_ray.base.errors import ConfigError, ModelTooLargeError, PlanInfeasibleError
from geo_ray.cli.plan import memory_lines
from geo_ray.planner.fleet import Offer, RegionFleet
from geo_ray.planner.plan import Plan
from geo_ray.planner.profile import StepPoint
from geo_ray.planner.search import RentalPool
from geo_ray.prices.price_book import Instance
from geo_ray.runs.planning import begin_profile
from geo_ray.sweep.profile import Corner, experiment_of, missing, step_points
from geo_ray.telemetry.events import Event
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.links import table_of

P4D = {"type": "p4d.24xlarge", "cap": 4, "rows_per_s": 4000}
P5 = {"type": "p5.48xlarge", "cap": 4, "rows_per_s": 9000}
G5 = {"type": "g5.xlarge", "cap": 64, "rows_per_s": 100}


def config(**changes: Any) -> dict[str, Any]:
    spot = ["on_demand", "spot"]
    regions = {
        "us": {"cloud": "aws", "at": "us-east-1", "machines": [P4D, P5, G5]},
        "eu": {"cloud": "aws", "at": "eu-west-1", "machines": [{**P4D, "markets": spot}]},
    }
    return {
        "name": "groups",
        "task": {"use": "bytelm", "options": {"size": "0.1M"}},
        "data": {"generate": {}, "batch_size": 16},
        "regions": [
            {"name": "us", "group": {"nodes": 2, "gpus_per_node": 8}},
            {"name": "eu", "group": {"gpus_per_node": 8}},
        ],
        "strategy": {"kind": "diloco", "interval": 100},
        "optimizer": {"kind": "adamw", "lr": 0.001},
        "train": {"steps": 20_000},
        "plan": {"regions": regions, "startup_s": 0},
        **changes,
    }


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    link = LinkSpec(rate_mbps=1000, delay_s=0.04)
    path = tmp_path / "links.json"
    table = table_of({("us", "eu"): link, ("eu", "us"): link})
    path.write_text(table.model_dump_json(), encoding="utf-8")
    return path


def planned(values: dict[str, Any], links: Path, *overrides: str, policy: Any = "optimal") -> Plan:
    inputs = PlanInputs(links=links)
    return geo_ray.plan(values, overrides, policy=policy, inputs=inputs).plan


def test_a_group_gets_all_of_its_machines_of_one_type(links: Path) -> None:
    """By hand: 256 rows on two p4d take 256 / 8000 s; so do the 128 rows of eu on one."""
    plan = planned(config(), links)
    us, eu = plan.regions
    assert [(m.type, m.count, m.rows, m.workers) for m in us.machines] == [
        ("p4d.24xlarge", 2, 128, 8)
    ]
    assert [(m.type, m.market, m.count, m.rows) for m in eu.machines] == [
        ("p4d.24xlarge", "spot", 1, 128)
    ]
    assert (us.step_s, eu.step_s) == (pytest.approx(0.032), pytest.approx(0.032))
    assert us.batch_sizes == (16,) * 16
    assert plan.seconds["compute"] == pytest.approx(20_000 * 0.032)
    assert plan.averager == "us"
    hours = plan.total_s / 3600
    machines = plan.usd["machines on_demand"] + plan.usd["machines spot"]
    lost = plan.usd["work lost to preemption"]
    assert machines + lost == pytest.approx(hours * (2 * 21.96 + 9.76))
    assert any("no g5.xlarge: it has 1 accelerators; the group uses 8" in n for n in plan.notes)


def test_a_plan_shows_memory_by_device(links: Path) -> None:
    plan = planned(config(), links, "plan.codecs=[null]", "plan.activation_mb_per_row=100")
    memory, params = plan.regions[0].memory, plan.model.num_params if plan.model else 0
    assert memory is not None and (memory.ranks, memory.device_gb, memory.host_gb) == (8, 40, 1152)
    assert memory.device["activations"] == 1.6e9
    assert memory.device["optimizer"] == pytest.approx(2 * 4 * params / 16, rel=0.02)
    assert memory.host["strategy"] == pytest.approx(8 * params / 16, rel=0.02)
    assert plan.serving["strategy"] == pytest.approx(4 * params, rel=0.01)  # outer momentum
    assert "of 40 GB per accelerator" in memory.text()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_rows_that_do_not_fit_are_refused_with_a_number_that_does(links: Path) -> None:
    overrides = ("plan.activation_mb_per_row=6000", "data.batch_size=16")
    with pytest.raises(ModelTooLargeError, match=r"p5\.48xlarge: a rank needs 97.*80 GB") as caught:
        planned(config(), links, *overrides)
    assert caught.value.fix == "Use at most 12 rows per rank at a time, with train.accumulate."
    plan = planned(
        config(),
        links,
        *overrides,
        "train.accumulate=2",
        "plan.regions.eu.machines.0.accelerator_gb=80",
    )
    assert {m.type for m in plan.regions[0].machines} == {"p5.48xlarge"}


@pytest.mark.parametrize(
    ("override", "error", "text"),
    [
        ('plan.regions.us.machines=[{"type": "p4d.24xlarge", "cap": 1, "rows_per_s": 1}]',
         PlanInfeasibleError, "its cap is 1; the group has 2 machines"),
        ('plan.regions.us.machines=[{"type": "g5.xlarge", "cap": 64, "rows_per_s": 1}]',
         PlanInfeasibleError, "it has 1 accelerators; the group uses 8"),
        ('plan.regions.us.machines=[{"type": "p4d.24xlarge", "cap": 4}]',
         ConfigError, "speed of p4d.24xlarge is unknown"),
        ("plan.batch_sizes=[128, 256]", ConfigError, "plan.batch_sizes"),
        ("plan.regions.us.server=m5.2xlarge", ConfigError, "no parameter server"),
        ('plan.residency={"gradients": {"eu": ["eu"]}}', PlanInfeasibleError, "serves the run"),
    ],
)  # fmt: skip
def test_what_groups_cannot_have(links: Path, override: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        planned(config(), links, override)


def test_fixed_counts_are_a_whole_gang(links: Path) -> None:
    machines = "plan.regions.us.machines=" + json.dumps([{**P4D, "count": 2}])
    eu = "plan.regions.eu.machines=" + json.dumps([{**P4D, "count": 1}])
    plan = planned(config(), links, machines, eu, policy="fixed")
    assert plan.machines_text == "us: 2 x p4d.24xlarge on-demand; eu: 1 x p4d.24xlarge on-demand"
    machines = "plan.regions.us.machines=" + json.dumps([{**P4D, "count": 3}])
    with pytest.raises(PlanInfeasibleError, match="its group has 2 machines of one type"):
        planned(config(), links, machines, eu, policy="fixed")


def test_a_plan_of_groups_changes_only_the_exchange(links: Path) -> None:
    from geo_ray.base.load import load_tree
    from geo_ray.experiment.experiment import Experiment
    from geo_ray.runs.follow_plan import changes_of

    values = config()
    plan = planned(values, links)
    path = links.parent / "groups.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    experiment = load_tree(path, (), Experiment)
    changed = load_tree(path, changes_of(plan, experiment), Experiment)
    assert changed.regions == experiment.regions
    assert changed.strategy.traits.exchange.interval == plan.interval


offers = st.lists(
    st.tuples(
        st.integers(1, 9), st.integers(1, 9), st.integers(0, 2), st.booleans(), st.integers(4, 9)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(offers, min_size=1, max_size=3), st.integers(0, 6), st.integers(1, 40))
def test_one_gang_of_each_region_is_the_cheapest(
    regions: list[list[tuple[int, int, int, bool, int]]], most_spots: int, tenths: int
) -> None:
    """Against all choices of one gang per region within a limit of spot machines."""
    fleets = [
        RegionFleet(
            f"r{i}",
            [
                Offer(f"t{k}", "spot" if spot else "on_demand", usd, speed, cap, 0.0, rows,
                      0.01 if spot else 0.0)
                for k, (usd, speed, cap, spot, rows) in enumerate(each)
            ],
            6,
            gang=i + 1,
        )
        for i, each in enumerate(regions)
    ]  # fmt: skip
    limit_s = tenths / 10
    best = None
    for chosen in itertools.product(*(range(len(each)) for each in regions)):
        taken = [each[k] for each, k in zip(regions, chosen, strict=True)]
        if any(cap == 0 or rows < 6 or 6 / speed > limit_s for _, speed, cap, _, rows in taken):
            continue
        spots = sum(i + 1 for i, (_, _, _, spot, _) in enumerate(taken) if spot)
        if spots <= most_spots:
            usd = sum(each[0] for each in taken)
            best = usd if best is None else min(best, usd)
    if any(fleet.is_empty for fleet in fleets):
        assert best is None
        return
    pool = RentalPool(fleets, True)
    found, least = pool.cheapest([limit_s] * len(fleets), most_spots)
    if best is None:
        assert found is None
        return
    assert found is not None and sum(pick.usd_per_h for pick in found) == pytest.approx(best)
    assert least <= best + 1e-9
    assert all(sum(pick.counts) == 1 for pick in found)
    assert pool.spots(found) <= most_spots


def test_the_example_of_the_guide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lines that the page shows."""
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[3]
    inputs = PlanInputs(links=root / "configs" / "planned_groups_links.json")
    plan = geo_ray.plan(root / "configs" / "planned_groups.yaml", inputs=inputs).plan
    page = (root / "docs" / "guides" / "planning.md").read_text(encoding="utf-8")
    lines = memory_lines(plan)
    assert len(lines) == 3
    for line in lines:
        assert line in page
    assert f"exchange every {plan.interval} steps, {plan.codec}" in page
    assert all(f"{m.count} x {m.type}" in page for r in plan.regions for m in r.machines)


def test_a_dry_run_checks_the_memory_of_rented_machines(links: Path) -> None:
    """A type that fits suffices, as for a plan."""
    rented = config(cluster={"kind": "existing"})
    overrides = ("plan.activation_mb_per_row=6000", "data.batch_size=16", "run.dir=runs")
    with pytest.raises(ModelTooLargeError, match=r"region 'us', p5\.48xlarge: a rank needs 97"):
        check.check_run(rented, overrides)
    fits = (*overrides, "plan.regions.us.machines.1.accelerator_gb=160")
    with pytest.raises(ModelTooLargeError, match=r"region 'eu', p4d\.24xlarge: a rank needs 97"):
        check.check_run(rented, fits)
    check.check_run(rented, (*fits, "plan.regions.eu.machines.0.accelerator_gb=160"))


def test_a_dry_run_checks_the_memory_of_this_machine(
    links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Instance(accelerators=0, host_gb=1.0)
    monkeypatch.setattr(check, "_this_machine", lambda: here)
    regions = [{"name": name, "group": {"ranks_per_node": 2}} for name in ("us", "eu")]
    with pytest.raises(ModelTooLargeError, match="region 'us', this machine: the 2 ranks") as found:
        check.check_run(config(regions=regions, plan=None))
    assert "it has 1 GB" in found.value.message
    here = Instance(accelerators=0, host_gb=64.0)
    check.check_run(config(regions=regions, plan=None))


def test_a_dry_run_compares_gpus_with_those_of_this_machine(
    links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Instance(accelerators=5, host_gb=640.0)
    monkeypatch.setattr(check, "_this_machine", lambda: here)
    groups = {"us": {"nodes": 2, "gpus_per_node": 2}, "eu": {"gpus_per_node": 2}}
    regions = [{"name": name, "group": group} for name, group in groups.items()]
    wanted = "gpus_per_node: the groups reserve 6 GPUs, and this machine has 5"
    with pytest.raises(ConfigError, match=wanted) as found:
        check.check_run(config(regions=regions, plan=None))
    assert "Set gpus_per_node to 0 in every group" in found.value.fix
    here = Instance(accelerators=6, host_gb=640.0)
    check.check_run(config(regions=regions, plan=None))


def test_up_checks_the_memory_of_the_planned_machines(links: Path) -> None:
    """The plan was made for fewer rows; the machines that it has chosen do not fit now."""
    rented = config(cluster={"kind": "existing"})
    plan = planned(rented, links)
    changed = ("plan.activation_mb_per_row=3000", "data.batch_size=16")
    with pytest.raises(ModelTooLargeError, match=r"region 'us', p4d\.24xlarge: a rank needs 49"):
        up_offer(rented, changed, plan=plan, provider="local")


def test_the_speed_of_a_group_is_measured(links: Path) -> None:
    """By hand: 16 ranks with 16 rows in 0.02 s train 128 / 0.02 rows per second and machine."""
    slow = [{k: v for k, v in P4D.items() if k != "rows_per_s"}]
    unknown = ("plan.regions.us.machines=" + json.dumps(slow),)
    experiment = geo_ray.load_config(config(), unknown)
    profile = begin_profile(experiment, links.parent, links.parent / "none.json", "here")
    point = StepPoint(
        region="us", machine="p4d.24xlarge", workers=16, rows=16, step_s=0.02, spread=0.0, steps=9
    )
    path = links.parent / "profile.json"
    path.write_text(profile.with_steps([point]).model_dump_json(), encoding="utf-8")
    inputs = PlanInputs(links=links, profile=path)
    us, _ = geo_ray.plan(config(), unknown, inputs=inputs).plan.regions
    assert us.step_s == pytest.approx(256 / (2 * 128 / 0.02))
    other = point.model_copy(update={"workers": 8})
    path.write_text(profile.with_steps([other]).model_dump_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"speed of p4d\.24xlarge is unknown") as found:
        geo_ray.plan(config(), unknown, inputs=inputs)
    assert "geo-ray profile --machine us=p4d.24xlarge" in (found.value.fix or "")


def test_a_profile_of_groups_makes_a_short_run(links: Path) -> None:
    experiment = geo_ray.load_config(config())
    machines = {"us": "p4d.24xlarge", "eu": "p4d.24xlarge"}
    corner = Corner(16, 16)
    short = experiment_of(corner, experiment, 20, "profiles", links.parent)
    assert [each.group for each in short.regions] == [each.group for each in experiment.regions]
    assert (short.strategy.interval, short.train.steps) == (3, 24)
    assert short.checkpoint.every_s is None
    counts = range(3, 25, 3)
    seconds = {"us": 0.5, "eu": 0.25}
    told = [
        Event("step", step, {"region": name, "step": step, "compute_s": 3 * each})
        for name, each in seconds.items()
        for step in counts
    ]
    points = step_points(told, short, machines)
    assert [(p.region, p.workers, p.rows, p.step_s, p.steps) for p in points] == [
        ("us", 16, 16, 0.5, 21),
        ("eu", 8, 16, 0.25, 21),
    ]
    profile = begin_profile(experiment, links.parent, links.parent / "none.json", "here")
    assert missing([corner], experiment, machines, profile) == [corner]
    assert missing([corner], experiment, machines, profile.with_steps(points)) == []


@pytest.mark.parametrize("call", [geo_ray.plan, geo_ray.profile])
def test_loops_of_users_have_an_unknown_model(call: Any, links: Path) -> None:
    groups = [{"name": name, "group": {"loop": "a.py:train"}} for name in ("us", "eu")]
    tree = {k: v for k, v in config().items() if k not in ("task", "data", "optimizer")}
    grid = ProfileGrid(machines={"us": "p4d.24xlarge"})
    more = {"grid": grid} if call is geo_ray.profile else {}
    with pytest.raises(ConfigError, match=r"plan \(line 14\): us, eu have a training loop each"):
        call({**tree, "regions": groups}, **more)
    del tree["plan"]
    with pytest.raises(ConfigError, match="us, eu have a training loop of their own"):
        call({**tree, "regions": groups}, **more)


def test_other_points_of_groups_are_not_measured(links: Path) -> None:
    grid = ProfileGrid(workers=(1, 4), machines={"us": "p4d.24xlarge"})
    with pytest.raises(ConfigError, match="with its own ranks"):
        geo_ray.profile(config(), grid=grid)
