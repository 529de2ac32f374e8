"""A shard behind its port does what a shard does: the messages between them carry all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.runtime.remote_shard import RemoteShard, ShardServer
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.strategies.sma import Sma
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.optimizers import Sgd
from geo_ray.training.shard import Contribution, RegionModel, Shard
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta

LEAD = SimpleNamespace(hello={"role": "primary"}, shared=None)
BOTH = [Contribution(0, 24), Contribution(1, 8)]


class Wire:
    """A connection whose headers go through bytes, and whose far end is a shard server."""

    def __init__(self, server: ShardServer) -> None:
        self._server = server

    def request(self, meta: Meta, payload: Any = None, **_: Any) -> tuple[Meta, Any]:
        answer, back = self._server.handle(LEAD, decode_meta(encode_meta(meta)), payload)
        return decode_meta(encode_meta(answer)), back


def shard(size: int) -> Shard:
    made = Shard(torch.zeros(size), Sgd(lr=1.0), Sma(interval=100))
    for worker, value in enumerate((1.0, 5.0)):
        made.put(worker, torch.full((size,), value))
    return made


def remote(held: Shard) -> RemoteShard:
    return RemoteShard(
        Wire(ShardServer(HeldShard(held, "eu", 1, CheckpointPlaces("")))), timeout_s=1.0
    )


def test_the_norm_of_a_mean_is_the_sum_of_its_slices() -> None:
    model = RegionModel([shard(2), remote(shard(1))], 3)
    assert model.apply(BOTH, measure=True) == pytest.approx(3 * 2.0**2)


def test_nothing_is_measured_unless_asked_for() -> None:
    far = remote(held := shard(2))
    assert far.ask(Shard.apply, BOTH, False) is None
    assert torch.equal(far.ask(Shard.live_params), held.params_S)
    assert torch.equal(held.params_S, torch.full((2,), -2.0))


def test_a_request_to_apply_must_state_whether_to_measure() -> None:
    server = ShardServer(HeldShard(shard(2), "eu", 1, CheckpointPlaces("")))
    with pytest.raises(FrameError, match="measure"):
        server.handle(LEAD, {"op": "apply", "workers": [0], "samples": [8]}, None)
