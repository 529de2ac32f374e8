"""Groups of parameters: the bits of torch's own optimizers with the same groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geo_ray.base.errors import TaskStateError
from geo_ray.data.tasks.groups import ParameterGroup, group_runs, undecayed
from geo_ray.training.optimizers import AdamW, InnerOptimizer, Momentum, RateSchedule, Sgd
from geo_ray.training.parameters import pieces_of, read_parameters, split_sizes

SCHEDULE = RateSchedule(kind="linear", warmup_steps=2, steps=8, last=0.2)
CONFIGS = [
    Sgd(lr=0.1, weight_decay=0.03),
    Momentum(lr=0.05, momentum=0.8, weight_decay=0.02, schedule=SCHEDULE),
    Momentum(lr=0.05, nesterov=True, weight_decay=0.02),
    AdamW(lr=1e-2, weight_decay=0.1, schedule=SCHEDULE),
    AdamW(lr=1e-2, weight_decay=0.1),
]
STEPS = 6


class Grouped:
    """Parameters of many sizes: below, at and above those of vector registers and blocks."""

    def __init__(self, groups: Any = None) -> None:
        self.given = groups

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(7, 19),
                "norm": nn.LayerNorm(19),
                "body": nn.Linear(19, 64),
                "head": nn.Linear(64, 3),
            }
        )

    def groups(self, model: nn.Module) -> Any:
        if self.given is not None:
            return self.given
        return [
            ParameterGroup("head.*", rate=3.0, decay=0.5, schedule=0.25),
            undecayed(model),
            ParameterGroup(["embed.weight"], schedule=0.0),
        ]


def torch_alone(config: Any, grads: list[list[Tensor]]) -> Tensor:
    """The oracle: torch's optimizer with groups, and a schedule per group by torch's own means."""
    model = Grouped().model(3)
    named = dict(model.named_parameters())
    head = [p for n, p in named.items() if n.startswith("head")]
    flat = [p for n, p in named.items() if p.ndim < 2 and not n.startswith("head")]
    rest, embed = [named["body.weight"]], [named["embed.weight"]]
    lr, decay = config.lr, config.weight_decay
    groups = [
        {"params": head, "lr": lr * 3.0, "weight_decay": decay * 0.5},
        {"params": flat, "lr": lr, "weight_decay": 0.0},
        {"params": embed, "lr": lr, "weight_decay": decay},
        {"params": rest, "lr": lr, "weight_decay": decay},
    ]
    if isinstance(config, AdamW):
        optimizer: Any = torch.optim.AdamW(
            groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
    else:
        momentum = getattr(config, "momentum", 0.0)
        nesterov = getattr(config, "nesterov", False)
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    schedule = None
    if config.schedule is not None:
        factor = config.schedule.factor
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda t: 1.0 + 0.25 * (factor(t) - 1.0), factor, lambda t: 1.0, factor]
        )
    for step in grads:
        for parameter, grad in zip(model.parameters(), step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return read_parameters(model)


def grads_of(model: nn.Module) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        for _ in range(STEPS)
    ]


def flat_of(step: list[Tensor]) -> Tensor:
    return torch.cat([grad.reshape(-1) for grad in step])


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kind}-{c.schedule is not None}")
def test_shards_of_groups_have_the_bits_of_torch(config: Any, shards: int) -> None:
    task = Grouped()
    model = task.model(3)
    params_P, runs, grads = read_parameters(model), group_runs(task, model), grads_of(model)
    slices = [(a, b, params_P[a:b].clone()) for a, b in split_sizes(params_P.numel(), shards)]
    inner = [InnerOptimizer(config, s, pieces_of(runs, (a, b))) for a, b, s in slices]
    for number, step in enumerate(grads):
        if number == 3:  # a resume in between
            fresh = [InnerOptimizer(config, s, pieces_of(runs, (a, b))) for a, b, s in slices]
            for new, old in zip(fresh, inner, strict=True):
                new.restore(old.export())
            inner = fresh
        for optimizer, (a, b, _) in zip(inner, slices, strict=True):
            optimizer.apply(flat_of(step)[a:b].clone())
    assert torch.equal(torch.cat([s for _, _, s in slices]), torch_alone(config, grads))


def test_pieces_cover_a_slice_once_wherever_it_is_cut() -> None:
    runs = group_runs(Grouped(), Grouped().model(0))
    total = runs[-1].stop
    for first, last in itertools.combinations(range(0, total + 1, 23), 2):
        pieces = pieces_of(runs, (first, last))
        assert [p.start for p in pieces] == [0, *[p.stop for p in pieces[:-1]]]
        assert pieces[-1].stop == last - first
        for piece in pieces:
            length, at = piece.block or (piece.stop - piece.start, 0)
            assert at + piece.stop - piece.start <= length


def test_state_is_the_same_with_groups_and_without() -> None:
    """So a checkpoint that was made without groups goes on with them."""
    task = Grouped([ParameterGroup("*")])
    model = task.model(3)
    runs, grads = group_runs(task, model), [flat_of(step) for step in grads_of(model)]
    params_P = read_parameters(model)
    config = AdamW()
    plain = InnerOptimizer(config, params_P.clone())
    grouped = InnerOptimizer(config, params_P.clone(), pieces_of(runs, (0, params_P.numel())))
    plain.apply(grads[0])
    grouped.restore(plain.export())
    assert plain.export().keys() == grouped.export().keys()
    for name, value in plain.export().items():
        assert torch.equal(value, grouped.export()[name])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup("hed.*")], "'hed.*' matches no trained parameter"),
        ([ParameterGroup("head.*", rate=-1.0)], "invalid factors"),
        ([ParameterGroup("head.*", schedule=2.0)], "invalid factors"),
        ([{"params": []}], "returned dict"),
    ],
)
def test_what_is_no_group_is_named(groups: Any, message: str) -> None:
    task = Grouped(groups)
    with pytest.raises(TaskStateError) as caught:
        group_runs(task, task.model(0))
    assert message in caught.value.message


def test_without_groups_nothing_is_cut() -> None:
    assert group_runs(object(), Grouped().model(0)) == ()
    assert group_runs(Grouped([]), Grouped().model(0)) == ()
