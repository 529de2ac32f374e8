"""How members change in the middle of a run: at a *border*, where all regions hold the same model.

Idea: between two exchanges every region has done something that the others have not heard of, and
what the averager owes a region depends on what that region was told. At a border neither is so. So
whoever begins there as a copy of another region, its parameters, its optimizer's moments and all
that the averager keeps of it, stands to the others as that region does. That is the same rule for
every strategy.

Rule: strategies in rounds that stand still for them, and that need no last word, have a border at
the end of every round: the next one is taken. All others come to one by last words, as at the end
of a run: the averager marks every answer (`Reply.gather`), a region that merges one says its last
word after the step that is being computed and waits, and the answers to all last words, given
together, are the border (`Reply.border`). Then training goes on.

Meeting others: while a change is pending no checkpoint begins, and one that has begun was copied
before; so no checkpoint holds a half of it. A run that is told to finish forgets it. A region that
is lost meanwhile is not waited for; that it should have joined or left is forgotten.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from geo_ray.strategies.base import AveragerState, Border, Reply
from geo_ray.strategies.traits import Traits
from geo_ray.training.membership.view import View

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class MemberChange:
    """What is to be different at the next border.

    Attributes:
        joins: regions that begin there.
        leaves: regions that end there.
        donor: whose state newcomers begin with; another one if it is not there.
    """

    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    donor: str = ""

    def but(self, region: str) -> MemberChange:
        """The change without a region that is lost.

        If nothing is left of it the border comes all the same: regions are on their way there.
        """
        joins = tuple(name for name in self.joins if name != region)
        leaves = tuple(name for name in self.leaves if name != region)
        return replace(self, joins=joins, leaves=leaves)

    def after(self, view: View) -> View:
        """The view that begins.

        Raises:
            InvariantError: there is none such.
        """
        if not (self.joins or self.leaves):
            return view
        giver = self.giver(view) if self.joins else ""
        return view.changed(self.joins, self.leaves, giver)

    def giver(self, view: View) -> str:
        """Whose state newcomers begin with."""
        stay = [name for name in view.members if name not in (*self.leaves, *view.joining)]
        return self.donor if self.donor in stay or not stay else stay[0]

    def marked(self, replies: Sequence[Reply], view: View, giver: str) -> list[Reply]:
        """The answers at the border, which begins ``view``."""
        donor = giver if self.joins else None
        return [
            replace(
                r, border=Border(view.epoch, r.to == donor, r.to in self.leaves), view=view.epoch
            )
            for r in replies
        ]


def gathers(traits: Traits) -> bool:
    """Whether a border needs last words."""
    return not traits.in_rounds or traits.exchange.meets_by_last_words


def giver_of(steps: Mapping[str, int], home: str) -> str:
    """Whose copy newcomers had best begin as: of those with most left to do, the averager's region.

    Args:
        steps: of the members so far, where they do not all take the same.
        home: where the averager lives.
    """
    return min(steps, key=lambda name: (steps[name], name != home, name))


class KeepsRegions(Protocol):
    """What keeps something of every region."""

    def join(self, region: str, giver: str) -> None:
        """``region`` begins as a copy of ``giver``."""

    def leave(self, region: str) -> None:
        """Nothing more is kept of ``region``."""


def follow(state: AveragerState, parts: Sequence[KeepsRegions], view: View, giver: str) -> None:
    """Let the strategy's averager, and what else keeps something of regions, enter a view.

    Args:
        state: of the strategy, in the view before.
        parts: what else.
        view: the next one.
        giver: as whose copies newcomers begin.
    """
    before, state.members = state.members, view.members
    for region in [name for name in view.members if name not in before]:
        _copy(state.memory, giver, region, Tensor.clone)
        _copy(state.numbers, giver, region, float)
        for part in parts:
            part.join(region, giver)
    for region in [name for name in before if name not in view.members]:
        state.waiting.pop(region, None)
        _drop(state.memory, region)
        _drop(state.numbers, region)
        for part in parts:
            part.leave(region)


def _drop(books: dict[str, V], region: str) -> None:
    for name in [name for name in books if name.endswith(f"/{region}")]:
        del books[name]


def _copy(books: dict[str, V], giver: str, newcomer: str, copied: Callable[[V], V]) -> None:
    for name in [name for name in books if name.endswith(f"/{giver}")]:
        books[name.removesuffix(giver) + newcomer] = copied(books[name])
