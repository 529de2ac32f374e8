"""A shard of a parameter server that is not the primary one: does what that one asks."""

from __future__ import annotations

import threading

from geo_ray.errors import InvariantError
from geo_ray.runtime.actors.layout import parameters_for, pushed_gradient
from geo_ray.runtime.actors.parts import ShardParts
from geo_ray.runtime.actors.shard_operations import OPERATIONS, Packed
from geo_ray.runtime.messages import fields
from geo_ray.training.server.shard import Shard
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.wire.meta import Meta

_BY_NAME = {operation.name: operation for operation in OPERATIONS}


class ShardServer:
    """Serves workers (push and pull of a slice) and the primary shard (`OPERATIONS`).

    Args:
        shard: the slice.
        region: its region.
        index: its number, 1 or more.
        parts_dir: where parts of checkpoints go.
    """

    def __init__(self, shard: Shard, region: str, index: int, parts_dir: str) -> None:
        self._shard = shard
        self._region = region
        self._parts = ShardParts(shard, region, index, parts_dir)
        self._lock = threading.Lock()

    def handle(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> Packed:
        """One request; none of them blocks for long."""
        with self._lock:
            shard, name = self._shard, fields.text(meta, "op")
            if name == "put":
                grad_S = pushed_gradient(conn, payload, shard.params_S.numel())
                shard.put(fields.count(conn.hello, "worker"), grad_S)
                return {}, None
            if name == "pull":
                return {}, parameters_for(conn, shard.params_S)
            if name == "judged":
                return {}, parameters_for(conn, shard.eval_params_S)
            if conn.hello.get("role") != "lead":
                raise InvariantError(f"'{name}' is for the primary shard of '{self._region}'")
            operation = _BY_NAME.get(name)
            if operation is None:
                raise InvariantError(f"unknown operation '{name}' for a shard of '{self._region}'")
            holder = self._parts if operation.run is ShardParts.write else shard
            arguments = operation.request.read(meta, payload)
            return operation.result.write(operation.run(holder, *arguments))
