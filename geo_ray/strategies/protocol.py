"""The methods of a strategy; what they are about is in `geo_ray.strategies.base`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from geo_ray.strategies.base import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import Traits


class Strategy(Protocol):
    """The methods of a strategy. All are pure in the sense of `geo_ray.strategies.base`."""

    @property
    def kind(self) -> str:
        """The strategy's name in configurations, messages and reports."""

    @property
    def traits(self) -> Traits:
        """All that others must know of the strategy."""

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take in one combined gradient of the region's workers.

        ``grad_P`` is None when every contribution was refused (not finite): parameters stay.
        """

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Decide whether to speak now, and whether to wait for the answer."""

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Merge what came back into ``region.params_P``, in place."""

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """The last word after the last step; None if the regions are equal anyway."""

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """In the averager: take in one update; answer nobody, one region, or all.

        The update's payload is the caller's again once the update is answered: keep a copy.
        """
