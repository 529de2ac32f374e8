"""Model buffers: values that change in the forward pass, and the rules that combine them.

Gradients change a model's trainable parameters. Buffers and frozen parameters may change, too:
running statistics, a moving average of the weights, a queue, a codebook. A task declares them in
`model_buffers`, a mapping from patterns of names to rules:

    model_buffers = {"teacher.*": "mean", "queue*": "region"}

``mean``: floats are averaged by rows over the workers of a region and over the regions; integers
take the largest value. ``region``: each region has its own value, of any type; if several workers
change it, that of the lowest rank counts. ``scratch``: the value is not needed after the step.

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
"""Rule of a model buffer; see the module's docstring."""

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Types that are averaged; all of their values are fp32 values, too."""

INTEGERS: Final = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Types that take the largest value."""

_MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A declared buffer or frozen parameter.

    Attributes:
        name: name in the module.
        shape: shape.
        dtype: type, without ``torch.``.
        rule: rule.
        variance_of: entry with the means of these variances; None if the values are no variances.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Literal["mean", "region"]
    variance_of: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type."""
        return cast(torch.dtype, getattr(torch, self.dtype))

    @property
    def count(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all buffers and frozen parameters of a module by name."""
    frozen = {name: p.data for name, p in module.named_parameters() if not p.requires_grad}
    return frozen | {name: buffer for name, buffer in module.named_buffers() if buffer is not None}


def rules_of(task: object, module: nn.Module) -> dict[str, BufferRule]:
    """Return the rule of every declared buffer and frozen parameter.

    Args:
        task: the task, or the mapping that it would declare.
        module: its model.

    Raises:
        TaskStateError: `model_buffers` is no such mapping, or a pattern matches nothing.
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
        if not matching and rule != "scratch":  # a scratch value may be created in the first step
            trained = [n for n, p in module.named_parameters() if fnmatchcase(n, pattern)]
            why = f"only a trained parameter ({trained[0]})" if trained else "nothing else"
            raise TaskStateError(
                f"{_where(task)}: {pattern!r} matches no buffer or frozen parameter, {why}",
                fix=f"Name some of {', '.join(sorted(names)[:8]) or 'them: the model has none'}.",
            )
        found.update(dict.fromkeys(matching, rule))
    return {name: found[name] for name in names if name in found}


def is_scratch(task: object, name: str) -> bool:
    """Tell whether a value of this name is declared as scratch."""
    rules = [rule for pattern, rule in _declared(task).items() if fnmatchcase(name, pattern)]
    return rules[-1:] == ["scratch"]


def buffer_entries(task: object, module: nn.Module) -> tuple[BufferEntry, ...]:
    """Return the model buffers of a task's model, in the order of the module's names.

    Args:
        task: the task, or the mapping that it would declare.
        module: its model.

    Raises:
        TaskStateError: as for `rules_of`; or the rule is mean for a type that has no mean.
    """
    rules, tensors = rules_of(task, module), state_of(module)
    entries = []
    for name, rule in rules.items():
        if rule == "scratch":
            continue
        tensor = tensors[name]
        if rule == "mean" and tensor.dtype not in (*FLOATS, *INTEGERS):
            raise TaskStateError(
                f"{_where(task)}: {name!r} is {tensor.dtype}, which has no mean here",
                fix="Make it float32, or use the rule region.",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        means = _means_of(name, rules, tensors) if rule == "mean" else None
        entries.append(BufferEntry(name, tuple(tensor.shape), dtype, rule, means))
    return tuple(entries)


def _where(task: object) -> str:
    """Return where the rules are declared, for messages."""
    return "buffers" if isinstance(task, Mapping) else f"{type(task).__name__}.model_buffers"


def _declared(task: object) -> dict[str, BufferRule]:
    declared = task if isinstance(task, Mapping) else getattr(task, "model_buffers", None) or {}
    where = _where(task)
    if not isinstance(declared, Mapping) or not all(isinstance(key, str) for key in declared):
        raise TaskStateError(
            f"{where} is {type(declared).__name__}, not a mapping of names to rules",
            fix='Write for example model_buffers = {"teacher.*": "mean", "queue*": "region"}.',
        )
    for pattern, rule in declared.items():
        if rule not in get_args(BufferRule):
            raise TaskStateError(
                f"{where}: {pattern!r} has the rule {rule!r}",
                fix=f"The rules are {', '.join(get_args(BufferRule))}.",
            )
    return dict(declared)


def _means_of(
    name: str, rules: Mapping[str, BufferRule], tensors: Mapping[str, Tensor]
) -> str | None:
    """Return the name of the means of these variances, if they are variances."""
    head, _, leaf = name.rpartition(".")
    means = f"{head}.{_MEAN}" if head else _MEAN
    fits = leaf == _VARIANCE and rules.get(means) == "mean"
    if not fits or tensors[means].shape != tensors[name].shape:
        return None
    both = (tensors[means].dtype, tensors[name].dtype)
    return means if all(dtype in FLOATS for dtype in both) else None
