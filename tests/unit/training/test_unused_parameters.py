"""Parameters without a gradient are skipped as torch skips them, with their own step counts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from geo_ray.base.types import Span, StepReport, unused_by_all
from geo_ray.data.tasks.groups import ParameterGroup, parameter_runs
from geo_ray.training.optimizers import (
    Adafactor,
    AdamW,
    InnerOptimizer,
    Lion,
    Momentum,
    Muon,
    RateSchedule,
    Sgd,
    orthogonalised,
)
from geo_ray.training.parameters import pieces_of, read_parameters, split_sizes
from geo_ray.training.wire_format import read_reports, report_meta
from geo_ray.training.worker import FlatModel

STEPS = 12
SCHEDULE = RateSchedule(kind="linear", warmup_steps=2, steps=STEPS, last=0.2)
SPLIT = [
    Sgd(lr=0.1, weight_decay=0.3),
    Momentum(lr=0.05, momentum=0.8, weight_decay=0.2, schedule=SCHEDULE),
    Momentum(lr=0.05, nesterov=True, weight_decay=0.2),
    AdamW(lr=1e-2, weight_decay=0.1, schedule=SCHEDULE),
    AdamW(lr=1e-2, weight_decay=0.1),
    Lion(lr=1e-3, weight_decay=0.2),
]
WHOLE = [Muon(lr=0.02, weight_decay=0.1), Adafactor(lr=0.03, weight_decay=0.1)]


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(7, 19),
            "norm": nn.LayerNorm(19),
            "up": nn.Linear(19, 48),
            "down": nn.Linear(48, 19),
            "head": nn.Linear(19, 7),
            "spare": nn.Linear(3, 3),
        }
    )


def grads_of(model: nn.Module, *, first: bool) -> list[list[Tensor | None]]:
    """Each parameter is used in a pattern of its own; the spare ones never.

    ``first``: all but the spare ones are used in the first step.
    """
    generator = torch.Generator().manual_seed(11)
    names = [name for name, _ in model.named_parameters()]
    steps: list[list[Tensor | None]] = []
    for number in range(STEPS):
        step: list[Tensor | None] = []
        for index, (name, p) in enumerate(zip(names, model.parameters(), strict=True)):
            grad = torch.randn(p.shape, generator=generator)
            used = number % (1 + index % 4) == 0 and not (number < 2 and index == 3 and not first)
            step.append(grad if used and not name.startswith("spare") else None)
        steps.append(step)
    return steps


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = 0.9 * m + 0.1 * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                m.copy_(0.99 * m + 0.01 * p.grad)


def theirs(config: Any, steps: list[list[Tensor | None]]) -> Tensor:
    """Torch's optimizers, which skip parameters whose gradient is None."""
    model = model_of()
    named = dict(model.named_parameters())
    every = {"lr": config.lr, "weight_decay": config.weight_decay}
    optimizers: list[Any]
    if config.kind == "adamw":
        optimizers = [torch.optim.AdamW(named.values(), fused=True, **every)]
    elif config.kind == "lion":
        optimizers = [PaperLion(named.values(), **every)]
    elif config.kind == "adafactor":
        optimizers = [torch.optim.Adafactor(named.values(), **every)]
    elif config.kind == "muon":
        hidden = [named.pop(name) for name in ("up.weight", "down.weight", "head.weight")]
        betas = (config.adamw.beta1, config.adamw.beta2)
        optimizers = [
            torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **every),
            torch.optim.AdamW(named.values(), betas=betas, fused=True, **every),
        ]
    else:
        momentum, nesterov = (getattr(config, key, 0.0) for key in ("momentum", "nesterov"))
        optimizers = [
            torch.optim.SGD(named.values(), momentum=momentum, nesterov=bool(nesterov), **every)
        ]
    factor = (lambda _: 1.0) if config.schedule is None else config.schedule.factor
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in optimizers]
    for step in steps:
        for p, grad in zip(model.parameters(), step, strict=True):
            p.grad = None if grad is None else grad.clone()
        for each in (*optimizers, *schedules):
            each.step()
    return read_parameters(model)


class Task:
    def __init__(self, *groups: ParameterGroup) -> None:
        self.given = groups

    def groups(self, _: nn.Module) -> tuple[ParameterGroup, ...]:
        return self.given


HEAD = Task(ParameterGroup("head.*", hidden=True), ParameterGroup("spare.*", hidden=False))


def ours(
    config: Any, steps: list[list[Tensor | None]], *, shards: int = 1, flat: bool, resume: int = -1
) -> Tensor:
    model = model_of()
    params_P, runs = read_parameters(model), parameter_runs(HEAD, model)
    slices = [(a, b, params_P[a:b].clone()) for a, b in split_sizes(params_P.numel(), shards)]

    def fresh() -> list[InnerOptimizer]:
        return [InnerOptimizer(config, s, pieces_of(runs, (a, b)), flat=flat) for a, b, s in slices]

    inner = fresh()
    for number, step in enumerate(steps):
        if number == resume:
            before, inner = inner, fresh()
            for new, old in zip(inner, before, strict=True):
                saved = old.export()
                new.restore({name: value.clone() for name, value in saved.items()})
                for name, value in new.export().items():
                    assert torch.equal(value, saved[name]), name
        whole_P = torch.cat(
            [
                torch.zeros(p.numel()) if grad is None else grad.reshape(-1)
                for p, grad in zip(model.parameters(), step, strict=True)
            ]
        )
        unused = [index for index, grad in enumerate(step) if grad is None]
        for optimizer, (a, b, _) in zip(inner, slices, strict=True):
            optimizer.apply(whole_P[a:b].clone(), unused)
    return torch.cat([s for _, _, s in slices])


@pytest.mark.parametrize("resume", [-1, 5])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "groups"])
@pytest.mark.parametrize("config", SPLIT, ids=lambda c: f"{c.kind}-{c.schedule is not None}")
def test_steps_are_those_of_torch(config: Any, flat: bool, shards: int, resume: int) -> None:
    """To the bit, because the first step already has parameters without a gradient."""
    steps = grads_of(model_of(), first=False)
    found_P = ours(config, steps, shards=shards, flat=flat, resume=resume)
    wanted_P = theirs(config, steps)
    if config.kind == "lion":
        torch.testing.assert_close(found_P, wanted_P, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found_P, wanted_P)


@pytest.mark.parametrize("resume", [-1, 5])
@pytest.mark.parametrize("config", WHOLE, ids=lambda c: c.kind)
def test_optimizers_of_whole_parameters_skip_too(config: Any, resume: int) -> None:
    def single(x: Tensor, _: Any, count: int, __: float) -> Tensor:
        return orthogonalised(x, count)

    steps = grads_of(model_of(), first=True)
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", single):
        wanted_P = theirs(config, steps)
    found_P = ours(config, steps, flat=False, resume=resume)
    torch.testing.assert_close(found_P, wanted_P, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("config", SPLIT[:5], ids=lambda c: f"{c.kind}-{c.schedule is not None}")
def test_a_later_first_gap_changes_rounding_only_and_no_shard(config: Any, shards: int) -> None:
    steps = [[torch.randn(p.shape) for p in model_of().parameters()] for _ in range(3)]
    steps += grads_of(model_of(), first=False)
    found_P = ours(config, steps, shards=shards, flat=True, resume=6)
    assert torch.equal(found_P, ours(config, steps, flat=True))
    torch.testing.assert_close(found_P, theirs(config, steps), rtol=1e-6, atol=1e-6)


def test_an_expert_used_in_one_step_of_eight_moves_as_far_as_in_torch() -> None:
    """0.183 with gradients of zero, because momentum and weight decay still act."""
    params_P = torch.ones(2)
    model = nn.ParameterList([torch.ones(1), torch.ones(1)])
    pieces = pieces_of(parameter_runs(object(), model), (0, 2))
    optimizer = InnerOptimizer(AdamW(lr=0.01, weight_decay=0.1), params_P, pieces, flat=True)
    for number in range(40):
        used = number % 8 == 0
        optimizer.apply(torch.tensor([1.0, 1.0 if used else 0.0]), () if used else (1,))
    assert 1 - float(params_P[1]) == pytest.approx(0.055, abs=5e-4)
    assert 1 - float(params_P[0]) > 0.3


def test_what_a_codec_still_owes_is_applied() -> None:
    params_P = torch.ones(2)
    model = nn.ParameterList([torch.ones(1), torch.ones(1)])
    pieces = pieces_of(parameter_runs(object(), model), (0, 2))
    optimizer = InnerOptimizer(Sgd(lr=0.5), params_P, pieces, flat=True)
    optimizer.apply(torch.tensor([0.0, 1.0]), (0, 1))
    assert params_P.tolist() == [1.0, 0.5]


# ------------------------------------------------------------------ what has a gradient


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        self.c = nn.Embedding(4, 3, sparse=True)


def flat_of(module: nn.Module) -> FlatModel:
    params_P = read_parameters(module)
    return FlatModel(module, params_P, torch.zeros_like(params_P))


def test_hooks_tell_a_zero_gradient_from_none() -> None:
    module, x = Branches(), torch.ones(2, 3)
    flat = flat_of(module)
    (module.a(x).sum() * 0).backward()
    flat.take_gradient()
    assert flat.unused() == (1, 2)
    flat.zero_grad()
    module.b(module.c(torch.tensor([1]))).sum().backward()
    flat.take_gradient()
    assert flat.unused() == (0,)


def test_gradients_that_user_code_drops_or_writes_itself_count_as_torch_counts_them() -> None:
    module, x = Branches(), torch.ones(2, 3)
    flat = flat_of(module)
    flat.zero_grad()
    module.zero_grad()
    module.a(x).sum().backward()
    module.b.weight.grad = torch.ones(1, 3)
    flat.take_gradient()
    assert flat.unused() == (2,)
    flat.zero_grad()
    module.b.weight.grad.copy_(torch.ones(1, 3))
    flat.take_gradient()
    assert flat.unused() == (0, 2)


def test_a_parameter_is_unused_if_no_part_of_the_step_uses_it() -> None:
    assert unused_by_all([(1, 2, 5), (2, 5, 6)]) == (2, 5)
    assert unused_by_all([(1,), ()]) == () == unused_by_all([])


def test_reports_without_gaps_have_the_header_that_they_had() -> None:
    report = StepReport(Span(0, 4), 1.0, 0.5)
    assert "unused" not in report_meta(report)
    skipped = StepReport(Span(0, 4), 1.0, 0.5, unused=(3, 7))
    (found,) = read_reports(report_meta(skipped))
    assert report_meta(skipped)["unused"] == [3, 7] == found.unused
