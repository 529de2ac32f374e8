"""Steps that a task makes with its own optimizers: its hooks, and their state in checkpoints.

With `optimizer.kind: task` the only worker of a region keeps the parameters (as with
`train.optimizer_on: worker`), and the task makes the steps:

- `optimizer(params)`, and perhaps `scheduler(optimizer)`: geo_ray computes the gradients and calls
  ``step`` of both;
- `train_step(model, batch)`: the task does everything, with the objects of
  `training_state(model)`.

The state of these objects goes to the parameter server like the moments of other optimizers, in
vectors as long as the parameters: JSON, then the bytes of all tensors. Nothing is pickled.

`HeldStates` is where shards store the states of workers' optimizers, of these and of others.

Shape legend: P = parameters of the model, S = of one shard's slice; B = bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from geo_ray.base.errors import CheckpointCorruptError, InvariantError, TaskStateError
from geo_ray.data.tasks.base import Batch, Task
from geo_ray.data.tasks.checked_calls import blamed, checked_training_loss
from geo_ray.training.lazy_copy import StoredTensor
from geo_ray.training.optimizers import InnerOptimizer

_NAME: Final = "task/{:06}"
_WORKERS: Final = "workers/"  # states of workers other than the first
_STORED_FROM: Final = 2**18  # elements from which on a tensor is in a file
_LENGTH_BYTES: Final = 8
_ALIGNED_BYTES: Final = 8
_FLOAT_BYTES: Final = 4


class Stateful(Protocol):
    """An object whose state is saved, such as an optimizer, a schedule or a `GradScaler`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore the state."""


class TaskOptimizer:
    """The optimizers of a task, on the worker's device.

    Attributes:
        lr: learning rate of the last step; None before it, or if no object has one.

    Args:
        task: has `optimizer` or `train_step`.
        module: replica of the model.
        params: what `optimizer` steps: trained parameters, or masters of half-precision ones.
        grads: buffers of their gradients.
        num_params: P.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        grads: Sequence[Tensor],
        num_params: int,
    ) -> None:
        self._task: Any = task
        self._module, self._params, self._grads = module, params, grads
        self._num_params = num_params
        self.makes_steps = hasattr(task, "train_step")
        self.lr: float | None = None
        self._objects: dict[str, Stateful] = {}
        self._make()

    def _make(self) -> None:
        """Create the objects anew."""
        task = self._task
        if self.makes_steps:
            make = getattr(task, "training_state", None)
            with blamed(task, "training_state"):
                self._objects = {} if make is None else dict(make(self._module))
        else:
            with blamed(task, "optimizer"):
                self._objects = {"optimizer": task.optimizer(list(self._params))}
            if hasattr(task, "scheduler"):
                with blamed(task, "scheduler"):
                    self._objects["scheduler"] = task.scheduler(self._objects["optimizer"])
        for name, each in self._objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TaskStateError(
                    f"the task's {name!r} is a {type(each).__name__}, whose state cannot be saved",
                    fix="Give it the methods state_dict and load_state_dict.",
                )

    def train_step(self, batch: Batch) -> float:
        """Let the task make a step; return its loss, which may be not finite."""
        self._note_rate()
        return checked_training_loss(self._task, self._module, batch)

    def apply(self, grad_P: Tensor, unused: Collection[int] = ()) -> None:
        """Make one step with the gradients in the buffers.

        Args:
            grad_P: the buffer, fp32 (P,).
            unused: indices of parameters without a gradient.
        """
        self._note_rate()
        for index, (param, grad) in enumerate(zip(self._params, self._grads, strict=True)):
            param.grad = None if index in unused else grad
        for name, each in self._objects.items():
            with blamed(self._task, f"{name} (its step)"):
                each.step()  # type: ignore[attr-defined]

    def _note_rate(self) -> None:
        groups = (getattr(each, "param_groups", None) for each in self._objects.values())
        self.lr = next((float(found[0]["lr"]) for found in groups if found), None)

    def export(self) -> dict[str, Tensor]:
        """Return the state of all objects as vectors, fp32 (P,)."""
        tree = {name: each.state_dict() for name, each in self._objects.items()}
        packed_B = pack(tree, type(self._task).__name__)
        row_bytes = _FLOAT_BYTES * self._num_params
        rows = math.ceil(packed_B.numel() / row_bytes)
        padded_B = torch.zeros(rows * row_bytes, dtype=torch.uint8)
        padded_B[: packed_B.numel()] = packed_B
        vectors = padded_B.view(torch.float32).view(rows, self._num_params)
        return {_NAME.format(row): vector_P for row, vector_P in enumerate(vectors)}

    def restore(self, tensors: Mapping[str, Tensor], *, given: bool = False) -> None:
        """Restore the result of `export`; without tensors, the state before the first step.

        Args:
            tensors: tensors by name.
            given: not used; the state is always copied.

        Raises:
            CheckpointCorruptError: the state does not fit the objects.
        """
        self._make()
        if not tensors:
            return
        vectors = [tensors[name].contiguous().view(torch.uint8) for name in sorted(tensors)]
        tree = unpack(torch.cat(vectors))
        if not isinstance(tree, dict) or tree.keys() != self._objects.keys():
            saved = ", ".join(map(str, tree)) if isinstance(tree, dict) else "nothing"
            raise CheckpointCorruptError(
                f"the checkpoint has the state of {saved}, the task has {', '.join(self._objects)}"
            )
        for name, each in self._objects.items():
            try:
                each.load_state_dict(tree[name])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointCorruptError(
                    f"the task's {name!r} cannot load its state: {error}"
                ) from error


Stored = Tensor | StoredTensor


def in_memory(value: Stored) -> Tensor:
    """Return a tensor; of one in a file, a copy."""
    return value.whole() if isinstance(value, StoredTensor) else value


class HeldStates:
    """The newest states of the optimizers of a region's workers, at a shard.

    The shard stores them for checkpoints and for new workers, vectors of many elements in temporary
    files. It makes no steps.

    Attributes:
        lr: always None.
        rate: not used.

    Args:
        size: elements of each vector; None: that depends on the optimizer.
        workers: workers of the region.
    """

    def __init__(self, size: int | None, workers: int) -> None:
        self._size = size
        self._workers = workers
        self._states: dict[int, dict[str, Stored]] = {}
        self._sent: dict[int, dict[str, Stored]] = {}
        self.lr: float | None = None
        self.rate = 1.0

    def apply(self, grad_S: Tensor, unused: Collection[int] = ()) -> None:
        """Refuse a step, which the worker makes."""
        raise InvariantError("a parameter server was to make a step of its workers' optimizers")

    def put(self, worker: int, name: str, value: Tensor) -> None:
        """Copy a tensor of a worker's next state."""
        self._sent.setdefault(worker, {})[name] = _stored(value)

    def take(self, worker: int) -> None:
        """Let a worker's state be the one that it has `put`."""
        self._states[worker] = self._sent.pop(worker, {})

    def of(self, worker: int) -> dict[str, Stored]:
        """Return the newest state of a worker, else that of the first one; read-only."""
        return dict(self._states.get(worker) or self._states.get(0, {}))

    def live(self) -> tuple[dict[str, Tensor], dict[str, Stored]]:
        """Return no tensors that change, and those that do not.

        The first worker's have the names that a shard with an optimizer uses.
        """
        found: dict[str, Stored] = {}
        for worker, state in self._states.items():
            prefix = f"{_WORKERS}{worker}/" if worker else ""
            found |= {prefix + name: value for name, value in state.items()}
        return {}, found

    def restore(self, tensors: Mapping[str, Tensor], *, given: bool = False) -> None:
        """Restore the result of `live`, or of an optimizer, but for workers that no longer exist.

        Args:
            tensors: tensors by name.
            given: the tensors may be used without copying them.

        Raises:
            CheckpointCorruptError: a tensor does not fit the slice.
        """
        self._states = {}
        for name, value in tensors.items():
            worker, own = 0, name
            if name.startswith(_WORKERS):
                number, _, own = name.removeprefix(_WORKERS).partition("/")
                worker = int(number)
            if value.dim() and self._size is not None and value.shape != (self._size,):
                raise CheckpointCorruptError(
                    f"optimizer state '{name}' has shape {tuple(value.shape)}, the shard has "
                    f"{(self._size,)}"
                )
            if worker == 0 or worker < self._workers:
                self._states.setdefault(worker, {})[own] = _stored(value, given=given)


def _stored(value: Tensor, *, given: bool = False) -> Stored:
    if value.dim() and value.numel() >= _STORED_FROM:
        return StoredTensor(value)
    return value if given else value.clone()


def first_workers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the first worker among those of `HeldStates.live`."""
    return {name: value for name, value in tensors.items() if not name.startswith(_WORKERS)}


OptimizerSteps = InnerOptimizer | TaskOptimizer
"""Makes a worker's steps, and has a state."""


# ------------------------------------------------------------------ state as bytes


def pack(tree: object, owner: str) -> Tensor:
    """Return a state dictionary as bytes, uint8 (B,): a length, JSON, and the tensors.

    Args:
        tree: dictionaries, lists and tuples of tensors, numbers, text and None.
        owner: name of the task, for an error.

    Raises:
        TaskStateError: it contains something else.
    """
    tensors: list[Tensor] = []
    header = json.dumps(_written(tree, owner, "", tensors)).encode()
    header += b" " * (-len(header) % _ALIGNED_BYTES)
    start = torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return torch.cat([start, text, *(_padded(each) for each in tensors)])


def unpack(packed_B: Tensor) -> object:
    """Return the state dictionary of `pack`; further bytes are ignored.

    Raises:
        CheckpointCorruptError: the bytes are something else.
    """
    try:
        length = int(packed_B[:_LENGTH_BYTES].clone().view(torch.int64))
        stop = _LENGTH_BYTES + length
        if not _LENGTH_BYTES < stop <= packed_B.numel():
            raise ValueError("it is cut off")
        header = json.loads(bytes(packed_B[_LENGTH_BYTES:stop].tolist()))
        value, _ = _read(header, packed_B, stop)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise CheckpointCorruptError(
            f"the state of the task's optimizers cannot be read: {error}"
        ) from error
    return value


def _written(value: object, owner: str, path: str, tensors: list[Tensor]) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        pairs = value.items()
        written = [
            [_written(k, owner, path, tensors), _written(v, owner, f"{path}/{k}", tensors)]
            for k, v in pairs
        ]
        return {"dict": written}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_written(v, owner, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    raise TaskStateError(
        f"the state of the optimizers of {owner} has a {type(value).__name__} at {path}, which "
        "cannot be saved",
        fix="Let state_dict return tensors, numbers, text and None in dictionaries and lists.",
    )


def _read(value: Any, packed_B: Tensor, at: int) -> tuple[Any, int]:
    """Return a value, and the place of the next tensor."""
    if not isinstance(value, dict):
        return value, at
    ((kind, content),) = value.items()
    if kind == "tensor":
        name, shape = content
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no such type: {name}")
        stop = at + math.prod(shape) * dtype.itemsize
        if stop > packed_B.numel():
            raise ValueError("it is cut off")
        raw_B = packed_B[at:stop].clone()
        return raw_B.view(dtype).view(shape), stop + -stop % _ALIGNED_BYTES
    items = []
    for each in content:
        if kind == "dict":
            key, at = _read(each[0], packed_B, at)
            held, at = _read(each[1], packed_B, at)
            items.append((key, held))
        else:
            item, at = _read(each, packed_B, at)
            items.append(item)
    return {"dict": dict, "list": list, "tuple": tuple}[kind](items), at


def _padded(tensor: Tensor) -> Tensor:
    flat = tensor.cpu().contiguous().reshape(-1)
    raw_B = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    return torch.cat([raw_B, torch.zeros(-raw_B.numel() % _ALIGNED_BYTES, dtype=torch.uint8)])
