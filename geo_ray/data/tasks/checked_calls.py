"""Call a task and validate its outputs, so that an incorrect task fails early.

`outlined_model` builds a model on the meta device, without storage; `SkipSampling` skips its random
initialisation there, because PyTorch would import its compiler for the first draw, which takes
seconds. `describe` reports the size and schema of a task.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from geo_ray.base.errors import GeoRayError, NonFiniteError, TaskOutputError
from geo_ray.base.random_state import seeded
from geo_ray.base.user_code import error_place, error_summary, source_of
from geo_ray.data.columns import Ragged
from geo_ray.data.tasks.base import Batch, Columns, Dataset, SelfContained, Stats, Task
from geo_ray.data.tasks.model_buffers import FLOATS

_IN_PLACE: Final = frozenset(
    {
        nn.init.normal_,  # dispatch modes do not see its inner calls
        Tensor.normal_,
        Tensor.exponential_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.geometric_,
        Tensor.erfinv_,  # a step of truncated normal numbers
    }
)


class SkipSampling(TorchFunctionMode):
    """Within ``with torch.device("meta"), SkipSampling()``: skips draws without content."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _IN_PLACE:
            into = args[0] if args else given["tensor"]
            if into.is_meta:
                return into
        if func is torch.randn and given.get("device") is None and given.get("out") is None:
            made = torch.empty(*args, **{k: v for k, v in given.items() if k != "generator"})
            if made.is_meta:
                return made
        return func(*args, **given)


def checked_loss(task: Task, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the task's loss of a batch: a finite floating scalar that has a gradient.

    Raises:
        TaskOutputError: the task raised, or returned something else.
        NonFiniteError: the loss is NaN or infinite.
    """
    with blamed(task, "loss"):
        loss: object = task.loss(model, batch)
    return _checked(type(task).__name__, loss)


def checked_training_loss(task: Any, model: nn.Module, batch: Batch) -> float:
    """Let a task make a training step itself; return its loss, which may be not finite.

    Raises:
        TaskOutputError: the task raised, or returned something else than a number.
    """
    with blamed(task, "train_step"):
        loss: object = task.train_step(model, batch)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, Real):
        return float(loss)
    raise TaskOutputError(
        f"{type(task).__name__}.train_step returned {type(loss).__name__}, not a number",
        fix="Return the mean loss of the batch, a number or a tensor with one element.",
    )


def checked_first_loss(task: Task, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss like `checked_loss`, and reject a loss scaled by a `GradScaler`.

    A scaled loss gives scaled gradients, which nothing divides again. Calls of `GradScaler.scale`
    are found with a profile function, which slows Python down, so only a first step is checked.

    Raises:
        TaskOutputError: as `checked_loss`; or the loss was scaled.
        NonFiniteError: as `checked_loss`.
    """
    if sys.getprofile() is not None:  # another profiler is active in this thread
        return checked_loss(task, model, batch)
    scaled = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal scaled
        if event == "call" and frame.f_code is _SCALE:
            scaled = scaled or frame.f_locals["self"].is_enabled()

    sys.setprofile(note)
    try:
        with blamed(task, "loss"):
            loss: object = task.loss(model, batch)
    finally:
        sys.setprofile(None)
    name = type(task).__name__
    if scaled:
        raise TaskOutputError(
            f"{name}.loss scales the loss with a GradScaler: training would use its gradients "
            "unchanged, too large by the scale",
            fix="Return the loss itself. Use bfloat16 autocast, which needs no scaler, or float32.",
        )
    return _checked(name, loss)


def _checked(name: str, loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TaskOutputError(f"{name}.loss returned {type(loss).__name__}, not a tensor")
    if loss.ndim != 0:
        raise TaskOutputError(f"{name}.loss returned shape {tuple(loss.shape)}, not a scalar")
    if not loss.is_floating_point():
        raise TaskOutputError(f"{name}.loss returned {loss.dtype}, not a floating dtype")
    if not loss.requires_grad:
        raise TaskOutputError(f"{name}.loss does not depend on the parameters: it has no gradient")
    if not math.isfinite(loss.item()):
        raise NonFiniteError(f"{name}.loss is {loss.item()}")
    return loss


def checked_evaluate(task: Task, model: nn.Module, batch: Batch) -> Stats:
    """Return the task's statistics of a batch: finite float64 vectors by name.

    Raises:
        TaskOutputError: the task raised, or returned something else.
        NonFiniteError: a statistic is NaN or infinite.
    """
    with blamed(task, "evaluate"):
        stats: object = task.evaluate(model, batch)
    name = type(task).__name__
    if not isinstance(stats, dict) or not stats:
        raise TaskOutputError(f"{name}.evaluate must return a non-empty dict of arrays", fix=_SUMS)
    for key, value in stats.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float64 or value.ndim != 1:
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else ""
            raise TaskOutputError(
                f"{name}.evaluate: {key!r} is {found or type(value).__name__}, not float64[K]",
                fix=_SUMS,
            )
        if not np.isfinite(value).all():
            raise NonFiniteError(f"{name}.evaluate: {key!r} is not finite")
    return stats


def checked_collate(task: Task, columns: Columns, device: torch.device) -> Batch:
    """Return the task's batch of these rows.

    Raises:
        TaskOutputError: the task raised.
    """
    with blamed(task, "collate"):
        return task.collate(columns, device)


def checked_metrics(task: Task, stats: Stats) -> dict[str, float]:
    """Return the task's metrics of summed statistics.

    Raises:
        TaskOutputError: the task raised, or returned something else than numbers by name.
    """
    with blamed(task, "metrics"):
        metrics: object = task.metrics(stats)
    name = type(task).__name__
    if not isinstance(metrics, Mapping):
        raise TaskOutputError(
            f"{name}.metrics returned {type(metrics).__name__}, not a dict of numbers", fix=_NUMBERS
        )
    for key, value in metrics.items():
        if not isinstance(key, str) or not isinstance(value, Real):
            raise TaskOutputError(
                f"{name}.metrics: {key!r} is {type(value).__name__}, not a number", fix=_NUMBERS
            )
    return {key: float(value) for key, value in metrics.items()}


def checked_dataset(task: SelfContained, seed: int) -> Dataset:
    """Return the data set of a task; lists of texts, bytes or numbers become ragged columns.

    Raises:
        TaskOutputError: the task raised, or returned something else.
    """
    with blamed(task, "dataset"):
        made: object = task.dataset(seed)
    if not isinstance(made, Dataset):
        raise TaskOutputError(
            f"{type(task).__name__}.dataset returned {type(made).__name__}, not a geo_ray.Dataset",
            fix="Return geo_ray.Dataset(train, heldout), two dicts of NumPy arrays by column.",
        )
    types = cast(Task, task).columns
    return Dataset(_with_ragged(made.train, types), _with_ragged(made.heldout, types))


def _with_ragged(columns: Columns, types: Mapping[str, str]) -> Columns:
    return {
        name: Ragged.of(types[name], column)
        if isinstance(column, list | tuple) and name in types
        else column
        for name, column in columns.items()
    }


def checked_model(task: Task, seed: int) -> nn.Module:
    """Return a fresh model that can be trained as one flat fp32 vector.

    Torch's generator is seeded around the call and restored after it, so a task that does not
    seed its model itself is deterministic too.

    Raises:
        TaskOutputError: not a module, nothing to train, parameters of other types, or a tensor
            that cannot be trained as a part of one vector or be saved at the end.
    """
    name = type(task).__name__
    with blamed(task, "model"), seeded(seed):
        model: object = task.model(seed)
    if not isinstance(model, nn.Module):
        raise TaskOutputError(
            f"{name}.model returned {type(model).__name__}, not an nn.Module",
            fix="Return the module from model(seed).",
        )
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TaskOutputError(
                f"{name}.model: {key!r} has no shape yet: it belongs to a lazy layer",
                fix="Give the layer its input size, or run the model once on zeros of the data's "
                "shape in model(seed).",
            )
    trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise TaskOutputError(f"{name}.model has no trainable parameters", fix=_NOTHING_TO_TRAIN)
    for key, parameter in trained:
        if parameter.dtype not in FLOATS:
            raise TaskOutputError(
                f"{name}.model: parameter {key!r} is {parameter.dtype}",
                fix="Make parameters of float32, bfloat16 or float16.",
            )
    with blamed(task, "model"):
        saved = model.state_dict()
    for key, value in saved.items():
        if not _is_savable(value):
            kind = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value)
            raise TaskOutputError(
                f"{name}.model: {key!r} ({kind}) cannot be saved in a safetensors file",
                fix="Keep it as a dense tensor of a usual type; or keep it out of the state "
                "dictionary, with register_buffer(..., persistent=False).",
            )
    _separate(name, model)
    return model


def _is_savable(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    return not value.dtype.is_complex or value.dtype is torch.complex64


def _separate(name: str, model: nn.Module) -> None:
    """Give every tensor separate memory, and reject a model that this would change.

    Training separates parameters, so values shared in memory would become several values; a
    safetensors file holds whole tensors only, not parts of a larger one.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dense = {k: t for k, t in tensors.items() if t.layout is torch.strided and not t.is_meta}
    pieces = sorted(
        ((t.data_ptr(), _stop(t), key, t) for key, t in dense.items() if t.numel()),
        key=itemgetter(0, 1),
    )
    reach = trained_reach = (0, "")  # end of the preceding tensors, and the name of the last one
    for start, stop, key, tensor in pieces:
        if tensor.requires_grad and _is_expanded(tensor):
            raise TaskOutputError(
                f"{name}.model: parameter {key!r} is expanded: several of its elements share one "
                "value in memory, which can be neither trained nor saved",
                fix="Give the parameter the smaller shape, and expand it in forward.",
            )
        before, other = reach if tensor.requires_grad else trained_reach
        if start < before:
            raise TaskOutputError(
                f"{name}.model: {other!r} and {key!r} are different tensors in the same memory",
                fix="To tie weights, assign the same nn.Parameter to both modules; otherwise clone "
                "one.",
            )
        reach = max(reach, (stop, key))
        trained_reach = max(trained_reach, (stop, key)) if tensor.requires_grad else trained_reach
    for tensor in dense.values():
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            tensor.data = tensor.detach().clone()


def _stop(tensor: Tensor) -> int:
    """Return the address after the last element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_expanded(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def outlined_model(task: Task, seed: int) -> nn.Module:
    """Return the task's model, for its names, shapes and types only.

    A task of the library makes it on the meta device, where tensors have no content: a model of any
    size costs neither memory nor time. User code runs on real devices only, since it may cache a
    part for training, such as a pre-trained module.

    Raises:
        TaskOutputError: as `checked_model`.
    """
    if not type(task).__module__.startswith("geo_ray."):
        return checked_model(task, seed)
    with torch.device("meta"), SkipSampling():
        return checked_model(task, seed)


_NOTHING_TO_TRAIN = "Keep requires_grad enabled for some parameters."
_NUMBERS = 'Return numbers by name, e.g. {"loss": stats["loss"].item() / rows}.'
_SCALE: Final = torch.amp.GradScaler.scale.__code__
_SUMS = 'Return sums over the batch\'s rows, e.g. {"rows": np.array([n], np.float64), ...}.'


@contextmanager
def blamed(task: object, method: str) -> Iterator[None]:
    """Convert an exception of user code to an error with its task, method and line.

    Raises:
        TaskOutputError: the block raised something that is not a `GeoRayError`.
    """
    try:
        yield
    except GeoRayError:
        raise
    except Exception as error:
        where = error_place(error, source_of(type(task)) or Path(type(task).__module__))
        raise TaskOutputError(
            f"{type(task).__name__}.{method} raised {error_summary(error)} ({where})",
            fix="Correct the named line of the task.",
        ) from error


@dataclass(frozen=True, slots=True)
class RowWork:
    """Size of one training row, for tokens per second and the utilisation of devices.

    A task may declare ``tokens_per_row``, and ``flops_per_row``: floating-point operations of
    forward and backward pass. Without the latter, a model of tokens is estimated to need 2
    operations per parameter and token forward, 2 backward for the activations, and 2 for the
    gradient of each trained parameter: 6 N (Kaplan et al., arXiv 2001.08361).

    Attributes:
        tokens: tokens of a row; None if rows have none.
        flops: operations of a row; None if unknown.
        estimated: whether `flops` is the estimate.
    """

    tokens: float | None = None
    flops: float | None = None
    estimated: bool = False

    @classmethod
    def of(cls, task: Task, num_trained: int = 0, num_frozen: int = 0) -> RowWork:
        """Return the size of a task's rows.

        Args:
            task: task.
            num_trained: values of trained parameters; 0: no estimate.
            num_frozen: values of frozen parameters.

        Raises:
            TaskOutputError: the task declares something else than a positive number.
        """
        tokens, flops = (_declared_size(task, name) for name in ("tokens_per_row", "flops_per_row"))
        if flops is None and tokens is not None and num_trained:
            return cls(tokens, tokens * (6 * num_trained + 4 * num_frozen), estimated=True)
        return cls(tokens, flops)

    def fields(self) -> dict[str, float | bool | None]:
        """Return the fields of the event `run_started`; none if nothing is known."""
        if self.tokens is None and self.flops is None:
            return {}
        return {
            "tokens_per_row": self.tokens,
            "flops_per_row": self.flops,
            "flops_estimated": self.estimated,
        }


def _declared_size(task: Task, name: str) -> float | None:
    with blamed(task, name):
        value: object = getattr(task, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise TaskOutputError(
            f"{type(task).__name__}.{name} is {value!r}, not a positive number",
            fix=f"Set {name} to a number, or remove it.",
        )
    return float(value)


@dataclass(frozen=True)
class Description:
    """Size and schema of a task.

    Attributes:
        name: class name of the task.
        parameters: number of trainable values; a tied weight counts once.
        tensors: number of trainable tensors.
        parameter_bytes: size of one uncompressed float32 update.
        columns: schema of its shards.
        label_column: integer column for histograms, or None.
        self_contained: whether it includes or generates its data.
    """

    name: str
    parameters: int
    tensors: int
    parameter_bytes: int
    columns: Mapping[str, str]
    label_column: str | None
    self_contained: bool


def describe(task: Task, seed: int = 0) -> Description:
    """Build the model once and measure it.

    Raises:
        TaskOutputError: the task's model cannot be trained here (see `checked_model`).
    """
    model = checked_model(task, seed)
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    return Description(
        name=type(task).__name__,
        parameters=sum(sizes),
        tensors=len(sizes),
        parameter_bytes=4 * sum(sizes),
        columns=dict(task.columns),
        label_column=task.label_column,
        self_contained=isinstance(task, SelfContained),
    )
