"""Lion, Muon, Adafactor, warmup-stable-decay: against torch, or the rules of their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.data.tasks.groups import ParameterGroup, parameter_runs
from geo_ray.training.optimizers import (
    Adafactor,
    AdamWOfOthers,
    InnerOptimizer,
    Lion,
    Muon,
    RateSchedule,
    orthogonalised,
)
from geo_ray.training.parameters import pieces_of, read_parameters

STEPS = 8
NEAR = 1e-6
WSD = RateSchedule(kind="wsd", warmup_steps=2, steps=STEPS, decay_steps=3, last=0.2)


class Small:
    """An embedding, a wide and a tall hidden matrix, a norm, a filter bank and an output layer."""

    def __init__(self, *groups: ParameterGroup) -> None:
        self._groups = groups

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(7, 19),
                "norm": nn.LayerNorm(19),
                "up": nn.Linear(19, 48),
                "filter": nn.Conv1d(2, 3, 5),
                "down": nn.Linear(48, 19),
                "head": nn.Linear(19, 7),
            }
        )

    def groups(self, _: nn.Module) -> tuple[ParameterGroup, ...]:
        return self._groups


HIDDEN = {"up.weight", "down.weight"}


def grads_of(model: nn.Module) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        for _ in range(STEPS)
    ]


def ours(config: Any, task: Small | None = None, resume_after: int | None = None) -> Tensor:
    task = Small() if task is None else task
    model = task.model(3)
    params_P = read_parameters(model)
    pieces = pieces_of(parameter_runs(task, model), (0, params_P.numel()))
    optimizer = InnerOptimizer(config, params_P, pieces)
    for number, step in enumerate(grads_of(model)):
        if number == resume_after:
            saved = {name: value.clone() for name, value in optimizer.export().items()}
            optimizer = InnerOptimizer(config, params_P, pieces)
            optimizer.restore(saved)
        optimizer.apply(torch.cat([grad.reshape(-1) for grad in step]))
    return params_P


def theirs(build: Callable[[dict[str, nn.Parameter]], Iterable[Any]], config: Any = None) -> Tensor:
    """Steps of torch's objects, or of a rule with the same methods."""
    model = Small().model(3)
    optimizers = list(build(dict(model.named_parameters())))
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    for number, step in enumerate(grads_of(model)):
        for parameter, grad in zip(model.parameters(), step, strict=True):
            parameter.grad = grad.clone()
        factor = 1.0 if config is None else wsd_rates()[number]
        groups = [group for each in optimizers for group in each.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        for each in optimizers:
            each.step()
    return read_parameters(model)


def wsd_rates() -> list[float]:
    """The schedule `WSD` from torch's own parts."""
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler
    parts = [
        schedule.LinearLR(plain, 0.5, total_iters=1),
        schedule.ConstantLR(plain, 1.0),
        schedule.LinearLR(plain, 1.0, 0.2, 3),
    ]
    whole = schedule.SequentialLR(plain, parts, [2, STEPS - 3])
    rates = []
    for _ in range(STEPS):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        whole.step()
    return rates


def test_warmup_stable_decay_has_the_rates_of_torch() -> None:
    assert [WSD.factor(t) for t in range(STEPS)] == pytest.approx(wsd_rates())
    assert WSD.factor(STEPS) == WSD.factor(1000) == pytest.approx(0.2)
    tenth = RateSchedule(kind="wsd", steps=100, last=0.0)
    assert tenth.factor(89) == tenth.factor(90) == 1.0 and tenth.factor(95) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="decay_steps"):
        RateSchedule(kind="cosine", decay_steps=3)


# ------------------------------------------------------------------ Muon


def newton_schulz(x: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """Jordan's iteration as published, in double precision."""
    a, b, c = coefficients
    x = x.double()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / max(float(torch.linalg.norm(wide)), eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).float()


def muon_of(
    config: Muon, hidden: Iterable[str] = HIDDEN
) -> Callable[[dict[str, nn.Parameter]], list[Any]]:
    def build(named: dict[str, nn.Parameter]) -> list[Any]:
        matrices = [p for name, p in named.items() if name in hidden]
        others = [p for name, p in named.items() if name not in hidden]
        rest = config.adamw
        return [
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                adjust_lr_fn=config.scale,
            ),
            torch.optim.AdamW(
                others,
                lr=config.lr if rest.lr is None else rest.lr,
                betas=(rest.beta1, rest.beta2),
                eps=rest.eps,
                weight_decay=(
                    config.weight_decay if rest.weight_decay is None else rest.weight_decay
                ),
            ),
        ]

    return build


MUONS = [
    Muon(lr=0.02, weight_decay=0.1),
    Muon(lr=0.02, nesterov=False, momentum=0.8, scale="original", ns_steps=3),
    Muon(lr=0.02, adamw=AdamWOfOthers(lr=3e-3, weight_decay=0.2, beta1=0.8), schedule=WSD),
]


@pytest.mark.parametrize("config", MUONS, ids=["defaults", "plain", "scheduled"])
def test_muon_is_that_of_torch(config: Muon) -> None:
    """torch's own object, whose iteration alone is replaced: torch makes it in bfloat16."""
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz):
        wanted = theirs(muon_of(config), config.schedule)
    assert float((ours(config) - wanted).abs().max()) < NEAR


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_in_bfloat16_muon_is_that_of_torch_itself(scale: Any) -> None:
    config = Muon(lr=0.02, weight_decay=0.1, ns_dtype="bfloat16", scale=scale)
    assert float((ours(config) - theirs(muon_of(config))).abs().max()) < NEAR


def test_in_single_precision_steps_differ_by_rounding_only() -> None:
    config = Muon(lr=0.02)
    start = read_parameters(Small().model(3))
    moved, wanted = ours(config) - start, theirs(muon_of(config)) - start
    assert float((moved - wanted).norm() / wanted.norm()) < 0.02


def test_the_spectral_scale_is_the_root_of_rows_by_columns() -> None:
    """As in the code of MuLoCo's authors."""
    start = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    for shape in ((6, 24), (24, 6)):
        params_P, grad_P = start.reshape(-1).clone(), start.flip(0).reshape(-1)
        task = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False), nn.Linear(1, 1))
        runs = parameter_runs(object(), task)[:1]
        config = Muon(lr=0.1, weight_decay=0.0, scale="spectral", momentum=0.0, nesterov=False)
        InnerOptimizer(config, params_P, pieces_of(runs, (0, 144))).apply(grad_P)
        step = newton_schulz(grad_P.view(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        wanted = start.reshape(-1) - 0.1 * (shape[0] / shape[1]) ** 0.5 * step.reshape(-1)
        assert float((params_P - wanted).abs().max()) < NEAR


def test_singular_values_become_nearly_one() -> None:
    x = torch.randn(40, 90, generator=torch.Generator().manual_seed(2))
    for matrix in (x, x.T, 1e-4 * x):
        values = torch.linalg.svdvals(orthogonalised(matrix, 5))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert torch.equal(orthogonalised(torch.zeros(3, 2), 5), torch.zeros(3, 2))


def test_a_task_says_which_matrices_are_hidden() -> None:
    config = Muon(lr=0.02, weight_decay=0.0)
    task = Small(
        ParameterGroup("up.weight", hidden=False, rate=0.5),
        ParameterGroup("head.weight", hidden=True),
    )

    def build(named: dict[str, nn.Parameter]) -> list[Any]:
        found = muon_of(config, {"down.weight", "head.weight"})(named)
        others = [p for p in found[1].param_groups[0]["params"] if p is not named["up.weight"]]
        common = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        groups = [{"params": others}, {"params": [named["up.weight"]], "lr": 0.01}]
        return [found[0], torch.optim.AdamW(groups, lr=0.02, **common)]

    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz):
        assert float((ours(config, task) - theirs(build)).abs().max()) < NEAR


def test_hidden_matrices_are_neither_embeddings_nor_the_output() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    def hidden(module: nn.Module) -> list[str]:
        names = [name for name, _ in module.named_parameters()]
        runs = parameter_runs(object(), module)
        return [name for name, run in zip(names, runs, strict=True) if run.hidden]

    class Blocks(nn.Module):
        """Ends with a stack of blocks and a function."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.position = nn.Parameter(torch.zeros(3, 4))
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6)) for _ in range(2))

    assert hidden(Blocks()) == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert set(hidden(Small().model(0))) == HIDDEN
    assert hidden(Tied()) == ["body.weight"]
    assert [run.shape for run in parameter_runs(object(), Tied())] == [(5, 4), (4, 4), (4,)]


# ------------------------------------------------------------------ Adafactor, Lion


@pytest.mark.parametrize(
    "config",
    [
        Adafactor(lr=0.05, weight_decay=0.1),
        Adafactor(lr=0.02, clip_rms=2.0, beta2_decay=-0.5, eps1=1e-8, eps2=1e-2, schedule=WSD),
    ],
    ids=["defaults", "scheduled"],
)
def test_adafactor_is_that_of_torch(config: Adafactor) -> None:
    def build(named: dict[str, nn.Parameter]) -> list[Any]:
        return [
            torch.optim.Adafactor(
                named.values(),
                lr=config.lr,
                beta2_decay=config.beta2_decay,
                eps=(config.eps1, config.eps2),
                d=config.clip_rms,
                weight_decay=config.weight_decay,
            )
        ]

    wanted = theirs(build, config.schedule)
    assert float((ours(config) - wanted).abs().max()) < NEAR


def test_adafactor_is_that_of_its_paper() -> None:
    """Algorithms 4 and 5 with relative steps, in double precision, for one matrix."""
    lr, eps2 = 0.05, 1e-3
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(6, 9, generator=generator)
    grads = [torch.randn(6, 9, generator=generator) for _ in range(STEPS)]
    x, rows, columns = start.double(), torch.zeros(6).double(), torch.zeros(9).double()
    for t, grad in enumerate(grads, 1):
        square, keep = grad.double() ** 2, 1 - t**-0.8
        rows = keep * rows + (1 - keep) * square.mean(1)
        columns = keep * columns + (1 - keep) * square.mean(0)
        step = grad.double() / (torch.outer(rows, columns) / rows.mean()).sqrt()
        step = step / max(1.0, float(step.square().mean().sqrt()))
        x = x - max(eps2, float(x.square().mean().sqrt())) * min(lr, t**-0.5) * step
    params_P = start.reshape(-1).clone()
    runs = parameter_runs(object(), nn.Linear(9, 6, bias=False))
    optimizer = InnerOptimizer(Adafactor(lr=lr), params_P, pieces_of(runs, (0, 54)))
    for grad in grads:
        optimizer.apply(grad.reshape(-1))
    assert float((params_P - x.reshape(-1)).abs().max()) < NEAR


@pytest.mark.parametrize("schedule", [None, WSD])
def test_lion_is_that_of_its_paper(schedule: RateSchedule | None) -> None:
    """Algorithm 2, in double precision."""
    config = Lion(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.3, schedule=schedule)
    model = Small().model(3)
    x = read_parameters(model).double()
    m = torch.zeros_like(x)
    for t, step in enumerate(grads_of(model)):
        g = torch.cat([grad.reshape(-1) for grad in step]).double()
        rate = 0.01 * (1.0 if schedule is None else wsd_rates()[t])
        c = 0.8 * m + 0.2 * g
        x = x - rate * (torch.sign(c) + 0.3 * x)
        m = 0.95 * m + 0.05 * g
    assert float((ours(config) - x).abs().max()) < NEAR


# ------------------------------------------------------------------ state

STATES = {
    "lion": {"exp_avg"},
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"},
    "adafactor": {"row_var", "col_var", "variance", "step"},
}
CONFIGS = [Lion(schedule=WSD), Muon(schedule=WSD), Adafactor(schedule=WSD)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_resumed_optimizer_continues_with_the_same_bits(config: Any) -> None:
    whole = ours(config)
    for after in (0, 1, 5):
        assert torch.equal(ours(config, resume_after=after), whole)


def optimizer_of(config: Any) -> InnerOptimizer:
    model = Small().model(3)
    params_P = read_parameters(model)
    pieces = pieces_of(parameter_runs(Small(), model), (0, params_P.numel()))
    return InnerOptimizer(config, params_P, pieces)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_state_is_as_small_as_it_can_be_and_is_checked(config: Any) -> None:
    optimizer = optimizer_of(config)
    assert optimizer.export().keys() <= {"schedule_steps"}
    count = optimizer._params_S.numel()
    optimizer.apply(torch.ones(count))
    saved = optimizer.export()
    assert saved.keys() == STATES[config.kind] | {"schedule_steps"}
    if config.kind == "muon":
        hidden = 2 * 19 * 48
        assert saved["momentum_buffer"].numel() == hidden
        assert saved["exp_avg"].numel() == count - hidden
    for name in STATES[config.kind] - {"step"}:
        with pytest.raises(CheckpointCorruptError, match=name):
            optimizer_of(config).restore(saved | {name: saved[name][:-1]})
    with pytest.raises(CheckpointCorruptError, match="other"):
        optimizer_of(config).restore(saved | {"other": torch.ones(3)})


@pytest.mark.parametrize("config", [Muon(), Adafactor()], ids=lambda config: config.kind)
def test_a_state_without_a_tensor_is_refused(config: Any) -> None:
    optimizer = optimizer_of(config)
    optimizer.apply(torch.ones(optimizer._params_S.numel()))
    for name in STATES[config.kind]:
        saved = optimizer.export()
        del saved[name]
        with pytest.raises(CheckpointCorruptError, match=name):
            optimizer_of(config).restore(saved)
