"""One shard of a region's parameter server: a slice of the model, its optimizer and its strategy.

Every shard of a region carries out the same operations in the same order, each on its slice, so S
shards give the same bits as one. `geo_ray.training.server.server` sets the order.

Shape legend: S = parameters in this shard's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.errors import CheckpointCorruptError, InvariantError
from geo_ray.strategies.base import Outgoing, RegionState, Reply, Strategy, Wait
from geo_ray.tasks.groups import GroupRun
from geo_ray.training.compute.flat import exact_square_norm, fragments_in, square_norm
from geo_ray.training.compute.group_pieces import GroupPiece, pieces_of
from geo_ray.training.compute.optimizers import AdamW, InnerOptimizer, Momentum, Sgd
from geo_ray.training.lazy_copy import LazyCopy, Unread
from geo_ray.training.server.pulls import Change, HeldVersions, Pull

_MOMENTS: Final = "optimizer/"  # the optimizer's tensors in checkpoints
As = TypeVarTuple("As")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Contribution:
    """One share of a step.

    Attributes:
        worker: the rank whose share it is.
        num_samples: rows behind its gradient, its weight in the mean; 0 if refused.
        weight: its weight as it is, if it is not that.
    """

    worker: int
    num_samples: int
    weight: float | None = None


class Shard:
    """A slice of the parameters and everything that belongs to it.

    Args:
        params_S: fp32 (S,), changed in place from now on.
        optimizer: the inner optimizer's configuration.
        strategy: the rule between regions.
        alone: whether this is the only region, so that there is nobody to send to.
        fragments: where the model's fragments lie in the slice.
        pieces: of the slice, where parameters are in groups.
    """

    def __init__(
        self,
        params_S: Tensor,
        optimizer: Sgd | Momentum | AdamW,
        strategy: Strategy,
        *,
        alone: bool = False,
        fragments: tuple[tuple[int, int], ...] = (),
        pieces: Sequence[GroupPiece] = (),
    ) -> None:
        self._optimizer = InnerOptimizer(optimizer, params_S, pieces)
        self._strategy = strategy
        self._alone = alone
        self._grads: dict[int, Tensor] = {}
        self._mean_S = torch.empty(0)
        self._ready_S: Tensor | None = None
        self._snapshots: dict[int, tuple[dict[str, LazyCopy], dict[str, float]]] = {}
        # Apart: an answer is merged without a step of the optimizer, whose tensors the writer of a
        # checkpoint then has until the next step to read.
        self._unread, self._unread_moments = Unread(), Unread()
        self._versions = HeldVersions()
        whole = ((0, params_S.numel()),)
        self.state = RegionState(params_S, self._step, fragments=fragments or whole)

    @classmethod
    def cut(
        cls,
        params_P: Tensor,
        piece: tuple[int, int],
        optimizer: Sgd | Momentum | AdamW,
        strategy: Strategy,
        *,
        alone: bool = False,
        groups: Sequence[GroupRun] = (),
        given: bool = False,
    ) -> Self:
        """The shard of the slice of ``params_P``, fp32 (P,), between two places.

        It copies the slice, unless ``params_P`` is ``given`` to it and is no larger.
        """
        fragments = fragments_in(params_P.numel(), strategy.traits.exchange.fragments, piece)
        part_S = params_P[slice(*piece)]
        params_S = part_S if given and part_S.numel() == params_P.numel() else part_S.clone()
        pieces = pieces_of(groups, piece)
        return cls(params_S, optimizer, strategy, alone=alone, fragments=fragments, pieces=pieces)

    @property
    def params_S(self) -> Tensor:
        """The live parameters of the slice, fp32 (S,)."""
        return self.state.params_P

    @property
    def eval_params_S(self) -> Tensor:
        """The parameters that an evaluation is about, fp32 (S,); often the live ones."""
        name = None if self._alone else self._strategy.traits.region.eval_params
        return self.params_S if name is None else self.state.memory.get(name, self.params_S)

    def put(self, worker: int, grad_S: Tensor) -> None:
        """Hold a worker's gradient, fp32 (S,), until the step that uses it.

        Raises:
            InvariantError: if it has another size.
        """
        if grad_S.shape != self.params_S.shape:
            raise InvariantError(
                f"worker {worker} pushed {tuple(grad_S.shape)}, the shard has "
                f"{tuple(self.params_S.shape)}"
            )
        self._grads[worker] = grad_S

    def keep(self, worker: int) -> None:
        """Copy what is held for a share; its place is needed before the step uses it."""
        if worker in self._grads:
            self._grads[worker] = self._grads[worker].clone()

    def ask(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Carry out one of the methods below; see `geo_ray.training.server.region_model`."""
        if change is not None:
            self._versions.before(change, self._present)
        return operation(self, *arguments)

    def fetch(self, pull: Pull) -> Tensor:
        """The slice of a version that a worker was told of, fp32 (S,); not to be changed.

        Raises:
            InvariantError: if it is not here any more.
        """
        return self._versions.fetch(pull, self._present)

    def mean_sq(self, contributions: Sequence[Contribution]) -> float | None:
        """Make the mean of a step's gradients, for the `apply` that follows.

        Returns:
            Its squared norm, of this slice, in fp64; None if nobody's gradient is used.
        """
        self._ready_S = self._combine(contributions)
        return None if self._ready_S is None else exact_square_norm(self._ready_S)

    def apply(
        self,
        contributions: Sequence[Contribution],
        measure: bool = False,
        scale: float = 1.0,
        rate: float = 1.0,
    ) -> float | None:
        """Take in one step: the sample-weighted mean of the named workers' gradients.

        Args:
            contributions: who takes part, and how much.
            measure: look at the mean's norm.
            scale: what the mean is multiplied by after that.
            rate: what the inner optimizer's learning rate is multiplied by.

        Returns:
            Its square, of this slice; None if not asked for, or if nobody's gradient is used.
        """
        self._unread.secure()
        grad_S = self._combine(contributions) if self._ready_S is None else self._ready_S
        self._ready_S = None
        mean_sq = square_norm(grad_S) if measure and grad_S is not None else None
        if grad_S is not None and scale != 1.0:
            self._mean_S = grad_S = torch.mul(grad_S, scale)
        for contribution in contributions:
            self._grads.pop(contribution.worker, None)
        state = self.state
        state.step += 1
        state.since_send += 1
        state.samples += sum(c.num_samples for c in contributions)
        self._optimizer.rate = rate
        if self._alone:
            if grad_S is not None:
                self._step(grad_S)
        else:
            self._strategy.on_gradient(state, grad_S)
        return mean_sq

    def outgoing(self) -> Outgoing | Wait | None:
        """Ask the strategy, after a step, whether to send something now."""
        if self._alone:
            return None
        self._unread.secure()
        return self._sent(self._strategy.after_step(self.state))

    def finish(self) -> Outgoing | None:
        """The strategy's final update after the last step."""
        if self._alone:
            return None
        self._unread.secure()
        out = self._sent(self._strategy.on_finish(self.state))
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: Reply) -> None:
        """Merge the answer (its payload cut to this slice)."""
        self._unread.secure()
        self.state.link_busy = False
        self.state.budget = reply.steps
        self._strategy.on_reply(self.state, reply)

    def live_params(self) -> Tensor:
        """`params_S`, for who asks for it."""
        return self.params_S

    def snapshot(self, checkpoint: int) -> None:
        """Keep the present state until it is taken; the newest two at most.

        What changes before it is read is copied then: see `geo_ray.training.lazy_copy`.
        """
        while len(self._snapshots) > 1:
            self._snapshots.pop(min(self._snapshots))
        changing, fixed, numbers = self._live()
        moments = {name: changing.pop(name) for name in list(changing) if name.startswith(_MOMENTS)}
        copies = self._unread.copy(changing, fixed) | self._unread_moments.copy(moments)
        self._snapshots[checkpoint] = copies, numbers

    def take_snapshot(self, checkpoint: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Hand over the state that `snapshot` kept, as copies."""
        tensors, numbers = self.release_snapshot(checkpoint)
        return {name: copy.whole() for name, copy in tensors.items()}, numbers

    def release_snapshot(self, checkpoint: int) -> tuple[dict[str, LazyCopy], dict[str, float]]:
        """Hand over the state that `snapshot` kept to who writes it, while the shard goes on."""
        return self._snapshots.pop(checkpoint)

    def export(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Copies of everything that a checkpoint needs: tensors by name, numbers by name."""
        changing, fixed, numbers = self._live()
        return fixed | {name: value.clone() for name, value in changing.items()}, numbers

    def _live(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """Tensors that will change, tensors that will not, and numbers."""
        own, kept = self._optimizer.live()
        fixed = {_MOMENTS + k: v for k, v in kept.items()}
        changing = {"params": self.params_S}
        changing |= {_MOMENTS + k: v for k, v in own.items()}
        changing |= {f"memory/{k}": v for k, v in self.state.memory.items()}
        state = self.state
        budget = {} if state.budget is None else {"budget": state.budget}
        return (
            changing,
            fixed,
            {
                "step": state.step,
                "since_send": state.since_send,
                "samples": state.samples,
                "link_busy": float(state.link_busy),
                **budget,
                **{f"memory/{k}": v for k, v in state.numbers.items()},
            },
        )

    def restore(
        self, tensors: Mapping[str, Tensor], counters: Mapping[str, float], *, given: bool = False
    ) -> None:
        """Become what `export` saved.

        Args:
            tensors: by name.
            counters: numbers by name.
            given: the tensors are the shard's from now on, which saves a copy of them.

        Raises:
            CheckpointCorruptError: if a tensor is missing or does not fit the slice.
        """
        params_S = tensors.get("params")
        if params_S is None or params_S.shape != self.params_S.shape:
            found = "missing" if params_S is None else tuple(params_S.shape)
            raise CheckpointCorruptError(
                f"shard state 'params' is {found}, the shard has {tuple(self.params_S.shape)}"
            )
        self._unread.secure()
        self._unread_moments.secure()
        self.params_S.copy_(params_S)
        self._optimizer.restore(_with_prefix(tensors, _MOMENTS), given=given)
        self.state.memory.clear()
        kept = _with_prefix(tensors, "memory/")
        self.state.memory.update({k: v if given else v.clone() for k, v in kept.items()})
        state = self.state
        state.numbers.clear()
        state.numbers.update(
            {k.removeprefix("memory/"): v for k, v in counters.items() if k.startswith("memory/")}
        )
        state.step = int(counters["step"])
        state.since_send = int(counters["since_send"])
        state.samples = int(counters["samples"])
        state.budget = int(counters["budget"]) if "budget" in counters else None
        state.link_busy = bool(counters.get("link_busy", 0.0))

    def _step(self, grad_S: Tensor) -> None:
        """One step of the inner optimizer; parameters are secured by who begins a change."""
        self._unread_moments.secure()
        self._optimizer.apply(grad_S)

    def _present(self, judged: bool) -> Tensor:
        return self.eval_params_S if judged else self.params_S

    def _combine(self, contributions: Sequence[Contribution]) -> Tensor | None:
        used = [c for c in contributions if c.num_samples > 0]
        if not used:
            return None
        if len(used) == 1 and used[0].weight is None:
            return self._grads[used[0].worker]  # no copy, and the very bits of plain training
        total = sum(c.num_samples for c in used)
        shares = [c.num_samples / total if c.weight is None else c.weight for c in used]
        if self._mean_S.shape != self.params_S.shape:
            self._mean_S = torch.empty_like(self.params_S)
        torch.mul(self._grads[used[0].worker], shares[0], out=self._mean_S)
        for c, share in zip(used[1:], shares[1:], strict=True):
            self._mean_S.add_(self._grads[c.worker], alpha=share)
        return self._mean_S

    def _sent(self, out: Outgoing | Wait | None) -> Outgoing | Wait | None:
        if isinstance(out, Outgoing):
            self.state.link_busy = True
            self.state.since_send = 0
            self.state.samples = 0
        return out


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
