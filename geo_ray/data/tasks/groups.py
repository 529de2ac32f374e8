"""Groups of parameters with separate learning rates and weight decays, declared by a task.

A task may have a method `groups(model)` that returns `ParameterGroup` records:

    def groups(self, model):
        return [undecayed(model), ParameterGroup("head.*", rate=10.0)]

A parameter belongs to the first group that names it; other parameters train as configured.

The optimizers `muon` and `adafactor` need the shapes of all parameters. *Hidden matrices*, which
`muon` steps as matrices, are the parameters with two dimensions except those of embeddings (modules
of that kind, or ``embed`` or ``position`` in the name) and of the output layer: the last module
that has such a parameter, unless it is in an `nn.ModuleList` of blocks. A group may override this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from geo_ray.base.errors import TaskStateError
from geo_ray.data.tasks.checked_calls import blamed

_MATRIX: Final = 2  # dimensions
_EMBEDDINGS: Final = ("embed", "position")  # in names of parameters that no embedding module has


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with separate optimizer settings.

    Attributes:
        names: a name or pattern (``*.bias``), or several of them.
        rate: factor of `optimizer.lr`.
        decay: factor of `optimizer.weight_decay`.
        schedule: how strongly `optimizer.schedule` applies: 1 fully, 0 not at all, so that the
            rate is constant.
        hidden: whether `muon` steps its parameters of two dimensions as matrices; None: see the
            module's docstring.
    """

    names: str | Sequence[str]
    rate: float = 1.0
    decay: float = 1.0
    schedule: float = 1.0
    hidden: bool | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return `names` as a tuple."""
        return (self.names,) if isinstance(self.names, str) else tuple(self.names)

    def factors(self) -> tuple[float, float, float]:
        """Return the factors of rate, decay and schedule."""
        return self.rate, self.decay, self.schedule


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One parameter tensor in the flat vector, and its optimizer factors.

    Attributes:
        start: index of its first element.
        stop: index after its last element.
        factors: factors of rate, decay and schedule.
        shape: its shape.
        hidden: whether it is a hidden matrix.
    """

    start: int
    stop: int
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    shape: tuple[int, ...] = ()
    hidden: bool = False


def undecayed(model: nn.Module) -> ParameterGroup:
    """Group biases and norm scales without weight decay, as usual for transformers.

    Args:
        model: the task's model; the group has its trainable parameters with fewer than 2
            dimensions.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ParameterGroup([name for name, p in trained if p.ndim < 2], decay=0.0)


def group_runs(task: object, module: nn.Module) -> tuple[GroupRun, ...]:
    """Return all trainable parameters in order with their factors; empty without groups.

    Raises:
        TaskStateError: a group matches no parameter, or is invalid.
        TaskOutputError: the task's method raised an exception.
    """
    groups = _groups(task, module)
    return _runs(groups, module) if groups else ()


def parameter_runs(task: object, module: nn.Module) -> tuple[GroupRun, ...]:
    """Return all trainable parameters in order, also without groups; errors as `group_runs`."""
    return _runs(_groups(task, module), module)


def _groups(task: object, module: nn.Module) -> tuple[ParameterGroup, ...]:
    groups = getattr(task, "groups", None)
    with blamed(task, "groups"):
        found = () if groups is None else tuple(groups(module))
    name = type(task).__name__
    for group in found:
        _check(group, name)
    trained = [key for key, p in module.named_parameters() if p.requires_grad]
    for group in found:
        for pattern in group.patterns:
            if not any(fnmatchcase(key, pattern) for key in trained):
                raise TaskStateError(
                    f"{name}.groups: {pattern!r} matches no trained parameter",
                    fix=f"Name some of {', '.join(trained[:8])}.",
                )
    return found


def _runs(groups: Sequence[ParameterGroup], module: nn.Module) -> tuple[GroupRun, ...]:
    outer, runs, at = _outer_parameters(module), [], 0
    for key, p in module.named_parameters():
        if not p.requires_grad:
            continue
        mine = (g for g in groups if any(fnmatchcase(key, pattern) for pattern in g.patterns))
        group = next(mine, None)
        factors = (1.0, 1.0, 1.0) if group is None else group.factors()
        hidden = id(p) not in outer if group is None or group.hidden is None else group.hidden
        run = GroupRun(at, at + p.numel(), factors, tuple(p.shape), hidden and p.ndim == _MATRIX)
        runs.append(run)
        at = run.stop
    return tuple(runs)


def _outer_parameters(module: nn.Module) -> set[int]:
    """Return the identities of the parameters of embeddings and of the output layer."""
    found = {id(p) for key, p in module.named_parameters() if any(w in key for w in _EMBEDDINGS)}
    stacks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    blocks = {id(part) for stack in stacks for part in stack.modules()}
    output: set[int] = set()
    for part in module.modules():
        own = {id(p): p.ndim for p in part.parameters(recurse=False) if p.requires_grad}
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            found |= own.keys()
        if _MATRIX in own.values():
            output = set() if id(part) in blocks else set(own)
    return found | output


def _check(group: object, name: str) -> None:
    if not isinstance(group, ParameterGroup):
        raise TaskStateError(
            f"{name}.groups returned {type(group).__name__} among its groups",
            fix="Return geo_ray.data.tasks.groups.ParameterGroup records.",
        )
    rate, decay, schedule = group.factors()
    usable = all(math.isfinite(x) and x >= 0 for x in (rate, decay)) and 0 <= schedule <= 1
    if not usable or not group.patterns:
        raise TaskStateError(
            f"{name}.groups: {group} has no names, or invalid factors",
            fix="Name parameters; rate and decay are 0 or more, schedule is from 0 to 1.",
        )
