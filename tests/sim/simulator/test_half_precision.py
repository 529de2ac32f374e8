"""Parameters of half precision with fp32 masters, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geo_ray
from geo_ray.base.errors import TaskOutputError
from geo_ray.data.tasks.checked_calls import checked_model
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.model_file import module_with
from tests.support.world_support import BASE, Run, experiment

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
HALVES = {"Bfloat16": torch.bfloat16, "Float16": torch.float16}
ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}
STEPS = 8


class Plain:
    """The usual way: fp32 masters with torch's optimizer, copied to the model after each step."""

    def __init__(self, run: Run, config: Experiment, region: str) -> None:
        self.task = load_task(TaskConfig(**config.task.model_dump()), Path())
        self.model: nn.Module = self.task.model(config.seed)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.01, weight_decay=0.1, fused=True)
        self.reader = run.world.regions[region]._train
        self.parts = config.train.accumulate

    def grads(self, number: int) -> list[Tensor]:
        sums = [torch.zeros_like(each) for each in self.masters]
        for part in range(self.parts):
            self.model.zero_grad()
            rows = 4 // self.parts
            columns = self.reader.read(4 * number + part * rows, rows)
            batch = self.task.collate(columns, torch.device("cpu"))
            loss = self.task.loss(self.model, batch)
            (loss if self.parts == 1 else loss * (1 / self.parts)).backward()
            for total, p in zip(sums, self.model.parameters(), strict=True):
                total += p.grad.float()
        return sums

    def step(self, grads: list[Tensor]) -> None:
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.clone()
        self.optimizer.step()
        self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            p.copy_(master)

    def vector(self) -> Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.masters])


def config_of(kind: str, **sections: Any) -> Experiment:
    train = {"steps": STEPS, "eval_every": 0} | sections.pop("train", {})
    task = {"use": f"{TASKS}:{kind}"}
    return experiment(task=task, optimizer=ADAMW, train=train, **sections)


def near(run: Run, wanted_P: Tensor) -> None:
    for found_P in run.result.params_P.values():
        torch.testing.assert_close(found_P, wanted_P, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("on", ["server", "worker"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", HALVES)
def test_one_region_is_plain_training_with_masters(
    data_dir, kind: str, parts: int, on: str
) -> None:
    train = {"accumulate": parts, "optimizer_on": on}
    config = config_of(kind, regions=[{"name": "a"}], train=train)
    run = Run(config, data_dir).go()
    plain = Plain(run, config, "a")
    start_P = plain.vector()
    for number in range(STEPS):
        plain.step(plain.grads(number))
    near(run, plain.vector())
    assert float((plain.vector() - start_P).abs().max()) > 1e-2
    model = module_with(plain.task, config.seed, [run.result.params_P["a"]])
    assert model.first.weight.dtype == HALVES[kind] and model.norm.weight.dtype == torch.float32
    for found, wanted in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_regions_are_averaged_in_fp32(data_dir, shards: int) -> None:
    regions = [{"name": name, "ps_shards": shards} for name in "ab"]
    config = config_of("Bfloat16", regions=regions, strategy={"kind": "bsp"})
    run = Run(config, data_dir).go()
    plain = [Plain(run, config, name) for name in "ab"]
    for number in range(STEPS):
        one, other = (each.grads(number) for each in plain)
        for each in plain:
            each.step([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    near(run, plain[0].vector())


def test_masters_are_averaged_and_rounded_again(data_dir) -> None:
    config = config_of("Bfloat16", strategy={"kind": "sma", "interval": 2})
    run = Run(config, data_dir).go()
    plain = [Plain(run, config, name) for name in "ab"]
    for number in range(STEPS):
        for each in plain:
            each.step(each.grads(number))
        if number % 2:
            mean_P = (plain[0].vector() + plain[1].vector()) / 2
            for each in plain:
                nn.utils.vector_to_parameters(mean_P.clone(), each.masters)
                each.copy()
    near(run, plain[0].vector())


@pytest.mark.parametrize("on", ["server", "worker"])
def test_a_resumed_run_has_the_same_bits(data_dir, on: str) -> None:
    train = {"optimizer_on": on}
    config = config_of("Bfloat16", checkpoint={"every_s": None}, train=train)
    whole = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.5 * whole.result.seconds, 1)
    killed.go()
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == whole.digests()


def test_many_workers_compute_one_after_another(data_dir) -> None:
    config = config_of("Bfloat16", regions=[{"name": "a", "workers": 16}], train={"steps": 2})
    run = Run(config, data_dir)
    gradients = run.world.regions["a"]._gradients
    assert gradients is not None and not gradients.works
    run.go()


def test_files_of_the_model_keep_its_types(tmp_path) -> None:
    sections = {"task": {"use": f"{TASKS}:Bfloat16"}, "run": {"dir": str(tmp_path)}}
    model = geo_ray.simulate(BASE | sections).model()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}


def test_other_types_are_refused_by_name() -> None:
    class Double:
        def model(self, seed: int) -> nn.Module:
            return nn.Linear(2, 2, dtype=torch.float64)

    with pytest.raises(TaskOutputError, match=r"'weight' is torch\.float64"):
        checked_model(Double(), 0)
