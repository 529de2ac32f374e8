"""Membership of a run: views, the averager's leader, and changes at barriers.

Rule: members change only at a *barrier*, where all regions hold the same model. Blocking
round-based strategies reach a barrier at the end of every round. Other strategies are flushed: the
averager marks its answers (`ReplyMessage.flush`), each region sends a final update and waits, and
the answers given together (`ReplyMessage.barrier`) form the barrier. A joining region starts from
the state of a donor region at the barrier. No checkpoint begins while a change is pending.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError, InvariantError, RegionLostError
from geo_ray.strategies.state import AveragerState
from geo_ray.strategies.traits import Traits
from geo_ray.training.assignment import Ledger
from geo_ray.training.messages import Barrier, ReplyMessage
from geo_ray.training.model_buffers import REGION_PREFIX
from geo_ray.training.payload_encoding import REFERENCE


class AveragerLeader(NamedTuple):
    """Region whose bridge hosts the averager, and the leader's term.

    Every failover begins a new term. A region that knows a term ignores leaders of lower terms.

    Attributes:
        region: leader.
        term: 1 for the configured leader; grows by 1 with every failover.
    """

    region: str
    term: int = 1


@dataclass(frozen=True, slots=True)
class View:
    """The regions of a run at one time; the averager owns it.

    Attributes:
        members: the regions that take part, sorted.
        joining: those of them that are not there yet.
        lost: those that took part until they were lost, in that order.
        left: those that took part until they were asked to leave, in that order.
        generation: 1 at the start of a run; grows by 1 with every change.
        donor: whose copies those begin as that are joining.
        since: the epochs from which on those take part that joined in this run, by region.
    """

    members: tuple[str, ...]
    joining: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    generation: int = 1
    donor: str = ""
    since: tuple[tuple[str, int], ...] = ()

    def check(self, region: str, said_in: int = 0) -> None:
        """Refuse messages of regions that are no members.

        Args:
            region: sender.
            said_in: generation of the view known to the sender; 0 if not sent.

        Raises:
            RegionLostError: the region was removed, or has joined again and sent this before it was
                removed.
            InvariantError: the region was never a member.
        """
        if region in self.members:
            since = dict(self.since).get(region, 1)
            if 0 < said_in < since:
                raise RegionLostError(
                    f"region '{region}' sent this in view {said_in}: it was removed since, and "
                    f"has been a member again since view {since}"
                )
            return
        if region in (*self.lost, *self.left):
            raise RegionLostError(
                f"region '{region}' is no longer a member: the run continued without it (view "
                f"{self.generation})"
            )
        raise InvariantError(f"'{region}' is no member of this run")

    @property
    def wire_generation(self) -> int:
        """The generation as messages have it, which leave the first one out."""
        return self.generation if self.generation > 1 else 0

    def without(self, region: str) -> View:
        """The next view: ``region`` is lost; the same one if it was before, or had left.

        Raises:
            InvariantError: it never took part.
        """
        if region in (*self.lost, *self.left):
            return self
        self.check(region)
        gone = self._of(name for name in self.members if name != region)
        return replace(gone, lost=(*self.lost, region), generation=self.generation + 1)

    def changed(self, joins: Sequence[str], leaves: Sequence[str], donor: str = "") -> View:
        """Return the next view.

        Args:
            joins: regions that join; they may have been members before.
            leaves: members that leave.
            donor: region whose state the joining regions copy.

        Raises:
            InvariantError: a joining region is a member, a leaving region is none, or no member
                remains.
        """
        stay = [name for name in self.members if name not in leaves]
        if set(joins) & set(self.members) or set(leaves) - set(self.members) or not stay:
            raise InvariantError(
                f"{', '.join(self.members)} are members: {', '.join(joins) or 'no region'} cannot "
                f"join and {', '.join(leaves) or 'no region'} leave"
            )
        then = self._of([*stay, *joins])
        return replace(
            then,
            joining=tuple(sorted({*then.joining, *joins})),
            lost=tuple(name for name in self.lost if name not in joins),
            left=(*[name for name in self.left if name not in joins], *leaves),
            generation=self.generation + 1,
            donor=donor,
            since=(*then.since, *((name, self.generation + 1) for name in sorted(joins))),
        )

    def begun(self, region: str) -> View:
        """Return the view with ``region`` active."""
        if region not in self.joining:
            return self
        return replace(self, joining=tuple(name for name in self.joining if name != region))

    def export(self) -> dict[str, object]:
        """Return plain values for a checkpoint; joining regions count as absent."""
        return {"generation": self.generation, "lost": list(self.lost), "left": list(self.left)}

    def restored(self, saved: object) -> View:
        """Return this view of a resumed run with all earlier changes applied.

        Args:
            saved: result of `export`; None if the membership never changed.

        Raises:
            CheckpointCorruptError: ``saved`` is invalid.
        """
        if saved is None:
            return self
        if not isinstance(saved, Mapping):
            raise CheckpointCorruptError(f"the averager's view is {saved!r:.100}")
        generation, lost, left = saved.get("generation"), saved.get("lost"), saved.get("left", [])
        if type(generation) is not int or not isinstance(lost, list) or not isinstance(left, list):
            raise CheckpointCorruptError(f"the averager's view is {saved!r:.100}")
        gone = [tuple(str(n) for n in names if n not in self.members) for names in (lost, left)]
        return replace(self, lost=gone[0], left=gone[1], generation=generation)

    def _of(self, names: Iterable[str]) -> View:
        members = tuple(sorted(names))
        joining = tuple(name for name in self.joining if name in members)
        since = tuple(pair for pair in self.since if pair[0] in members and pair[0] in self.members)
        return replace(self, members=members, joining=joining, since=since)


V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class MemberChange:
    """Membership change at the next barrier.

    Attributes:
        joins: regions that join.
        leaves: regions that leave.
        preferred_donor: region whose state joining regions copy, if it is still a member.
    """

    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    preferred_donor: str = ""

    def but(self, region: str) -> MemberChange:
        """Return the change without a lost region.

        The barrier happens even if the change becomes empty: regions are already flushing.
        """
        joins = tuple(name for name in self.joins if name != region)
        leaves = tuple(name for name in self.leaves if name != region)
        return replace(self, joins=joins, leaves=leaves)

    def after(self, view: View) -> View:
        """Return the view after the change.

        Raises:
            InvariantError: the change does not fit the view.
        """
        if not (self.joins or self.leaves):
            return view
        donor = self.donor(view) if self.joins else ""
        return view.changed(self.joins, self.leaves, donor)

    def donor(self, view: View) -> str:
        """Return the region whose state joining regions copy."""
        stay = [name for name in view.members if name not in (*self.leaves, *view.joining)]
        return self.preferred_donor if self.preferred_donor in stay or not stay else stay[0]

    def marked(self, replies: Sequence[ReplyMessage], view: View, donor: str) -> list[ReplyMessage]:
        """Return the answers at the barrier, which begins ``view``."""
        donor_name = donor if self.joins else None
        return [
            replace(
                r,
                barrier=Barrier(view.generation, r.to == donor_name, r.to in self.leaves),
                view=view.generation,
            )
            for r in replies
        ]


def flushes(traits: Traits) -> bool:
    """Tell whether a barrier needs final updates."""
    return not traits.in_rounds or traits.exchange.meets_by_final_updates


def donor_of(steps: Mapping[str, int], leader: str) -> str:
    """Return the best donor: the region with the most remaining steps, preferably the leader.

    Args:
        steps: steps of the members so far, where they differ.
        leader: averager's region.
    """
    return min(steps, key=lambda name: (steps[name], name != leader, name))


class KeepsRegions(Protocol):
    """Interface of objects with per-region state."""

    def join(self, region: str, donor: str) -> None:
        """``region`` begins as a copy of ``donor``."""

    def leave(self, region: str) -> None:
        """Remove the state of ``region``."""


def follow(state: AveragerState, parts: Sequence[KeepsRegions], view: View, donor: str) -> None:
    """Apply a view to the strategy's state and to other objects with per-region state.

    Args:
        state: strategy's state, in the previous view.
        parts: other objects with per-region state.
        view: new view.
        donor: region whose state joining regions copy.
    """
    before, state.members = state.members, view.members
    for region in [name for name in view.members if name not in before]:
        _copy(state.memory, donor, region, Tensor.clone)
        _copy(state.numbers, donor, region, float)
        for part in parts:
            part.join(region, donor)
    for region in [name for name in before if name not in view.members]:
        state.waiting.pop(region, None)
        _drop(state.memory, region)
        _drop(state.numbers, region)
        for part in parts:
            part.leave(region)


def _drop(values: dict[str, V], region: str) -> None:
    for name in [name for name in values if name.endswith(f"/{region}")]:
        del values[name]


def _copy(values: dict[str, V], donor: str, joining: str, copied: Callable[[V], V]) -> None:
    for name in [name for name in values if name.endswith(f"/{donor}")]:
        values[name.removesuffix(donor) + joining] = copied(values[name])


ShardState = tuple[dict[str, Tensor], dict[str, float]]
"""Tensors and numbers of one shard, as `Shard.export` gives them."""


def region_state(
    control: Mapping[str, object], tensors: Mapping[str, Tensor], rows: Mapping[str, object] | None
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the arguments of a joining region's `Server.restore`.

    Args:
        control: control state of the donor, from its `StateTransfer`.
        tensors: donor's wire tensors and model buffers.
        rows: joining region's own sample ledger, if it was a member before.
    """
    ledger = Ledger() if rows is None else Ledger.restore(dict(rows))
    for worker in list(ledger.in_flight):
        ledger.take_back(worker)
    own: dict[str, object] = {"ledger": ledger.export(), "noise": None, "times_s": None}
    retained = {k: v for k, v in tensors.items() if k == REFERENCE or k.startswith(REGION_PREFIX)}
    return {**control, **own}, retained


def rows_of(control: Mapping[str, object]) -> dict[str, object]:
    """Return the sample ledger in a region's part of a checkpoint, for `region_state`.

    Raises:
        CheckpointCorruptError: the part has none.
    """
    ledger = control.get("ledger")
    if not isinstance(ledger, Mapping):
        raise CheckpointCorruptError("a region's part has no sample ledger")
    return dict(ledger)


def shard_state(state: ShardState, traits: Traits) -> ShardState:
    """Return the state of a joining region's shard from the donor's shard of the same slice."""
    tensors, numbers = state
    unsent = {f"memory/{name}" for name in traits.region.unsent}
    return {k: v for k, v in tensors.items() if k not in unsent}, dict(numbers)
