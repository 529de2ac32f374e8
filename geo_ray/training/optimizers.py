"""Inner optimizers of a shard on one flat parameter, and their learning rate schedule.

The functions behind torch's optimizers are called directly with state kept here: the first
`torch.optim` object of a process would import PyTorch's compiler (820 modules). Each optimizer
counts its own steps, so a resumed run continues on its curve.

`muon` and `adafactor` step whole parameters, of which they need the shapes: the model must not be
split into shards. The others step each element alone, with the same bits however the model is
split.

A parameter without a gradient in a step is skipped, as in torch: no momentum, no weight decay, and
its own number of steps. The first such step splits the flat parameter into those of the model.

Source: cosine decay of Loshchilov and Hutter, "SGDR" (2017), without restarts; warmup-stable-decay
of MiniCPM (arXiv 2404.06395), here with a linear decay; Lion (arXiv 2302.06675); Muon (K. Jordan,
2024, as in `torch.optim.Muon`; scales of arXiv 2502.16982 and 2505.23725); Adafactor (arXiv
1804.04235, as in `torch.optim.Adafactor`).

Shape legend: S = elements of the slice; M, N = rows and columns of one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.base.model import StrictModel
from geo_ray.training.parameters import GroupPiece


class RateSchedule(StrictModel):
    """Linear warm-up to the rate of the optimizer, then decay to a fraction of it."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="shape of the decay; wsd: constant, then linear in `decay_steps`"
    )
    warmup_steps: int = Field(0, ge=0, description="steps until the full rate")
    steps: int | None = Field(
        None, ge=1, description="steps until the last fraction; null: all steps of the run"
    )
    last: float = Field(0.1, ge=0, le=1, description="fraction of the rate at the end")
    decay_steps: int | None = Field(
        None, ge=1, description="wsd: steps of the decay at the end; null: a tenth of `steps`"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.decay_steps is not None and self.kind != "wsd":
            raise ValueError("decay_steps: only the kind wsd has it; remove the key")
        return self

    def factor(self, taken: int) -> float:
        """Return the factor on the rate in the step after ``taken`` steps.

        Raises:
            ValueError: neither the configuration nor `over` gave the number of steps.
        """
        if taken < self.warmup_steps:
            return (taken + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.steps is None:
            raise ValueError("a schedule without steps; see RateSchedule.over")
        first = self.warmup_steps  # of the decay
        if self.kind == "wsd":
            length = max(1, self.steps // 10) if self.decay_steps is None else self.decay_steps
            first = max(first, self.steps - length)
        done = max(0.0, min(1.0, (taken - first) / max(1, self.steps - first)))
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.last + (1 - self.last) * left

    def over(self, steps: int) -> RateSchedule:
        """Return the schedule with a length of ``steps``, unless it has one."""
        return self if self.steps is not None else self.model_copy(update={"steps": steps})


State = dict[str, Tensor]
"""Tensors of an optimizer for one parameter, by name."""


@dataclass(slots=True)
class OptimizerGroup:
    """Parameters with one rate and one decay; torch's functions change both first in place.

    Attributes:
        params: fp32 vectors.
        states: tensors of the optimizer by name, for each of them; empty before the first step.
        lr: learning rate.
        weight_decay: its weight decay.
        pieces: what the vectors are, for optimizers that step whole parameters.
        rate: ``lr`` as a factor of the configured one.
        decay: ``weight_decay`` as a factor of the configured one.
    """

    params: list[Tensor]
    states: list[State]
    lr: float
    weight_decay: float
    pieces: Sequence[GroupPiece] = ()
    rate: float = 1.0
    decay: float = 1.0


class Optimizer(StrictModel):
    """Base of the ``optimizer`` sections."""

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return False

    @property
    def needs_whole_parameters(self) -> bool:
        """Whether a step needs whole parameters and their shapes; else each element is stepped."""
        return False

    def new_state(self, piece: GroupPiece) -> State:
        """Return the state of a parameter, or of a part of one, before the first step."""
        return {}

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters, which are read-only."""
        raise NotImplementedError


class Sgd(Optimizer):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0, le=1e6, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        _sgd(group, grads, [None] * len(grads), momentum=0.0, nesterov=False)


class Momentum(Optimizer):
    """SGD with heavy-ball or Nesterov momentum."""

    kind: Literal["momentum"] = "momentum"
    lr: float = Field(0.05, gt=0, le=1e6, description="learning rate")
    momentum: float = Field(
        0.9, gt=0, lt=1, description="fraction of the last step in the next one"
    )
    nesterov: bool = Field(False, description="look ahead")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return True

    def new_state(self, piece: GroupPiece) -> State:
        """See `Optimizer.new_state`."""
        return {"momentum_buffer": torch.zeros(piece.stop - piece.start)}

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        retained = [state.get("momentum_buffer") for state in group.states]
        _sgd(group, grads, retained, momentum=self.momentum, nesterov=self.nesterov)
        for state, buffer in zip(group.states, retained, strict=True):
            if buffer is not None:
                state["momentum_buffer"] = buffer


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, le=1e6, description="learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return self.beta1 > 0

    def new_state(self, piece: GroupPiece) -> State:
        """See `Optimizer.new_state`."""
        return _moments(torch.zeros(piece.stop - piece.start))

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one fused step with the gradients of the group's parameters."""
        for param, state in zip(group.params, group.states, strict=True):
            if not state:
                state |= _moments(param)
        _adamw(group, grads, (self.beta1, self.beta2), self.eps)


class Lion(Optimizer):
    """Lion (Chen et al., 2023): steps by the sign of a momentum.

    Its rate is about a tenth of that of AdamW, its decay ten times as large.
    """

    kind: Literal["lion"] = "lion"
    lr: float = Field(1e-4, gt=0, le=1e6, description="learning rate: the step of every element")
    beta1: float = Field(0.9, ge=0, lt=1, description="weight of the momentum in the step")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the momentum")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return self.beta1 > 0

    def new_state(self, piece: GroupPiece) -> State:
        """See `Optimizer.new_state`."""
        return {"exp_avg": torch.zeros(piece.stop - piece.start)}

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        for param, grad, state in zip(group.params, grads, group.states, strict=True):
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
            moment = state["exp_avg"]
            direction = moment.mul(self.beta1).add_(grad, alpha=1 - self.beta1).sign_()
            param.mul_(1 - group.lr * group.weight_decay).add_(direction, alpha=-group.lr)
            moment.mul_(self.beta2).add_(grad, alpha=1 - self.beta2)


class AdamWOfOthers(StrictModel):
    """AdamW for the parameters that `muon` does not step as matrices."""

    lr: float | None = Field(
        None, gt=0, le=1e6, description="learning rate; null: that of the matrices"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    weight_decay: float | None = Field(
        None, ge=0, description="decoupled weight decay; null: that of the matrices"
    )


class Muon(Optimizer):
    """Muon (Jordan, 2024): steps hidden matrices by their orthogonalised momentum.

    Embeddings, the output layer, norms, biases and all other parameters are stepped by AdamW.
    """

    kind: Literal["muon"] = "muon"
    lr: float = Field(1e-3, gt=0, le=1e6, description="learning rate")
    momentum: float = Field(0.95, ge=0, lt=1, description="fraction of the momentum kept per step")
    nesterov: bool = Field(True, description="look ahead")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    scale: Literal["match_rms_adamw", "original", "spectral"] = Field(
        "match_rms_adamw",
        description="factor on the rate of a matrix of M rows and N columns: 0.2 sqrt(max(M, N)), "
        "so that steps are as long as those of AdamW; sqrt(max(1, M/N)); or sqrt(M/N)",
    )
    ns_steps: int = Field(5, ge=1, le=99, description="Newton-Schulz iterations")
    ns_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="number format of these iterations; bfloat16 is that of torch.optim.Muon, and "
        "faster on processors that multiply it",
    )
    adamw: AdamWOfOthers = Field(
        AdamWOfOthers(), description="optimizer of all parameters that are no hidden matrices"
    )
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps."""
        return self.momentum > 0

    @property
    def needs_whole_parameters(self) -> bool:
        """See `Optimizer.needs_whole_parameters`."""
        return True

    def new_state(self, piece: GroupPiece) -> State:
        """Return one momentum for a matrix, the moments of AdamW for another parameter."""
        vector = torch.zeros(piece.stop - piece.start)
        return {"momentum_buffer": vector} if piece.hidden else _moments(vector)

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        others: list[Tensor] = []
        rate = group.rate * (self.lr if self.adamw.lr is None else self.adamw.lr)
        decay = self.weight_decay if self.adamw.weight_decay is None else self.adamw.weight_decay
        rest = OptimizerGroup([], [], rate, group.decay * decay)
        parts = zip(group.params, grads, group.states, group.pieces, strict=True)
        for param, grad, state, piece in parts:
            if not piece.hidden:
                rest.params.append(param)
                rest.states.append(state)
                others.append(grad)
                continue
            moment_MN = state["momentum_buffer"].view(piece.shape)
            grad_MN = grad.view(piece.shape)
            moment_MN.lerp_(grad_MN, 1 - self.momentum)
            ahead_MN = grad_MN.lerp(moment_MN, self.momentum) if self.nesterov else moment_MN
            if self.ns_dtype == "bfloat16":
                ahead_MN = ahead_MN.bfloat16()
            step_MN = orthogonalised(ahead_MN, self.ns_steps)
            param.mul_(1 - group.lr * group.weight_decay)
            param.view(piece.shape).add_(step_MN, alpha=-group.lr * self._factor(*piece.shape))
        if others:
            _adamw(rest, others, (self.adamw.beta1, self.adamw.beta2), self.adamw.eps)

    def _factor(self, rows: int, columns: int) -> float:
        if self.scale == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        ratio = rows / columns
        return math.sqrt(max(1.0, ratio) if self.scale == "original" else ratio)


_QUINTIC: Final = (3.4445, -4.7750, 2.0315)  # Jordan's: the steepest at 0
_LEAST_NORM: Final = 1e-7


def orthogonalised(x_MN: Tensor, steps: int) -> Tensor:
    """Return ``U S V^T`` of a matrix ``U D V^T`` with all of S near 1: from 0.7 to 1.2.

    Newton-Schulz iterations in the precision of the matrix. They are matrix products, and much
    faster than a singular value decomposition.

    Args:
        x_MN: matrix; a zero matrix stays one.
        steps: iterations.
    """
    a, b, c = _QUINTIC
    is_tall = x_MN.shape[0] > x_MN.shape[1]
    x = x_MN.T if is_tall else x_MN
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018): its state are the means of rows and columns."""

    kind: Literal["adafactor"] = "adafactor"
    lr: float = Field(
        1e-2, gt=0, le=1e6, description="largest step relative to the size of a parameter"
    )
    beta2_decay: float = Field(
        -0.8, lt=0, ge=-1, description="exponent of the steps in the weight of the newest square"
    )
    eps1: float | None = Field(
        None, gt=0, description="least second moment, as its root; null: that of the number format"
    )
    eps2: float = Field(1e-3, ge=0, description="least size of a parameter, for the step")
    clip_rms: float = Field(
        1.0, ge=1, description="largest root mean square of a step before the rate"
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    schedule: RateSchedule | None = Field(
        None, description="learning rate over time; null: constant"
    )

    @property
    def needs_whole_parameters(self) -> bool:
        """See `Optimizer.needs_whole_parameters`."""
        return True

    def new_state(self, piece: GroupPiece) -> State:
        """Return the means of squares: by row and column for a matrix, else by element."""
        like = torch.zeros(piece.stop - piece.start).view(piece.shape)
        step = torch.zeros((), dtype=torch.float32)
        if like.dim() == 1:
            return {"step": step, "variance": like}
        rows, columns = like[..., :1].clone(), like[..., :1, :].clone()
        return {"step": step, "row_var": rows, "col_var": columns}

    def step(self, group: OptimizerGroup, grads: list[Tensor]) -> None:
        """Make one step with the gradients of the group's parameters."""
        shapes = [piece.shape for piece in group.pieces]
        adafactor(
            [param.view(shape) for param, shape in zip(group.params, shapes, strict=True)],
            [grad.view(shape) for grad, shape in zip(grads, shapes, strict=True)],
            [state.get("row_var") for state in group.states],
            [state.get("col_var") for state in group.states],
            [state.get("variance") for state in group.states],
            [state["step"] for state in group.states],
            foreach=False,
            d=self.clip_rms,
            lr=group.lr,
            beta2_decay=self.beta2_decay,
            weight_decay=group.weight_decay,
            eps1=torch.finfo(torch.float32).eps if self.eps1 is None else self.eps1,
            eps2=self.eps2,
            maximize=False,
        )


class TaskSteps(Optimizer):
    """Steps of the task itself: its hooks `optimizer` and `scheduler`, or `train_step`."""

    kind: Literal["task"] = "task"

    @property
    def lr(self) -> float:
        """Learning rate; unknown."""
        return math.nan

    @property
    def weight_decay(self) -> float:
        """Weight decay; unknown."""
        return math.nan

    @property
    def schedule(self) -> RateSchedule | None:
        """Schedule of geo_ray; the task may have its own."""
        return None

    @property
    def has_momentum(self) -> bool:
        """Whether a step repeats a fraction of earlier steps; assumed."""
        return True


def _moments(param: Tensor) -> State:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def _adamw(
    group: OptimizerGroup, grads: list[Tensor], betas: tuple[float, float], eps: float
) -> None:
    adamw(
        group.params,
        grads,
        [state["exp_avg"] for state in group.states],
        [state["exp_avg_sq"] for state in group.states],
        [],
        [state["step"] for state in group.states],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=group.lr,
        weight_decay=group.weight_decay,
        eps=eps,
        maximize=False,
    )


def _sgd(
    group: OptimizerGroup,
    grads: list[Tensor],
    retained: list[Tensor | None],
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    sgd(
        group.params,
        grads,
        retained,
        weight_decay=group.weight_decay,
        momentum=momentum,
        lr=group.lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
    )


OneOptimizer = Sgd | Momentum | AdamW | Lion | Muon | Adafactor | TaskSteps
OptimizerConfig = Annotated[OneOptimizer, Field(discriminator="kind")]
"""The ``optimizer`` section of a configuration."""

STEPS_TAKEN: Final = (
    "schedule_steps"  # how many steps a scheduled optimizer took, among its tensors
)
_COUNT: Final = "step"  # steps of one parameter; one value per element where parameters differ


def optimizer_problems(
    optimizer: OneOptimizer, shards: Mapping[str, int], needed: str | None
) -> Iterator[str]:
    """Yield why an optimizer does not fit the shards, or the strategy.

    Args:
        optimizer: the run's.
        shards: of the parameter server, by region.
        needed: kind that the strategy requires; None: any.
    """
    if needed is not None and optimizer.kind != needed:
        yield (
            f"optimizer.kind: the strategy requires {needed}: set kind: {needed}, or use strategy "
            "diloco, which takes any optimizer"
        )
    split = [region for region, count in shards.items() if count > 1]
    if optimizer.needs_whole_parameters and split:
        yield (
            f"optimizer.kind: '{optimizer.kind}' steps whole parameters, which shards would split: "
            f"set ps_shards: 1 in {', '.join(split)}, or use adamw"
        )


def lasting(optimizer: OneOptimizer, steps: int) -> OneOptimizer:
    """Return the optimizer with its schedule set to ``steps``, if the schedule has no length."""
    if optimizer.schedule is None:
        return optimizer
    return optimizer.model_copy(update={"schedule": optimizer.schedule.over(steps)})


class InnerOptimizer:
    """Applies gradients to a flat slice in place; its state is part of checkpoints.

    Attributes:
        taken: steps so far; counted only for a schedule.
        rate: factor on the learning rate in the next steps.
        lr: learning rate of the last step, without the factors of groups; None before it.

    Args:
        config: optimizer; its schedule has a length (`lasting`).
        params_S: fp32 (S,), live parameters of one shard.
        pieces: pieces of the slice by parameter; the state in checkpoints is the same.
        flat: step all pieces as one vector until one of them has no gradient.
    """

    def __init__(
        self,
        config: OneOptimizer,
        params_S: Tensor,
        pieces: Sequence[GroupPiece] = (),
        *,
        flat: bool = False,
    ) -> None:
        self._params_S = params_S
        self._config = config
        self._pieces = tuple(pieces)
        self._is_flat = flat or not pieces
        self._differs = False  # whether parameters have had unequal numbers of steps
        self._arrange((GroupPiece(0, params_S.numel()),) if self._is_flat else self._pieces)
        self._schedule = config.schedule
        self.taken = 0
        self.rate = 1.0
        self.lr: float | None = None

    def _arrange(self, pieces: Sequence[GroupPiece]) -> None:
        """Make parts without state from pieces, in groups of equal factors."""
        config, self._parts = self._config, [_Part(self._params_S, piece) for piece in pieces]
        factors = list(dict.fromkeys(part.piece.factors for part in self._parts))
        self._groups = [
            (
                OptimizerGroup(
                    [part.param for part in parts],
                    [part.state for part in parts],
                    config.lr * rate,
                    config.weight_decay * decay,
                    [part.piece for part in parts],
                    decay=decay,
                ),
                parts,
            )
            for rate, decay, fraction in factors
            if (parts := [p for p in self._parts if p.piece.factors == (rate, decay, fraction)])
        ]
        self._rates = [(rate, schedule) for rate, _, schedule in factors]

    def apply(self, grad_S: Tensor, unused: Collection[int] = ()) -> None:
        """Make one step with ``grad_S`` (S,), which is read-only.

        Args:
            grad_S: gradient.
            unused: indices of the model's parameters without a gradient. They are skipped where
                ``grad_S`` is zero; a lossy codec may deliver parts of earlier gradients.
        """
        if unused:
            self._tell_apart()
        factor = 1.0
        if self._schedule is not None:
            factor = self._schedule.factor(self.taken)
            self.taken += 1
        self.lr = self._config.lr * factor * self.rate
        for (group, _), (rate, fraction) in zip(self._groups, self._rates, strict=True):
            scheduled = factor if fraction == 1.0 else 1.0 + fraction * (factor - 1.0)
            group.lr = self._config.lr * rate * scheduled * self.rate
            group.rate = rate * scheduled * self.rate
        if self._config.needs_whole_parameters:
            self._make_states()
        with torch.no_grad():
            for group, parts in self._groups:
                stepped = [part for part in parts if not part.is_skipped(grad_S, unused)]
                if not stepped:
                    continue
                if len(stepped) < len(parts):
                    group = replace(
                        group,
                        params=[part.param for part in stepped],
                        states=[part.state for part in stepped],
                        pieces=[part.piece for part in stepped],
                    )
                self._config.step(group, [part.take(grad_S) for part in stepped])
                for part in stepped:
                    part.give()

    def _tell_apart(self) -> None:
        """Step parameters separately from now on, with separate states."""
        self._differs = True
        if not self._is_flat or not self._pieces:
            return
        self._is_flat, state = False, self._parts[0].state
        self._arrange(self._pieces)
        for part in self._parts:
            part.state |= {
                name: part.shared(value) if value.dim() else value.clone()
                for name, value in state.items()
            }

    def live(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the optimizer's tensors by name, and copies that never change.

        For parameter groups, torch has one tensor per parameter, which are joined in copies. Both
        results are empty before the first step.
        """
        own: dict[str, Tensor] = {}
        retained: dict[str, Tensor] = {}
        if self._config.needs_whole_parameters:
            retained = self._joined()
            return own, retained | self._counted()
        for part in self._parts:
            for key, value in part.state.items():
                is_one = not value.dim() and not self._differs
                if len(self._parts) == 1 and part.piece.block is None and (value.dim() or is_one):
                    own[key] = value
                    continue
                if is_one:
                    retained[key] = value.clone()
                    continue
                if key not in retained:
                    retained[key] = torch.zeros_like(self._params_S)
                part.own(retained[key]).copy_(part.inside(value) if value.dim() else value)
        return own, retained | self._counted()

    def export(self) -> dict[str, Tensor]:
        """Return copies of the state."""
        own, retained = self.live()
        return retained | {key: value.clone() for key, value in own.items()}

    def restore(self, tensors: dict[str, Tensor], *, given: bool = False) -> None:
        """Restore the result of `export`.

        Args:
            tensors: tensors by name.
            given: the optimizer may use the tensors without copying them.

        Raises:
            CheckpointCorruptError: a tensor does not fit the parameters.
        """
        if self._config.needs_whole_parameters:
            self._split({k: v for k, v in tensors.items() if k != STEPS_TAKEN})
            self.taken = int(tensors[STEPS_TAKEN]) if STEPS_TAKEN in tensors else 0
            return
        for name, value in tensors.items():
            if value.dim() and value.shape != self._params_S.shape:
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' has shape {tuple(value.shape)}, "
                    f"the shard has {tuple(self._params_S.shape)}"
                )
        self.taken = int(tensors[STEPS_TAKEN]) if STEPS_TAKEN in tensors else 0
        retained = {name: value for name, value in tensors.items() if name != STEPS_TAKEN}
        if _COUNT in retained and retained[_COUNT].dim():
            self._tell_apart()
        device = self._params_S.device
        for part in self._parts:
            part.state.clear()
            for name, value in retained.items():
                if not value.dim():
                    part.state[name] = value.to(device, copy=True)
                elif name == _COUNT:
                    part.state[name] = part.own(value)[0].to(device, copy=True)
                else:
                    taken = part.taken(value, given=given and len(self._parts) == 1)
                    part.state[name] = taken.to(device)

    def _counted(self) -> State:
        return {} if self._schedule is None else {STEPS_TAKEN: torch.tensor(self.taken)}

    def _make_states(self) -> None:
        for part in self._parts:
            if not part.state:
                made = self._config.new_state(part.piece)
                part.state |= {k: value.to(self._params_S.device) for k, value in made.items()}

    def _by_name(self) -> dict[str, list[Tensor]]:
        """Return the live tensors of all parameters by name."""
        found: dict[str, list[Tensor]] = {}
        for part in self._parts:
            for name, value in part.state.items():
                found.setdefault(name, []).append(value)
        return found

    def _joined(self) -> State:
        """Return copies of the states of whole parameters, one vector per name."""
        return {
            name: torch.cat([value.reshape(-1) for value in values])
            if values[0].dim() or len({float(value) for value in values}) > 1
            else values[0].clone()
            for name, values in self._by_name().items()
        }

    def _split(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `_joined`; the tensors are copied.

        Raises:
            CheckpointCorruptError: a tensor is missing, or does not fit the parameters.
        """
        for part in self._parts:
            part.state.clear()
        if not tensors:
            return
        self._make_states()
        live = self._by_name()
        for name in sorted(live.keys() | tensors.keys()):
            values, saved = live.get(name, []), tensors.get(name)
            sizes = [value.numel() for value in values]
            is_count = bool(values) and not values[0].dim()
            fitting = {sum(sizes), 1} if is_count else {sum(sizes)}
            if saved is None or not values or saved.numel() not in fitting:
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' does not fit the parameters of the shard"
                )
            is_one = is_count and saved.numel() == 1
            pieces = [saved] * len(values) if is_one else torch.split(saved, sizes)
            for value, piece in zip(values, pieces, strict=True):
                value.copy_(piece.view(value.shape))


class _Part:
    """A parameter of the optimizer's: a view of the slice, or a buffer for a block of it."""

    def __init__(self, params_S: Tensor, piece: GroupPiece) -> None:
        self.piece = piece
        self.state: dict[str, Tensor] = {}
        self._params = self.own(params_S)
        self.param = self._params if piece.block is None else torch.zeros(piece.block[0])

    def own(self, vector_S: Tensor) -> Tensor:
        """Return the part's elements of the slice."""
        return vector_S[self.piece.start : self.piece.stop]

    def is_skipped(self, grad_S: Tensor, unused: Collection[int]) -> bool:
        """Tell whether a step leaves the part unchanged."""
        return self.piece.parameter in unused and not bool(self.own(grad_S).any())

    def shared(self, vector_S: Tensor) -> Tensor:
        """Return the part's elements, shaped like its parameter; without a copy if possible."""
        return self.own(vector_S) if self.piece.block is None else self.spread(vector_S)

    def inside(self, values: Tensor) -> Tensor:
        """Return the part's elements of a tensor shaped like its parameter."""
        at = 0 if self.piece.block is None else self.piece.block[1]
        return values[at : at + self.piece.stop - self.piece.start]

    def taken(self, vector_S: Tensor, *, given: bool) -> Tensor:
        """Return the part's elements, shaped like its parameter; possibly without a copy."""
        return vector_S if given and self.piece.block is None else self.spread(vector_S)

    def spread(self, vector_S: Tensor) -> Tensor:
        """A copy of its elements of the slice, like its parameter."""
        if self.piece.block is None:
            return self.own(vector_S).clone()
        values = torch.zeros(self.piece.block[0])
        self.inside(values).copy_(self.own(vector_S))
        return values

    def take(self, grad_S: Tensor) -> Tensor:
        """Before a step: its gradient."""
        if self.piece.block is None:
            return self.own(grad_S)
        self.inside(self.param).copy_(self._params)
        return self.spread(grad_S)

    def give(self) -> None:
        """Copy elements back that `taken` copied."""
        if self.piece.block is not None:
            self._params.copy_(self.inside(self.param))
