"""The shards of a region's model: one slice each, with its optimizer and its strategy.

All shards of a region carry out the same operations in the same order, so any number of shards
gives the same bits as one; `Server` sets the order. `RegionModel` is the whole model over local
or remote shards. `OpenPulls` and `HeldVersions` keep a copy of what a late worker may still
fetch while the region continues.

Shape legend: P = parameters of the model, S = of one shard's slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, Self, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError, InvariantError
from geo_ray.base.threads import in_turn
from geo_ray.data.tasks.groups import GroupRun
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.state import Outgoing, RegionState, Wait
from geo_ray.training.lazy_copy import Copied, Unread
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.optimizers import STEPS_TAKEN, InnerOptimizer, OneOptimizer
from geo_ray.training.parameters import (
    GroupPiece,
    exact_square_norm,
    fragments_in,
    pieces_of,
    split_sizes,
    square_norm,
)
from geo_ray.training.task_steps import HeldStates, Stored, first_workers, in_memory


@dataclass(frozen=True, slots=True)
class Pull:
    """Permission for a worker to fetch one version from every shard, until its next request.

    Attributes:
        worker: rank.
        ticket: number of the pull, larger than all before.
        version: number of changes that the parameters hold.
        judged: fetch the parameters of an evaluation, not the live ones.
    """

    worker: int
    ticket: int
    version: int
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """An operation that may change the parameters of every shard.

    Attributes:
        version: resulting version.
        pulls: open pulls, all of older versions.
    """

    version: int
    pulls: tuple[Pull, ...] = ()


@dataclass(slots=True)
class OpenPulls:
    """Open pulls, at the primary shard.

    Attributes:
        version: number of changes requested from the shards.
    """

    version: int = 0
    _tickets: int = 0
    _open: dict[int, Pull] = field(default_factory=dict)

    def tell(self, worker: int, *, judged: bool = False) -> Pull:
        """Permit a worker to fetch the present version."""
        self._tickets += 1
        pull = Pull(worker, self._tickets, self.version, judged)
        self._open[worker] = pull
        return pull

    def note_received(self, worker: int) -> None:
        """Close a worker's pull, because it sent its next request or is gone."""
        self._open.pop(worker, None)

    def change(self) -> Change:
        """The next operation on the shards."""
        self.version += 1
        return Change(self.version, tuple(self._open.values()))


@dataclass(slots=True)
class HeldVersions:
    """Present version and copies of older ones that workers may still fetch, at a shard.

    Attributes:
        version: number of changes that the parameters hold.
    """

    version: int = 0
    _served: dict[int, int] = field(default_factory=dict)
    _copies: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    def before(self, change: Change, present: Callable[[bool], Tensor]) -> None:
        """Copy the parameters that ``change`` overwrites, if an open pull needs them.

        Args:
            change: next change.
            present: returns the live or the evaluated parameters.
        """
        waiting = [p for p in change.pulls if self._served.get(p.worker, 0) < p.ticket]
        wanted = {(pull.version, pull.judged) for pull in waiting}
        self._copies = {key: copy for key, copy in self._copies.items() if key in wanted}
        for version, judged in wanted - self._copies.keys():
            if version == self.version:
                self._copies[version, judged] = present(judged).clone()
        self.version = change.version

    def fetch(self, pull: Pull, present: Callable[[bool], Tensor]) -> Tensor:
        """Return the version of a pull, live or as a copy; read-only.

        Raises:
            InvariantError: the pull was closed.
        """
        self._served[pull.worker] = max(pull.ticket, self._served.get(pull.worker, 0))
        if pull.version == self.version:
            return present(pull.judged)
        copy = self._copies.get((pull.version, pull.judged))
        if copy is None:
            raise InvariantError(
                f"worker {pull.worker} asks for version {pull.version} of a shard, which has "
                f"{self.version} and no copy"
            )
        return copy


_MOMENTS: Final = "optimizer/"  # the optimizer's tensors in checkpoints
As = TypeVarTuple("As")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Contribution:
    """One partition of a step.

    Attributes:
        worker: rank of the partition.
        num_samples: rows behind its gradient, its weight in the mean; 0 if refused.
        weight: explicit weight, instead of the number of rows.
    """

    worker: int
    num_samples: int
    weight: float | None = None


class Shard:
    """A slice of the parameters and its state.

    Args:
        params_S: fp32 (S,), changed in place.
        optimizer: inner optimizer's configuration.
        strategy: strategy.
        alone: whether this is the only region, which sends nothing.
        fragments: positions of the model's fragments in the slice.
        pieces: pieces of the slice by parameter.
        flat: see `InnerOptimizer`.
        optimizers: workers with optimizers, whose states the shard stores; 0: it makes the steps.
        pushes_changes: these workers push changes of several steps, which the strategy applies.
            Otherwise parameters are those that the only worker sent last, or the last mean of
            several workers.
    """

    def __init__(
        self,
        params_S: Tensor,
        optimizer: OneOptimizer,
        strategy: Strategy,
        *,
        alone: bool = False,
        fragments: tuple[tuple[int, int], ...] = (),
        pieces: Sequence[GroupPiece] = (),
        flat: bool = False,
        optimizers: int = 0,
        pushes_changes: bool = False,
    ) -> None:
        self._counts_only = optimizers > 0 and not pushes_changes
        self._averages = optimizers > 1 and not pushes_changes
        has_own_sizes = optimizer.needs_whole_parameters
        self._held = HeldStates(None if has_own_sizes else params_S.numel(), optimizers)
        self._optimizer: InnerOptimizer | HeldStates = self._held
        if not optimizers:
            self._optimizer = InnerOptimizer(optimizer, params_S, pieces, flat=flat)
        self._unused: Collection[int] = ()  # parameters without a gradient in the present step
        self._strategy = strategy
        self._alone = alone
        self._grads: dict[int, Tensor] = {}
        self._mean_S = torch.empty(0)
        self._ready_S: Tensor | None = None
        self._snapshots: dict[int, tuple[dict[str, Copied], dict[str, float]]] = {}
        # Apart: an answer is merged without a step of the optimizer, whose tensors the writer of a
        # checkpoint then has until the next step to read.
        self._unread, self._unread_moments = Unread(), Unread()
        self._versions = HeldVersions()
        whole = ((0, params_S.numel()),)
        self.state = RegionState(params_S, self._step, fragments=fragments or whole)

    @classmethod
    def from_slice(
        cls,
        params_P: Tensor,
        piece: tuple[int, int],
        optimizer: OneOptimizer,
        strategy: Strategy,
        *,
        alone: bool = False,
        parameters: Sequence[GroupRun] = (),
        flat: bool = False,
        given: bool = False,
        optimizers: int = 0,
        pushes_changes: bool = False,
    ) -> Self:
        """The shard of the slice of ``params_P``, fp32 (P,), between two places.

        It copies the slice, unless ``params_P`` is ``given`` to it and is no larger. All
        ``parameters`` of the model are stepped separately, unless ``flat`` (`InnerOptimizer`).
        """
        fragments = fragments_in(params_P.numel(), strategy.traits.exchange.fragments, piece)
        part_S = params_P[slice(*piece)]
        params_S = part_S if given and part_S.numel() == params_P.numel() else part_S.clone()
        return cls(
            params_S,
            optimizer,
            strategy,
            alone=alone,
            fragments=fragments,
            pieces=pieces_of(parameters, piece),
            flat=flat,
            optimizers=optimizers,
            pushes_changes=pushes_changes,
        )

    @property
    def params_S(self) -> Tensor:
        """The live parameters of the slice, fp32 (S,)."""
        return self.state.params_P

    @property
    def eval_params_S(self) -> Tensor:
        """The parameters that an evaluation is about, fp32 (S,); often the live ones."""
        name = None if self._alone else self._strategy.traits.region.eval_params
        return self.params_S if name is None else self.state.memory.get(name, self.params_S)

    def learning_rate(self) -> float | None:
        """Return the learning rate of the optimizer's last step here; None if it made none."""
        return self._optimizer.lr

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

    def put_moment(self, worker: int, name: str, value: Tensor) -> None:
        """Copy one of the optimizer's tensors, which a worker sends before its parameters.

        The present state stays until all have arrived, since the worker may be lost meanwhile.
        """
        self._held.put(worker, name, value)

    def moments(self, worker: int) -> dict[str, Stored]:
        """Return the optimizer's tensors by name, for a worker that makes its steps; read-only.

        A new one of several workers continues the schedule at the region's step.
        """
        found = self._held.of(worker)
        if self._averages:
            found[STEPS_TAKEN] = torch.tensor(self.state.step)
        return found

    def take_state(self, worker: int) -> None:
        """Take over the parameters that a worker has `put`, and its `put_moment` tensors."""
        self._unread.secure()
        self.params_S.copy_(self._grads.pop(worker))
        self._held.take(worker)

    def take_moments(self, worker: int) -> None:
        """Take over the tensors that a worker has sent with `put_moment`, without parameters."""
        self._held.take(worker)

    def take_mean(self, shares: Sequence[Contribution]) -> None:
        """Take over the mean of the parameters that several workers have `put`.

        Args:
            shares: the workers, with the rows of each since the last mean. Without any rows, the
                parameters stay.
        """
        self._unread.secure()
        mean_S = self._combine(shares)
        if mean_S is not None:
            self.params_S.copy_(mean_S)
        for share in shares:
            self._grads.pop(share.worker, None)

    def lose_rows(self, count: int) -> None:
        """Record that rows which were counted have no effect, since their worker is lost."""
        self.state.samples -= count

    def is_quiet(self, steps: int) -> bool:
        """Tell whether `outgoing` will need no parameters after so many steps.

        It needs none before.
        """
        if self._alone:
            return True
        state = self.state
        state.step, state.since_send = state.step + steps, state.since_send + steps
        try:
            return self._strategy.is_quiet(state)
        finally:
            state.step, state.since_send = state.step - steps, state.since_send - steps

    def keep(self, worker: int) -> None:
        """Copy a pushed partition before its memory is reused."""
        if worker in self._grads:
            self._grads[worker] = self._grads[worker].clone()

    def ask(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Call one of the methods below; see `ShardPort.ask`."""
        if change is not None:
            self._versions.before(change, self._present)
        return operation(self, *arguments)

    def fetch(self, pull: Pull) -> Tensor:
        """Return the slice of a pull's version, fp32 (S,); read-only.

        Raises:
            InvariantError: the pull was closed.
        """
        return self._versions.fetch(pull, self._present)

    def mean_sq(self, contributions: Sequence[Contribution]) -> float | None:
        """Compute the mean of a step's gradients for the next `apply`.

        Returns:
            Squared norm of this slice's mean, in fp64; None if no gradient is used.
        """
        self._ready_S = self._combine(contributions)
        return None if self._ready_S is None else exact_square_norm(self._ready_S)

    def apply(
        self,
        contributions: Sequence[Contribution],
        measure: bool = False,
        scale: float = 1.0,
        rate: float = 1.0,
        unused: Collection[int] = (),
        has_state: bool = False,
    ) -> float | None:
        """Apply one step: the sample-weighted mean of the workers' gradients.

        If workers make the optimizer's steps and push no changes, count one of them.

        Args:
            contributions: partitions and their weights.
            measure: whether to return the mean's norm.
            scale: factor on the mean.
            rate: factor on the inner optimizer's learning rate.
            unused: parameters for which no worker has a gradient.
            has_state: whether the worker has sent its state after the step.

        Returns:
            Squared norm of this slice's mean; None if not requested, or if no gradient is used.
        """
        if self._counts_only:
            self._count(contributions)
            if not self._alone:
                self._strategy.on_gradient(self.state, None)  # may copy the parameters before it
            if has_state:
                self.take_state(contributions[0].worker)
            return None
        self._unread.secure()
        grad_S = self._combine(contributions) if self._ready_S is None else self._ready_S
        self._ready_S = None
        mean_sq = square_norm(grad_S) if measure and grad_S is not None else None
        if grad_S is not None and scale != 1.0:
            self._mean_S = grad_S = torch.mul(grad_S, scale)
        for contribution in contributions:
            self._grads.pop(contribution.worker, None)
        self._count(contributions)
        self._optimizer.rate = rate
        self._unused = unused
        if self._alone:
            if grad_S is not None:
                self._step(grad_S)
        else:
            self._strategy.on_gradient(self.state, grad_S)
        self._unused = ()
        return mean_sq

    def _count(self, contributions: Sequence[Contribution]) -> None:
        self.state.step += 1
        self.state.since_send += 1
        self.state.samples += sum(c.num_samples for c in contributions)

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

    def merge(self, reply: ReplyMessage) -> None:
        """Merge the answer, whose payload is sliced for this shard."""
        self._unread.secure()
        self.state.link_busy = False
        self.state.budget = reply.steps
        self._unused = reply.unused
        self._strategy.on_reply(self.state, reply.content())
        self._unused = ()

    def live_params(self) -> Tensor:
        """Return `params_S`."""
        return self.params_S

    def snapshot(self, checkpoint: int) -> None:
        """Retain the present state until it is taken; at most the newest two.

        Tensors are copied only when they change: see `geo_ray.training.lazy_copy`.
        """
        while len(self._snapshots) > 1:
            self._snapshots.pop(min(self._snapshots))
        changing, fixed, numbers = self._live()
        moments = {name: changing.pop(name) for name in list(changing) if name.startswith(_MOMENTS)}
        copies = self._unread.copy(changing, fixed) | self._unread_moments.copy(moments)
        self._snapshots[checkpoint] = copies, numbers

    def take_snapshot(self, checkpoint: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return a retained state as copies."""
        tensors, numbers = self.release_snapshot(checkpoint)
        return {name: copy.whole() for name, copy in tensors.items()}, numbers

    def release_snapshot(self, checkpoint: int) -> tuple[dict[str, Copied], dict[str, float]]:
        """Return a retained state to its writer while the shard continues."""
        return self._snapshots.pop(checkpoint)

    def export(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return copies for a checkpoint: tensors by name, numbers by name."""
        changing, fixed, numbers = self._live()
        found = {name: value.clone() for name, value in changing.items()}
        for name, value in fixed.items():
            found[name] = in_memory(value)
        return found, numbers

    def _live(self) -> tuple[dict[str, Tensor], dict[str, Stored], dict[str, float]]:
        """Tensors that will change, tensors that will not, and numbers."""
        own, retained = self._optimizer.live()
        fixed: dict[str, Stored] = {_MOMENTS + k: v for k, v in retained.items()}
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
        """Restore the result of `export`.

        Args:
            tensors: tensors by name.
            counters: numbers by name.
            given: the shard may use the tensors without copying them.

        Raises:
            CheckpointCorruptError: a tensor is missing or does not fit the slice.
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
        moments = _with_prefix(tensors, _MOMENTS)
        if self._optimizer is not self._held:
            moments = first_workers(moments)
        self._optimizer.restore(moments, given=given)
        self.state.memory.clear()
        retained = _with_prefix(tensors, "memory/")
        self.state.memory.update({k: v if given else v.clone() for k, v in retained.items()})
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
        """Make one step of the inner optimizer; the caller has secured the parameters."""
        self._unread_moments.secure()
        self._optimizer.apply(grad_S, self._unused)

    def _present(self, judged: bool) -> Tensor:
        return self.eval_params_S if judged else self.params_S

    def _combine(self, contributions: Sequence[Contribution]) -> Tensor | None:
        used = [c for c in contributions if c.num_samples > 0]
        if not used:
            return None
        if len(used) == 1 and used[0].weight is None:
            return self._grads[used[0].worker]  # no copy, and the very bits of plain training
        total = sum(c.num_samples for c in used)
        fractions = [c.num_samples / total if c.weight is None else c.weight for c in used]
        if self._mean_S.shape != self.params_S.shape:
            self._mean_S = torch.empty_like(self.params_S)
        torch.mul(self._grads[used[0].worker], fractions[0], out=self._mean_S)
        for c, fraction in zip(used[1:], fractions[1:], strict=True):
            self._mean_S.add_(self._grads[c.worker], alpha=fraction)
        return self._mean_S

    def _sent(self, out: Outgoing | Wait | None) -> Outgoing | Wait | None:
        if isinstance(out, Outgoing):
            self.state.link_busy = True
            self.state.since_send = 0
            self.state.samples = 0
        return out


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class ShardPort(Protocol):
    """A shard: a local `Shard`, or a client of a remote one."""

    def ask(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Let the shard call one of its methods, as in ``ask(Shard.merge, reply)``.

        ``change`` is given if the call may change the parameters and there are other shards.
        """


class Concurrently(Protocol):
    """Makes several calls; all have ended when it returns or raises the first error."""

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Return the results in order."""


class RegionModel:
    """Runs each operation on all shards; slices and joins payloads.

    Attributes:
        pulls: open pulls of workers.

    Args:
        shards: shards, in the order of their slices.
        num_params: P, for slicing replies.
        fragments: number of fragments of the model.
        pool: calls all shards; concurrently if they are remote.
    """

    def __init__(
        self,
        shards: Sequence[ShardPort],
        num_params: int,
        fragments: int = 1,
        pool: Concurrently = in_turn,
    ) -> None:
        self._shards = tuple(shards)
        self._pool = pool
        self.pulls = OpenPulls()
        slices = split_sizes(num_params, len(self._shards))
        self._sizes = [[b - a for a, b in fragments_in(num_params, fragments, s)] for s in slices]
        self.num_params = num_params

    @property
    def is_sharded(self) -> bool:
        """Whether there are several shards, from which a worker must fetch one version."""
        return len(self._shards) > 1

    def apply(
        self,
        contributions: Sequence[Contribution],
        *,
        measure: bool = False,
        most_norm: float | None = None,
        rate: float = 1.0,
        unused: Sequence[int] = (),
        has_state: bool = False,
    ) -> float | None:
        """Apply one step on every shard.

        Args:
            contributions: partitions of the step.
            measure: whether to return the mean's norm.
            most_norm: largest norm of the mean gradient over all shards; longer ones are scaled
                down.
            rate: factor on the learning rate.
            unused: parameters for which no worker has a gradient.
            has_state: see `Shard.apply`.

        Returns:
            Squared norm of the mean gradient over all shards, before scaling; None if not measured.
        """
        scale = 1.0
        if most_norm is not None:
            parts = self._all(Shard.mean_sq, contributions)
            norm = math.sqrt(math.fsum(part for part in parts if part is not None))
            scale = most_norm / norm if norm > most_norm else 1.0
        found = self._change(Shard.apply, contributions, measure, scale, rate, unused, has_state)
        known = [mean_sq for mean_sq in found if mean_sq is not None]
        return sum(known) if len(known) == len(found) else None

    def is_quiet(self, steps: int = 1) -> bool:
        """See `Shard.is_quiet`; all shards are in the same state."""
        return self._shards[0].ask(Shard.is_quiet, steps)  # which is never a remote one

    def take_state(self, worker: int) -> None:
        """See `Shard.take_state`."""
        self._change(Shard.take_state, worker)

    def take_moments(self, worker: int) -> None:
        """See `Shard.take_moments`."""
        self._all(Shard.take_moments, worker)

    def take_mean(self, shares: Sequence[Contribution]) -> None:
        """See `Shard.take_mean`."""
        self._change(Shard.take_mean, shares)

    def lose_rows(self, count: int) -> None:
        """See `Shard.lose_rows`."""
        self._all(Shard.lose_rows, count)

    def learning_rate(self) -> float | None:
        """Return the learning rate of the optimizer's last step here; None if it made none."""
        return self._shards[0].ask(Shard.learning_rate)  # which is never a remote one

    def keep(self, fraction: int) -> None:
        """Copy a pushed partition in every shard before its memory is reused."""
        self._all(Shard.keep, fraction)

    def outgoing(self) -> Outgoing | Wait | None:
        """Return the region's message after a step, its payload joined to (P,)."""
        return self._join(self._change(Shard.outgoing))

    def finish(self) -> Outgoing | None:
        """The final update, joined to (P,)."""
        out = self._join(self._change(Shard.finish))
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: ReplyMessage) -> None:
        """Merge an answer whose payload is (P,)."""
        parts = [reply]
        if self.is_sharded:
            sizes = [each[reply.fragment] for each in self._sizes]
            cut = torch.split(reply.payload_P, sizes)
            parts = [replace(reply, payload_P=part_S) for part_S in cut]
        change = self._next_change()
        pairs = zip(self._shards, parts, strict=True)
        asks = [partial(shard.ask, Shard.merge, part, change=change) for shard, part in pairs]
        self._pool(asks)

    def snapshot(self, checkpoint: int) -> None:
        """Retain the present state in every shard."""
        self._all(Shard.snapshot, checkpoint)

    def whole_params(self) -> Tensor:
        """Return the live parameters, fp32 (P,), read-only; a copy if there are several shards."""
        found = self._all(Shard.live_params)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _all(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> list[R]:
        asks = [partial(each.ask, operation, *arguments, change=change) for each in self._shards]
        return self._pool(asks)

    def _change(self, operation: Callable[[Shard, *As], R], *arguments: *As) -> list[R]:
        """Run an operation that may change the parameters on all shards."""
        return self._all(operation, *arguments, change=self._next_change())

    def _next_change(self) -> Change | None:
        # One shard gives its parameters with its answer: nothing comes between.
        return self.pulls.change() if self.is_sharded else None

    def _join(self, parts: Sequence[Outgoing | Wait | None]) -> Outgoing | Wait | None:
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(type(part) is not type(first) for part in parts):
            raise InvariantError(f"shards disagree on whether to send: {parts}")
        outs = [part for part in parts if isinstance(part, Outgoing)]
        if not outs:
            return first
        payload_P = torch.cat([out.payload_P for out in outs])
        return Outgoing(payload_P, outs[0].wait, outs[0].fragment)
