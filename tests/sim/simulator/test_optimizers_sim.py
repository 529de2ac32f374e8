"""Muon, Lion, Adafactor and `muloco` in whole runs, against plain PyTorch; and their resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from geo_ray.base.errors import ConfigError
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.training.parameters import read_parameters
from tests.support.world_support import Run, experiment

TASK = {"use": f"{Path(__file__).parents[2] / 'support' / 'buffer_tasks.py'}:Ungrouped"}
STEPS, NEAR = 12, 1e-6
MUON = {"kind": "muon", "lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 0.01}}
LION = {"kind": "lion", "lr": 0.003, "weight_decay": 0.2}
ADAFACTOR = {"kind": "adafactor", "lr": 0.03}
WSD = {"kind": "wsd", "warmup_steps": 3, "decay_steps": 4, "last": 0.1}
TRAIN = {"steps": STEPS, "eval_every": 0}


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = 0.9 * m + 0.1 * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                m.copy_(0.99 * m + 0.01 * p.grad)


def newton_schulz(x: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """Jordan's iteration in single precision; torch's own rounds to bfloat16."""
    a, b, c = coefficients
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / max(float(torch.linalg.norm(wide)), eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


@pytest.fixture(autouse=True)
def single_precision() -> Iterator[None]:
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz):
        yield


class Plain:
    """A model with torch's optimizers, and the rows of one region of a run."""

    def __init__(self, run: Run, config: Experiment, region: str) -> None:
        self.task = load_task(TaskConfig(**config.task.model_dump()), Path())
        self.model: nn.Module = self.task.model(config.seed)
        self._reader = run.world.regions[region]._train
        named = dict(self.model.named_parameters())
        hidden = named.pop("1.weight")  # of 64 x 12; the last layer is the output
        ours: Any = config.optimizer
        self.optimizers: list[Any]
        if ours.kind == "muon":
            betas, lr = (0.9, 0.95), ours.adamw.lr
            common = {"weight_decay": ours.weight_decay}
            self.optimizers = [
                torch.optim.Muon([hidden], lr=ours.lr, adjust_lr_fn="match_rms_adamw", **common),
                torch.optim.AdamW(named.values(), lr=lr, betas=betas, **common),
            ]
        elif ours.kind == "lion":
            self.optimizers = [PaperLion(self.model.parameters(), ours.lr, ours.weight_decay)]
        else:
            self.optimizers = [torch.optim.Adafactor(self.model.parameters(), lr=ours.lr)]
        self.schedules = []
        if ours.schedule is not None:
            part = torch.optim.lr_scheduler
            for each in self.optimizers:
                parts = [
                    part.LinearLR(each, 1 / 3, total_iters=2),
                    part.ConstantLR(each, 1.0),
                    part.LinearLR(each, 1.0, 0.1, 4),
                ]
                self.schedules.append(part.SequentialLR(each, parts, [3, STEPS - 4]))

    def step(self, number: int) -> None:
        self.model.zero_grad()
        columns = self._reader.read(4 * number, 4)
        self.task.loss(self.model, self.task.collate(columns, torch.device("cpu"))).backward()
        for each in (*self.optimizers, *self.schedules):
            each.step()


@pytest.mark.parametrize("schedule", [None, WSD], ids=["constant", "wsd"])
@pytest.mark.parametrize("optimizer", [MUON, LION, ADAFACTOR], ids=lambda each: each["kind"])
def test_a_run_is_plain_training(data_dir, optimizer: dict[str, Any], schedule: Any) -> None:
    optimizer = optimizer | {"schedule": schedule}
    config = experiment(task=TASK, regions=[{"name": "a"}], optimizer=optimizer, train=TRAIN)
    run = Run(config, data_dir).go()
    plain = Plain(run, config, "a")
    start_P = read_parameters(plain.model)
    for number in range(STEPS):
        plain.step(number)
    wanted_P = read_parameters(plain.model)
    assert float((run.result.params_P["a"] - wanted_P).abs().max()) < NEAR
    assert float((wanted_P - start_P).abs().max()) > 1e-3


def test_muloco_is_the_algorithm_of_its_paper(data_dir) -> None:
    """Muon inside, Nesterov of the mean pseudo-gradient outside, as the authors' code has it."""
    strategy = {"kind": "muloco", "interval": 4, "outer": {"kind": "nesterov", "momentum": 0.6}}
    config = experiment(task=TASK, optimizer=MUON, strategy=strategy, train=TRAIN)
    run = Run(config, data_dir).go()
    regions = [Plain(run, config, name) for name in "ab"]
    reference_P = read_parameters(regions[0].model)
    u_P = torch.zeros_like(reference_P)
    for number in range(STEPS):
        for plain in regions:
            plain.step(number)
        if (number + 1) % 4:
            continue
        delta_P = sum(reference_P - read_parameters(plain.model) for plain in regions) / 2
        u_P = 0.6 * u_P + 0.7 * delta_P
        reference_P = reference_P - 0.6 * u_P - 0.7 * delta_P
        for plain in regions:
            nn.utils.vector_to_parameters(reference_P.clone(), plain.model.parameters())
    for params_P in run.result.params_P.values():
        assert float((params_P - reference_P).abs().max()) < NEAR


@pytest.mark.parametrize("optimizer", [MUON, LION, ADAFACTOR], ids=lambda each: each["kind"])
def test_a_resumed_run_has_the_same_bits(data_dir, optimizer: dict[str, Any]) -> None:
    sections = {
        "task": TASK,
        "optimizer": optimizer | {"schedule": WSD},
        "train": TRAIN,
        "checkpoint": {"every_s": None},
    }
    config = experiment(**sections)
    whole = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.6 * whole.result.seconds, 1)
    assert killed.go().digests() == whole.digests()
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == whole.digests()


def test_workers_with_local_steps_use_them_too(data_dir) -> None:
    digests = set()
    for optimizer in (MUON, LION, ADAFACTOR):
        config = experiment(
            task=TASK,
            strategy={"kind": "hfa", "k1": 2, "k2": 2},
            optimizer=optimizer,
            regions=[{"name": "a", "workers": 2}, {"name": "b"}],
        )
        digests |= set(Run(config, data_dir).go().digests().values())
    assert len(digests) == 3  # one model per optimizer, equal in both regions


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_shards_of_whole_parameters_are_refused(kind: str) -> None:
    regions = [{"name": "a"}, {"name": "b", "ps_shards": 2}]
    with pytest.raises(ConfigError) as caught:
        experiment(optimizer={"kind": kind}, regions=regions)
    assert "optimizer.kind" in caught.value.message and "ps_shards: 1 in b" in caught.value.message
    experiment(optimizer={"kind": "lion"}, regions=regions)


def test_muloco_needs_muon() -> None:
    with pytest.raises(ConfigError, match="the strategy requires muon"):
        experiment(strategy={"kind": "muloco"})
    experiment(strategy={"kind": "muloco"}, regions=[{"name": "a"}])  # nothing is exchanged
