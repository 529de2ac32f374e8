"""Which values of a model change in the forward pass, and what is to become of them.

A model's trainable parameters are what gradients change. Buffers and frozen parameters may change,
too: running statistics, a moving average of the weights, a queue, a codebook. A task says so in
`model_buffers`, a mapping from patterns of names to rules:

    model_buffers = {"teacher.*": "mean", "queue*": "region"}

``mean``: floats are averaged by rows over the workers of a region and over the regions; of integers
the largest counts. ``region``: each region keeps its own, of any type; where several workers change
it, that of the lowest rank counts. ``scratch``: nobody needs it after the step.

Running statistics of torch's normalisation layers need no declaration: they are ``mean``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from geo_ray.base.errors import TaskStateError

BufferRule = Literal["mean", "region", "scratch"]
"""See the module's docstring."""

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Types whose mean is taken; all of their values are fp32 values, too."""

INTEGERS: Final = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Types of which the largest value counts."""

_MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A buffer or frozen parameter that is carried.

    Attributes:
        name: as the module names it.
        shape: its shape.
        dtype: its type, without ``torch.``.
        rule: what becomes of it.
        variance_of: the entry that has the means to these variances; None if they are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Literal["mean", "region"]
    variance_of: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        return cast(torch.dtype, getattr(torch, self.dtype))

    @property
    def count(self) -> int:
        """Its number of elements."""
        return torch.Size(self.shape).numel()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All buffers and frozen parameters of a module by name."""
    frozen = {name: p.data for name, p in module.named_parameters() if not p.requires_grad}
    return frozen | {name: buffer for name, buffer in module.named_buffers() if buffer is not None}


def rules_of(task: object, module: nn.Module) -> dict[str, BufferRule]:
    """The rule of every buffer and frozen parameter that has one.

    Raises:
        TaskStateError: `model_buffers` is no such mapping, or a pattern of it fits nothing.
    """
    declared = _declared(task)
    names = state_of(module)
    found: dict[str, BufferRule] = {
        f"{prefix}.{leaf}" if prefix else leaf: "mean"
        for prefix, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
        for leaf in (_MEAN, _VARIANCE, _COUNT)
    }
    for pattern, rule in declared.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching and rule != "scratch":  # which may be made in the first step only
            trained = [n for n, p in module.named_parameters() if fnmatchcase(n, pattern)]
            why = f"only of what is trained ({trained[0]})" if trained else "of none"
            raise TaskStateError(
                f"{type(task).__name__}.model_buffers: {pattern!r} is the name of no buffer and of "
                f"no frozen parameter, {why}",
                fix=f"Name some of {', '.join(sorted(names)[:8]) or 'them: the model has none'}.",
            )
        found.update(dict.fromkeys(matching, rule))
    return {name: found[name] for name in names if name in found}


def is_scratch(task: object, name: str) -> bool:
    """Whether a value of this name, there at the start or made later, is nobody's business."""
    rules = [rule for pattern, rule in _declared(task).items() if fnmatchcase(name, pattern)]
    return rules[-1:] == ["scratch"]


def buffer_entries(task: object, module: nn.Module) -> tuple[BufferEntry, ...]:
    """What a task's model carries, in the order of its names there.

    Raises:
        TaskStateError: as for `rules_of`; or the mean of a type is asked for that has none.
    """
    rules, tensors = rules_of(task, module), state_of(module)
    entries = []
    for name, rule in rules.items():
        if rule == "scratch":
            continue
        tensor = tensors[name]
        if rule == "mean" and tensor.dtype not in (*FLOATS, *INTEGERS):
            raise TaskStateError(
                f"{type(task).__name__}.model_buffers: {name!r} is {tensor.dtype}, which has no "
                "mean here",
                fix="Make it float32, or give it the rule region.",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        means = _means_of(name, rules, tensors) if rule == "mean" else None
        entries.append(BufferEntry(name, tuple(tensor.shape), dtype, rule, means))
    return tuple(entries)


def _declared(task: object) -> dict[str, BufferRule]:
    declared = getattr(task, "model_buffers", None) or {}
    name = type(task).__name__
    if not isinstance(declared, Mapping) or not all(isinstance(key, str) for key in declared):
        raise TaskStateError(
            f"{name}.model_buffers is {type(declared).__name__}, not a mapping of names to rules",
            fix='Write for example model_buffers = {"teacher.*": "mean", "queue*": "region"}.',
        )
    for pattern, rule in declared.items():
        if rule not in get_args(BufferRule):
            raise TaskStateError(
                f"{name}.model_buffers: {pattern!r} has the rule {rule!r}",
                fix=f"The rules are {', '.join(get_args(BufferRule))}.",
            )
    return dict(declared)


def _means_of(
    name: str, rules: Mapping[str, BufferRule], tensors: Mapping[str, Tensor]
) -> str | None:
    """The name of the means to these variances, if they are some."""
    head, _, leaf = name.rpartition(".")
    means = f"{head}.{_MEAN}" if head else _MEAN
    fits = leaf == _VARIANCE and rules.get(means) == "mean"
    if not fits or tensors[means].shape != tensors[name].shape:
        return None
    both = (tensors[means].dtype, tensors[name].dtype)
    return means if all(dtype in FLOATS for dtype in both) else None
