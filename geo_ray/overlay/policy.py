"""The protocol of policies, which decide who sends which part of a round to whom.

A policy has no clock, socket or thread. The coordinator tells it of events and hands its orders to
the bridges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from geo_ray.overlay.links import Links
from geo_ray.overlay.mend import mend
from geo_ray.overlay.plan import SendOrder, Tree


class Policy(Protocol):
    """The methods of a policy.

    Attributes:
        fused: whether a segment's result goes out from the region that completed its sum, before
            the other segments are complete. Otherwise all sums are completed in one region, which
            sends the result.
        settle_s: how long to gather regions that become ready at about the same time.
        probes: how often to measure links between two rounds; see `probing`.
    """

    fused: bool
    settle_s: float
    probes: int

    def open(self, rnd: int) -> list[SendOrder]:
        """Return orders for a round in which no region is ready yet."""

    def ready(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Orders once these regions, in the order of their becoming ready, have contributions.

        Called again with more regions as they become ready.
        """

    def summed(self, rnd: int, now_s: float) -> list[SendOrder]:
        """Return orders for the result; called once, when the sum is complete. Not if `fused`."""

    def sent(self, rnd: int, send: SendOrder, now_s: float) -> list[SendOrder]:
        """Return more orders after a transfer is over."""

    def lost(self, rnd: int, src: int, dst: int, now_s: float) -> list[SendOrder]:
        """Return more orders after a result's transfer was given up; others serve ``dst``."""

    def restart(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Return all orders again, without broken links, for a round whose sums are restarted."""

    def close(self, rnd: int) -> None:
        """Forget a round."""


class PlannedPolicy:
    """The policy that follows trees which are known before the round begins.

    Args:
        plan: the trees of a round.
        links: what is known to be broken or down.
        fused: see `Policy`.
        probes: see `Policy`.
    """

    settle_s = 0.0

    def __init__(
        self, plan: Callable[[int], list[Tree]], links: Links, *, fused: bool, probes: int = 0
    ) -> None:
        self.fused = fused
        self.probes = probes
        self._plan = plan
        self._links = links

    def open(self, rnd: int) -> list[SendOrder]:
        """See `Policy.open`."""
        trees = self._trees(rnd)
        sums = [send for tree in trees for send in tree.sums()]
        return sums + (self._results(trees) if self.fused else [])

    def ready(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Nothing: all orders are out."""
        return []

    def summed(self, rnd: int, now_s: float) -> list[SendOrder]:
        """See `Policy.summed`."""
        return self._results(self._trees(rnd))

    def sent(self, rnd: int, send: SendOrder, now_s: float) -> list[SendOrder]:
        """Nothing: all orders are out."""
        return []

    def lost(self, rnd: int, src: int, dst: int, now_s: float) -> list[SendOrder]:
        """Nothing: all orders are out."""
        return []

    def restart(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """See `Policy.restart`."""
        return self.open(rnd)

    def close(self, rnd: int) -> None:
        """Do nothing, because nothing is kept per round."""

    def _trees(self, rnd: int) -> list[Tree]:
        return [mend(tree, self._links) for tree in self._plan(rnd)]

    @staticmethod
    def _results(trees: list[Tree]) -> list[SendOrder]:
        return [send for tree in trees for send in tree.results()]
