"""The primary shard's view of another shard: a `ShardPort` that asks over the LAN."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from geo_ray.runtime.actors.shard_operations import OPERATIONS
from geo_ray.transport.lan.client import LanClient

As = TypeVarTuple("As")
H = TypeVar("H")
R = TypeVar("R")

_BY_METHOD = {operation.run: operation for operation in OPERATIONS}


class RemoteShard:
    """See `geo_ray.training.server.region_model.ShardPort`.

    Args:
        client: connection to the shard's server.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, client: LanClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def ask(self, operation: Callable[[H, *As], R], *arguments: *As) -> R:
        """Let the shard's server carry out one of `OPERATIONS`, which its method names."""
        row = _BY_METHOD[operation]
        meta, payload = row.request.write(row.name, *arguments)
        answer: R = row.result.read(*self._client.request(meta, payload, timeout_s=self._timeout_s))
        return answer
