"""One flat fp32 buffer behind a module's parameters: views, not copies.

Strategies, codecs and parameter servers do maths on vectors; only the worker knows layers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor, nn

from geo_ray.errors import TaskOutputError, TaskStateError

_VECTOR = 16  # floats in the widest register, 512 bits
_PIECE = 2**14  # elements whose squares fp32 sums up exactly enough


def count_parameters(module: nn.Module) -> int:
    """P: the number of trainable scalars of ``module``; a shared parameter counts once."""
    return sum(p.numel() for p in _trainable(module))


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Shapes of all trainable parameters, in the order in which the vector holds them."""
    return tuple(tuple(p.shape) for p in _trainable(module))


def read_parameters(module: nn.Module) -> Tensor:
    """A copy of all trainable parameters as one fp32 vector (P,), in the module's order."""
    return torch.cat([p.detach().reshape(-1).float() for p in _trainable(module)]).cpu()


def write_parameters(module: nn.Module, params_P: Tensor) -> None:
    """Give the trainable parameters of ``module`` the values of ``params_P``, fp32 (P,).

    Raises:
        TaskOutputError: if the module has another number of them.
    """
    check_module(module)
    if params_P.shape != (count_parameters(module),):
        raise _other_size(module, params_P)
    with torch.no_grad():
        sizes = [p.numel() for p in _trainable(module)]
        for param, part in zip(_trainable(module), torch.split(params_P, sizes), strict=True):
            param.copy_(part.view(param.shape))


def square_norm(x_P: Tensor) -> float:
    """The squared 2-norm of a contiguous fp32 vector (P,), in one pass.

    Summed up in fp32, ten million squares are wrong by a thousandth, which is as much as the
    differences of norms that gradient noise is taken from. So only short pieces are.
    """
    whole = x_P.numel() // _PIECE * _PIECE
    total = float(torch.linalg.vector_norm(x_P[whole:])) ** 2
    if whole:
        norms = torch.linalg.vector_norm(x_P[:whole].view(-1, _PIECE), dim=1).double()
        total += float(torch.dot(norms, norms))
    return total


def exact_square_norm(x_P: Tensor) -> float:
    """The same in fp64, so that the sum over slices hardly depends on where they are cut."""
    pieces = torch.split(x_P, _PIECE)
    return sum(float(torch.dot(piece.double(), piece.double())) for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A trained parameter, the module that holds it, and its places in the two buffers."""

    name: str
    owner: nn.Module
    leaf: str
    param: nn.Parameter
    value: Tensor
    grad: Tensor
    value_at: int
    grad_at: int

    @property
    def is_held(self) -> bool:
        """Whether the module still holds this very parameter."""
        return getattr(self.owner, self.leaf, None) is self.param

    @property
    def is_attached(self) -> bool:
        """Whether parameter and gradient lie in the buffers; compares addresses only."""
        return (
            _address(self.param) == self.value_at
            and _address(self.param.grad) == self.grad_at
            and self.is_held
        )


class FlatModel:
    """Makes a module's parameters and gradients views of two flat buffers.

    User code can replace these views: ``module.zero_grad()`` drops gradients, and
    ``module.to(...)`` moves parameters to new memory. Call `take_gradient` after each backward and
    `attach` after other user code, so that the module always trains in the buffers.

    Args:
        module: its trainable parameters must be fp32.
        params_P: fp32 (P,) buffer that from now on holds the parameters; its content counts.
        grad_P: fp32 (P,) buffer into which ``backward`` accumulates.

    Raises:
        TaskOutputError: if the module has other dtypes or another size.
    """

    def __init__(self, module: nn.Module, params_P: Tensor, grad_P: Tensor) -> None:
        check_module(module)
        num_params = count_parameters(module)
        if params_P.shape != (num_params,) or grad_P.shape != (num_params,):
            raise _other_size(module, params_P, grad_P)
        self.module = module
        self.params_P = params_P
        self.grad_P = grad_P
        self._slots: list[_Slot] = []
        offset = 0
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            piece = slice(offset, offset + param.numel())
            value, grad = params_P[piece].view(param.shape), grad_P[piece].view(param.shape)
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = attrgetter(path)(module) if path else module  # scripted ones, too
            at = value.data_ptr(), grad.data_ptr()
            slot = _Slot(name, owner, leaf, param, value, grad, *at)
            _attach(slot)
            self._slots.append(slot)
            offset += param.numel()

    def zero_grad(self) -> None:
        """Clear all gradients, keeping them views."""
        self.grad_P.zero_()

    def take_gradient(self) -> None:
        """Bring gradients that ``backward`` left elsewhere into the buffer, and attach the model.

        Raises:
            TaskStateError: the loss replaced a parameter, or computed with other values of it; the
                gradient is then not one of the parameters in the buffer.
        """
        for slot in self._detached():
            param = slot.param
            if _address(param) != slot.value_at and not _same_values(param.detach(), slot.value):
                raise TaskStateError(
                    f"the task's loss gives the trained parameter {slot.name!r} other values "
                    f"({param.dtype}, {param.device}), which are not those that are trained",
                    fix="Change trained parameters nowhere but in the optimizer; for another "
                    "precision use autocast, or convert a copy of the model.",
                )
            if param.grad is None:
                slot.grad.zero_()
            elif _address(param.grad) != slot.grad_at:
                slot.grad.copy_(param.grad.detach().to_dense())
            _attach(slot)

    def attach(self) -> None:
        """Make parameters and gradients views again; the values in the buffers count.

        Raises:
            TaskStateError: the task replaced a parameter.
        """
        for slot in self._detached():
            _attach(slot)

    def _detached(self) -> list[_Slot]:
        found = [slot for slot in self._slots if not slot.is_attached]
        for slot in found:
            if not slot.is_held:
                raise TaskStateError(
                    f"the task replaces the trained parameter {slot.name!r} by another object, "
                    "which is not trained",
                    fix="Make all parameters in model(seed), and keep them: convert a copy of the "
                    "model (copy.deepcopy) where another one is needed.",
                )
        return found


def _address(tensor: Tensor | None) -> int | None:
    """Where the elements are; None if there are none, or not all, as in a sparse gradient."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr()


def _same_values(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


def _attach(slot: _Slot) -> None:
    slot.param.grad = None  # a gradient must fit the parameter's type and device
    slot.param.data = slot.value
    slot.param.grad = slot.grad.detach()  # a tensor of its own: `Module.to` gives it other memory


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be trained as one flat fp32 vector.

    Raises:
        TaskOutputError: naming the parameter.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise TaskOutputError(
            "model has no trainable parameters",
            fix="Leave requires_grad of some parameters on.",
        )
    for name, param in trainable:
        if param.dtype != torch.float32:
            raise TaskOutputError(
                f"parameter '{name}' is {param.dtype}, not float32",
                fix="Keep parameters in float32; use autocast inside for lower precision.",
            )


def split_sizes(num_params: int, num_shards: int) -> list[tuple[int, int]]:
    """Cut P parameters into nearly equal contiguous slices.

    Slices begin at multiples of a vector register's length: the fused AdamW computes what is left
    over at a slice's end in another way, and S shards would not give the bits of one.

    Returns:
        ``(start, stop)`` per shard.
    """
    step = _VECTOR if num_params >= num_shards * _VECTOR else 1
    inner = [num_params * i // num_shards // step * step for i in range(1, num_shards)]
    return list(pairwise([0, *inner, num_params]))


def fragment_cuts(num_params: int, fragments: int) -> list[tuple[int, int]]:
    """Where the fragments of a model lie, as ``(start, stop)``.

    With several, one more follows that is the whole: the last exchange is about all of it.
    """
    cuts = split_sizes(num_params, fragments)
    return cuts if fragments == 1 else [*cuts, (0, num_params)]


def fragments_in(
    num_params: int, fragments: int, piece: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Where the model's fragments lie within one shard's slice; empty ranges where they do not.

    Args:
        num_params: P.
        fragments: number of parts.
        piece: the slice, as (start, stop).

    Returns:
        ``(start, stop)`` per entry of `fragment_cuts`, counted from the slice's start.
    """
    start, stop = piece
    cuts = fragment_cuts(num_params, fragments)
    return tuple(
        (min(max(a, start), stop) - start, max(min(b, stop), start) - start) for a, b in cuts
    )


def digest(params_P: Tensor) -> str:
    """SHA-256 of the parameters' bytes; equal digests mean equal models to the bit."""
    return hashlib.sha256(params_P.detach().cpu().contiguous().numpy().data).hexdigest()


def _other_size(module: nn.Module, *vectors: Tensor) -> TaskOutputError:
    sizes = " and ".join(str(vector.numel()) for vector in vectors)
    return TaskOutputError(
        f"model has {count_parameters(module)} parameters, the buffers hold {sizes}",
        fix="Let model(seed) make parameters of the same shapes wherever it is called.",
    )


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
