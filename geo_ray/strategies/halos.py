"""HALoS: asynchronous at both levels, workers to their region's server, regions to the averager.

Idea: a worker trains a few local steps and pushes its change. Its region's server applies each push
with delayed Nesterov, without waiting. After K pushes the server sends its change since the last
merge to the averager, which applies it with a second delayed Nesterov and answers with the global
model. The region moves towards it by a fraction alpha, and workers never stop.

Rule: per push ``w_r <- w_r - DN_local(Delta_w)``. After K pushes the region sends ``D = anchor -
w_r`` and keeps ``S = w_r``. On the answer, with ``pend = S - w_r`` (pushed since), ``w_r <- (1 -
alpha) S + alpha G - pend`` and ``anchor <- w_r + pend``, so that the next D contains ``pend`` once.

With ``in_flight: paper`` the merge is ``w_r <- (1 - alpha) w_r + alpha G``, ``anchor <- w_r``, and
pushes during the exchange are never reported. The difference is ours; its effect was not measured
separately.

When: several regions with several workers each, of unequal speed (``train.mode: async``, so that
pushes are applied one by one). A step of the run is one push of ``local_steps`` batches.

Defaults are those of the released recipe (`examples/run_halos.sh` of utnslab/halos, made for four
workers per region): H 8, K 32, alpha 0.25; rate 0.2, momentum 0.9, N 16 at the region; 0.15, 0.5,
N 2 at the averager. Its scripts pass *rate times N* to an optimizer that divides by N, so ``lr`` is
0.2 * 16 = 3.2 and 0.15 * 2 = 0.3 here. Equal pushes ``g`` then move a region by ``lr / N`` = 0.2 g
each at once, and by ``lr beta m`` with every N-th, where m settles at ``g / (1 - beta)``. Together
that is ``lr / (N (1 - beta))`` per push: 2 g at a region, 0.3 D at the averager; over the first 320
pushes, while m still grows, 1.29 g. A region with one worker has nothing to combine: use a smaller
K, and ``local: {lr: 1, momentum: 0, period: 1}``, which passes pushes on unchanged.

Source: HALoS (arXiv 2506.04531), reconstructed from its abstract and released code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from geo_ray.strategies import global_model
from geo_ray.strategies import local_steps as local
from geo_ray.strategies.global_model import OneByOne
from geo_ray.strategies.outer import DelayedNesterov
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

_GLOBAL, _SENT = "global", "sent"


class Halos(OneByOne):
    """Configuration and rule of `halos`."""

    kind: Literal["halos"] = "halos"
    local_steps: int = Field(8, ge=1, description="local steps of a worker per push (H)")
    interval: int = Field(32, ge=1, description="pushes per exchange over the WAN (K)")
    by_speed: bool = Field(
        False,
        description="slower regions push less often per exchange, in proportion to their speed",
    )
    alpha: float = Field(0.25, gt=0, le=1, description="weight of the global model in a merge")
    in_flight: Literal["exact", "paper"] = Field(
        "exact",
        description="exact: pushes during an exchange are part of the next one; paper: they are "
        "not reported",
    )
    local: DelayedNesterov = DelayedNesterov(lr=3.2, momentum=0.9, period=16)
    outer: DelayedNesterov = DelayedNesterov(lr=0.3, momentum=0.5, period=2)
    weights: Weights = Field("uniform", description="weight of an update: uniform, or by its rows")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="never",
                every=self.interval,
                last="always",
                by_speed=self.by_speed,
                interval=self.interval,
                adjustable_interval=not self.by_speed,
            ),
            region=RegionTraits(worker_steps=self.local_steps, eval_params=_GLOBAL),
            averager=AveragerTraits(
                plain_outer=self.outer.plain,
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Apply a push, which is a change of parameters and not a gradient."""
        if _GLOBAL not in region.memory:
            region.memory[_GLOBAL] = region.params_P.clone()
        local.anchor(region)
        if grad_P is not None:
            region.params_P.sub_(self.local.change(region, grad_P, 1, "local"))

    def after_step(self, region: RegionState) -> Outgoing | None:
        """After K pushes, if the link is free, send the change; never wait."""
        if not region.is_due(self.interval) or region.link_busy:
            return None
        return self._outgoing(region, wait=False)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Move towards the global model; the last answer is the global model itself."""
        global_P = region.memory[_GLOBAL].sub_(reply.payload_P)
        anchor_P, params_P = local.anchor(region), region.params_P
        sent_P = region.memory.pop(_SENT)
        if reply.final:
            params_P.copy_(global_P)
            anchor_P.copy_(params_P)
        elif self.in_flight == "paper":
            params_P.lerp_(global_P, self.alpha)
            anchor_P.copy_(params_P)
        else:
            pending_P = sent_P - params_P
            anchor_P.copy_(sent_P.lerp_(global_P, self.alpha))
            params_P.copy_(anchor_P).sub_(pending_P)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest; the answer, the global model, comes when all regions have."""
        return self._outgoing(region, wait=True)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Apply the update; answer its sender with the global model's change."""
        global_model.note_speed(averager, update)
        if update.num_samples > 0:
            weight = self.staleness.factor(update.lag)
            if self.weights == "samples":
                weight *= global_model.relative_rows(averager, update.region)
            delta_P = update.payload_P * weight
            global_model.publish(
                averager, self.outer.change(averager, delta_P, len(averager.members), "outer")
            )
        return self.answers(averager, update)

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Answer with the global model's change."""
        return global_model.answer(averager, update, self.interval if self.by_speed else None)

    def _outgoing(self, region: RegionState, *, wait: bool) -> Outgoing:
        region.memory.setdefault(_GLOBAL, region.params_P.clone())
        region.memory[_SENT] = region.params_P.clone()
        return local.outgoing(region, wait=wait)
