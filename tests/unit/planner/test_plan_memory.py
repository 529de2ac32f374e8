"""Memory limits of machines, and the time that their networks add to a step."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

import geo_ray
from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.base.load import load_tree
from geo_ray.data.tasks.bytelm import ByteLM
from geo_ray.data.tasks.ctr import Ctr
from geo_ray.data.tasks.digits import Digits
from geo_ray.data.tasks.images import Images
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.prices.price_book import Instance
from geo_ray.runs import plan_inputs
from geo_ray.runs.build import initial_parameters
from geo_ray.runs.follow_plan import changes_of, emulation_of
from geo_ray.runs.plan_inputs import Footprint, model_size

CONFIGS = Path(__file__).parents[3] / "configs"
LARGE = CONFIGS / "planned_large.yaml"
SMALL = (
    "data={generate: {rows_per_shard: 64}, batch_size: 24}",
    "task={use: bytelm, options: {dim: 16, layers: 1, heads: 1, context: 8}}",
    "emulate.link={rate_mbps: 50, delay_s: 0.02}",
    "plan.startup_s=0",
)


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def planned(*overrides: str, policy: str = "optimal") -> Plan:
    return geo_ray.plan(CONFIGS / "planned.yaml", [*SMALL, *overrides], policy=policy).plan


@pytest.mark.parametrize("task", [ByteLM(ByteLM.Options(size="0.1M")), Digits(Digits.Options())])
def test_a_model_is_counted_without_making_it(task):
    assert model_size(task, 0).num_params == initial_parameters(task, 0).numel()


def test_rows_need_what_the_layers_keep():
    """Two linear layers with bias and tanh: 8 inputs, 16 hidden units, 2 outputs."""
    from torch import nn

    class Two(Digits):
        columns: ClassVar = {"x": "float32[8]", "label": "int64"}

        def model(self, seed):
            return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

        def collate(self, columns, device):
            import torch

            return torch.as_tensor(columns["x"], device=device)

        def loss(self, model, batch):
            return model(batch).sum()

    # the first layer's input, and what tanh gives, once for itself and for the second layer
    assert model_size(Two(Digits.Options()), 0).row_bytes == 4 * (8 + 16)


def test_a_task_that_needs_values_is_measured_as_well():
    class Stubborn(Digits):
        def model(self, seed):
            module = super().model(seed)
            assert float(next(module.parameters()).sum()) != math.pi  # needs values
            return module

    size = model_size(Stubborn(Digits.Options()), 0)
    assert size == model_size(Digits(Digits.Options()), 0)


@pytest.mark.parametrize(
    "task",
    [
        ByteLM(ByteLM.Options()),
        Ctr(Ctr.Options()),
        Digits(Digits.Options()),
        Images(Images.Options()),
    ],
    ids=lambda task: type(task).__name__,
)
def test_a_small_model_needs_what_its_outline_says(task, monkeypatch):
    made = model_size(task, 0)
    monkeypatch.setattr(plan_inputs, "_MOST_PARAMS_MADE", 0)
    assert made == model_size(task, 0) and made.row_bytes


def test_a_small_plan_does_not_import_the_compiler():
    """The import takes 2 to 4 s in each planning command."""
    code = (
        "import sys\nfrom geo_ray.data.tasks.bytelm import ByteLM\n"
        "from geo_ray.runs.plan_inputs import model_size\n"
        "assert model_size(ByteLM(ByteLM.Options()), 0).row_bytes\n"
        "assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_copies_of_the_model_are_what_machines_must_hold():
    """Computed by hand: 1e9 parameters are 4 GB per copy."""
    foot = Footprint(10**9, states=2, regions=3, row_bytes=1e9)
    assert (foot.worker_bytes(1), foot.server_bytes) == (8e9, 32e9)  # 2, and 4 + 2 + 2 copies
    assert foot.max_rows(Instance(1, 24, 64), serves=True) == (16, "")
    assert foot.max_rows(Instance(8, 24, 2000), serves=True) == (8 * 16, "")
    assert foot.max_rows(Instance(0, None, 44), serves=True) == (4, "")
    assert foot.max_rows(Instance(0, None, 44), serves=False) == (36, "")
    none, why = foot.max_rows(Instance(1, 8.5, 64), serves=True)
    assert none == 0 and "an accelerator has 8.5 GB" in why and "1 GB per row" in why
    none, why = foot.max_rows(Instance(1, 24, 39), serves=True)
    assert none == 0 and "the machine has 39 GB" in why and "40 GB are needed" in why
    local = Footprint(10**9, states=2, own_steps="always", row_bytes=None)
    assert local.worker_bytes(1) == local.worker_bytes(2) == 16e9 and local.server_bytes == 24e9
    alone = Footprint(10**9, states=2, own_steps="alone", row_bytes=None)
    assert (alone.worker_bytes(1), alone.worker_bytes(2)) == (16e9, 8e9)
    assert local.max_rows(Instance(), serves=True) == (math.inf, "")


def test_machines_that_do_not_hold_the_model_are_left_out_with_the_reason():
    us = "plan.regions.us.machines=[{type: g5.xlarge, cap: 8, rows_per_s: 120, %s},"
    us += " {type: g4dn.xlarge, cap: 8, rows_per_s: 50}]"
    plan = planned(us % "accelerator_gb: 0.00001")
    assert {m.type for m in plan.regions[0].machines} == {"g4dn.xlarge"}
    assert any(
        note.startswith("us: no g5.xlarge: an accelerator has 1e-05 GB") for note in plan.notes
    )
    with pytest.raises(
        PlanInfeasibleError, match=r"enough memory: g5.xlarge: .*; g4dn.xlarge: the machine"
    ):
        planned((us % "host_gb: 0.00001").replace("50}", "50, host_gb: 0.00001}"))


def test_rows_beyond_the_memory_of_a_machine_go_to_others():
    """8 rows fit on each machine, so 96 rows need 12 machines, although one would be cheaper."""
    offer = "plan.regions.us.machines=[{type: g5.xlarge, cap: %d, rows_per_s: 120,"
    offer += " accelerator_gb: 0.085}]"
    more = ("plan.activation_mb_per_row=10", "plan.deadline_h=2000")
    plan = planned(offer % 20, *more)
    assert plan.regions[0].workers == 12 and set(plan.regions[0].batch_sizes) == {8}
    with pytest.raises(
        PlanInfeasibleError, match="96 rows of a step, but its machines have memory"
    ):
        planned(offer % 11, *more)


def test_networks_inside_a_region_count_for_all_but_the_servers_own_machine():
    one = "plan.regions.us.machines=[{type: g5.xlarge, cap: %d, count: %d, rows_per_s: 120,"
    one += " network_gbps: 0.001}]"
    others = [
        f"plan.regions.{n}.machines=[{{type: g5.xlarge, cap: 1, count: 1, rows_per_s: 120}}]"
        for n in ("eu", "asia")
    ]
    off = ["plan.regions.us.server=null", "plan.step_overhead_s=0"]
    for count, server in ((1, None), (3, None), (3, "m5.2xlarge")):
        plan = planned(
            one % (count, count),
            *others,
            *off[1:],
            f"plan.regions.us.server={server or 'null'}",
            policy="fixed",
        )
        sent_mbit = 2 * 32e-6 * plan.model.num_params * (count - (server is None))
        assert plan.regions[0].step_s == pytest.approx(96 / count / 120 + sent_mbit / 1)


def test_several_accelerators_are_several_workers_of_one_machine():
    offer = "plan.regions.us.machines=[{type: g5.xlarge, cap: 1, count: 1, rows_per_s: 400,"
    offer += " accelerators: 5, network_gbps: 0.001}]"
    others = [
        f"plan.regions.{n}.machines=[{{type: g5.xlarge, cap: 1, count: 1, rows_per_s: 120}}]"
        for n in ("eu", "asia")
    ]
    sets = [offer, *others, "plan.step_overhead_s=0", "plan.regions.us.server=m5.2xlarge"]
    plan = planned(*sets, policy="fixed")
    us = plan.regions[0]
    assert (us.workers, us.batch_sizes) == (5, (20, 19, 19, 19, 19))
    sent_mbit = 5 * 2 * 32e-6 * plan.model.num_params
    assert us.step_s == pytest.approx(96 / 400 + sent_mbit / 1)
    experiment = load_tree(CONFIGS / "planned.yaml", [*SMALL, *sets], Experiment)
    followed = load_tree(
        CONFIGS / "planned.yaml",
        [*SMALL, *sets, *changes_of(plan, experiment), *emulation_of(plan)],
        Experiment,
    )
    assert followed.regions[0].workers == 5
    assert followed.emulate.rows_per_s_by_region["us"] == (80.0,) * 5


def test_what_is_not_counted_is_said():
    plan = planned()
    said = " ".join(plan.notes)
    assert "the work of the parameter server" in said and "disks are not counted" in said
    assert "traffic between machines" not in said, "networks of these types are known"
    given = " ".join(planned("plan.step_overhead_s=0.1", "plan.lan_s_per_machine=0").notes)
    assert "own work" not in given


def test_a_plan_for_1_3_billion_parameters_that_holds_them():
    """The documented example: small cards are left out, one machine of eight a region."""
    plan = geo_ray.plan(LARGE).plan
    assert plan.model.num_params == 1_311_940_608
    assert all(
        [(m.type, m.count, m.workers, m.rows) for m in region.machines]
        == [("p4d.24xlarge", 1, 8, 32)]
        for region in plan.regions
    )
    for name in ("us", "eu", "asia"):
        for small, size in (("g4dn.xlarge", "16 GB"), ("g5.xlarge", "24 GB")):
            why = f"{name}: no {small}: an accelerator has {size} of memory, but 21 GB are needed"
            assert any(note.startswith(why) for note in plan.notes)
    # one machine a region: its workers share memory with the parameter server
    assert all(region.fixed_s == 8 for region in plan.regions)
    assert plan.interval >= 64 and plan.seconds["between regions"] < 0.05 * plan.total_s
    held_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1e-6
    assert held_gb < 4, "5.2 GB would be one copy of the model"
