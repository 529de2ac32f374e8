"""Updates of a round that are summed on their way over an overlay."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from geo_ray.errors import FrameError, GeoRayError, InvariantError
from geo_ray.overlay.vector import Floats
from geo_ray.runtime.messages.exchange import (
    as_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.runtime.paths.base import Routes, UpdateStage, joined
from geo_ray.runtime.paths.local_averager import AveragerOutput, LocalAverager
from geo_ray.runtime.paths.overlay_vectors import OverlaySetting, OverlayVectors
from geo_ray.strategies.base import Reply, Strategy, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import Begun, ChangeMembers, ChangePace
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)


class OverlayPath:
    """Carries the updates of one region, and at the averager's home those of all to the averager.

    The averager is handed every region's update with the same vector, the round's weighted mean,
    and gives the same answer as to the updates themselves, up to rounding.

    Args:
        setting: who takes part in what.
        strategy: the run's; says how updates are weighted.
        averager: the averager, if this is its home.
        output: takes what the averager leaves beside its answers.
        endpoint: this region's.
        timeout_s: longest wait for a round.
    """

    def __init__(
        self,
        setting: OverlaySetting,
        strategy: Strategy,
        averager: Averager | None,
        output: AveragerOutput,
        endpoint: Endpoint,
        timeout_s: float,
    ) -> None:
        self._region = setting.region
        mean = strategy.traits.averager.round_mean
        if mean is None:
            raise InvariantError(f"an overlay cannot sum the rounds of {strategy}")
        self._mean = mean
        self._local: LocalAverager | None = None
        if averager is not None:
            self._local = LocalAverager(averager, output, self._unasked)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.home = AveragerHome(setting.home)
        self.stage = UpdateStage()
        commit = None if self._local is None else self._commit
        self._failure = output.failure
        self.vectors = OverlayVectors(setting, commit, endpoint, on_failure=self._failed)
        self._failure.listen(self.vectors.fail)
        if self.vectors.fused and not mean.is_answer:
            self.vectors.close()
            raise InvariantError(f"an overlay without a root cannot carry {strategy}")

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: Update) -> Reply:
        """See `UpdatePath`; takes part in a round."""
        own_P = update.payload_P.detach().contiguous().cpu().numpy()
        weight = self._mean.weight_of(update.num_samples)
        done = self.vectors.exchange(own_P, weight, update_meta(update), self._timeout_s)
        reply = read_reply(done.about, as_bytes(torch.from_numpy(done.result_P)))
        if reply.to != self._region or reply.seq != update.seq:
            raise FrameError(
                f"region '{self._region}' awaits the answer to update {update.seq} and got that of "
                f"'{reply.to}' to {reply.seq}"
            )
        return reply

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """See `UpdatePath`."""
        self._here().request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """See `UpdatePath`."""
        return self._here().request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """Nobody takes over."""

    def tell_members(self, op: ChangeMembers | Begun | ChangePace) -> None:
        """Members do not change here."""
        raise InvariantError(f"nobody can join or leave here: {op}")

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`."""
        version = None if self._local is None else self._local.version
        return {"version": version, "overlay": self.vectors.status()}

    def close(self) -> None:
        """See `UpdatePath`."""
        if self._local is not None:
            self._local.close()
        self.vectors.close()

    # ------------------------------------------------------------------ other regions

    def routes(self) -> Routes:
        """See `UpdatePath`."""
        return joined(self.vectors.routes(), {"refused": self._on_refused})

    def _on_refused(self, peer: str, message: Message) -> None:
        if peer == self.home.region:
            _, error = read_refusal(message.meta)
            self.vectors.fail(error)

    # ------------------------------------------------------------------ at the averager's home

    def _here(self) -> LocalAverager:
        if self._local is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        return self._local

    def _commit(
        self, about: Mapping[str, Meta], mean_P: Floats
    ) -> tuple[Mapping[str, Meta], Floats] | None:
        payload_P = torch.from_numpy(mean_P)
        updates = []
        for region, meta in sorted(about.items()):
            update = replace(read_update(meta, b""), payload_P=payload_P)
            if update.region != region:
                raise FrameError(f"'{region}' contributes in the name of '{update.region}'")
            updates.append(update)
        try:
            replies = self._here().take_in_round(updates)
        except GeoRayError as error:
            log.error("a round of %s refused: %s", sorted(about), error)
            for update in updates:
                self._refuse(update, error)
            return None
        metas = {reply.to: reply_meta(reply) for reply in replies}
        if set(metas) != set(about) or len(replies) != len(metas):
            raise InvariantError(f"a round of {sorted(about)} was answered to {sorted(metas)}")
        result_P = replies[0].payload_P
        if any(reply.payload_P is not result_P for reply in replies):
            raise InvariantError("the answers to a round differ; an overlay carries one for all")
        return metas, mean_P if self.vectors.fused else result_P.contiguous().numpy()

    def _failed(self, error: Exception) -> None:
        self._failure.note(error, "the overlay")

    def _unasked(self, replies: Sequence[Reply]) -> None:
        raise InvariantError("an overlay has no answers but those of whole rounds")

    def _refuse(self, update: Update, error: GeoRayError) -> None:
        if update.region == self._region:
            self.vectors.fail(error)
            return
        meta = refusal_meta(update.seq, error)
        self._endpoint.send(update.region, Message("refused", meta, b"", "control"))
