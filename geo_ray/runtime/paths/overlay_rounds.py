"""Rounds of updates over an overlay, between a bridge and the road that carries vectors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from geo_ray.errors import FrameError, GeoRayError, InvariantError
from geo_ray.overlay.vector import Floats
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    read_reply,
    read_update,
    reply_meta,
    update_meta,
)
from geo_ray.runtime.paths.overlay import OverlayPath, OverlaySetting
from geo_ray.strategies.base import Reply, Strategy, Update
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AveragerPort:
    """What the averager's bridge offers.

    Attributes:
        take_in: all updates of a round; gives the averager's answers.
        refuse: tells an update's region that it was refused.
    """

    take_in: Callable[[Sequence[Update]], list[Reply]]
    refuse: Callable[[Update, GeoRayError], None]


class OverlayRounds:
    """Carries the updates of one region, and in the hub those of all to the averager.

    The averager is handed every region's update with the same vector, the round's weighted mean,
    and gives the same answer as to the updates themselves, up to rounding.

    Args:
        setting: who takes part in what.
        strategy: the run's; says how updates are weighted.
        port: the averager's bridge; None in other regions.
        timeout_s: longest wait for a round.
    """

    def __init__(
        self,
        setting: OverlaySetting,
        strategy: Strategy,
        port: AveragerPort | None,
        timeout_s: float,
    ) -> None:
        self._region = setting.region
        mean = strategy.traits.averager.round_mean
        if mean is None:
            raise InvariantError(f"an overlay cannot sum the rounds of {strategy}")
        self._mean = mean
        self._port = port
        self._timeout_s = timeout_s
        self._road = OverlayPath(setting, None if port is None else self._commit)
        if self._road.fused and not mean.is_answer:
            raise InvariantError(f"an overlay without a root cannot carry {strategy}")

    def use(self, endpoint: Endpoint) -> None:
        """Begin, over ``endpoint``."""
        self._road.use(endpoint)

    def routes(self) -> dict[str, Callable[[str, Message], None]]:
        """Handlers by kind of message."""
        return self._road.routes()

    def exchange(self, update: Update) -> Reply:
        """Take part in a round; blocks until its answer is here.

        Raises:
            GeoRayError: the round was refused, not over in time, or the bridge closes.
        """
        own_P = update.payload_P.detach().contiguous().cpu().numpy()
        weight = self._mean.weight_of(update.num_samples)
        done = self._road.exchange(own_P, weight, update_meta(update), self._timeout_s)
        reply = read_reply(done.about, as_bytes(torch.from_numpy(done.result_P)))
        if reply.to != self._region or reply.seq != update.seq:
            raise FrameError(
                f"region '{self._region}' awaits the answer to update {update.seq} and got that of "
                f"'{reply.to}' to {reply.seq}"
            )
        return reply

    def fail(self, error: GeoRayError) -> None:
        """Let the open round end with an error."""
        self._road.fail(error)

    def status(self) -> dict[str, int]:
        """Counters."""
        return self._road.status()

    def close(self) -> None:
        """End; whoever waits is told."""
        self._road.close()

    def _commit(
        self, about: Mapping[str, Meta], mean_P: Floats
    ) -> tuple[Mapping[str, Meta], Floats] | None:
        if self._port is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        payload_P = torch.from_numpy(mean_P)
        updates = []
        for region, meta in sorted(about.items()):
            update = replace(read_update(meta, b""), payload_P=payload_P)
            if update.region != region:
                raise FrameError(f"'{region}' contributes in the name of '{update.region}'")
            updates.append(update)
        try:
            replies = self._port.take_in(updates)
        except GeoRayError as error:
            log.error("a round of %s refused: %s", sorted(about), error)
            for update in updates:
                self._port.refuse(update, error)
            return None
        told = {reply.to: reply_meta(reply) for reply in replies}
        if set(told) != set(about) or len(replies) != len(told):
            raise InvariantError(f"a round of {sorted(about)} was answered to {sorted(told)}")
        result_P = replies[0].payload_P
        if any(reply.payload_P is not result_P for reply in replies):
            raise InvariantError("the answers to a round differ; an overlay carries one for all")
        return told, mean_P if self._road.fused else result_P.contiguous().numpy()
