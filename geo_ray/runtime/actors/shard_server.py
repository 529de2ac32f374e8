"""A shard of a parameter server that is not the primary one: does what that one asks."""

from __future__ import annotations

import threading
from typing import Any

from geo_ray.errors import InvariantError
from geo_ray.runtime.actors.layout import parameters_for, pushed_gradient
from geo_ray.runtime.actors.parts import HeldShard
from geo_ray.runtime.actors.remote_shard import OPERATIONS, Operation, Packed
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.meta import Meta

_BY_NAME = {operation.name: operation for operation in OPERATIONS}
(_WRITE,) = (operation for operation in OPERATIONS if operation.run is HeldShard.write_part)


class ShardServer:
    """Serves workers (push and pull of a slice) and the primary shard (`OPERATIONS`).

    Args:
        held: the slice.
    """

    def __init__(self, held: HeldShard) -> None:
        self._held = held
        self._lock = threading.Lock()

    def handle(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> Packed:
        """One request; only the one that writes a checkpoint's part takes long."""
        if fields.text(meta, "op") == _WRITE.name and conn.hello.get("role") == "lead":
            return self._carry_out(_WRITE, self._held, meta, payload)  # beside all others
        with self._lock:
            shard, region, name = self._held.shard, self._held.region, fields.text(meta, "op")
            if name == "put":
                grad_S = pushed_gradient(conn, payload, shard.params_S.numel())
                shard.put(fields.count(conn.hello, "worker"), grad_S)
                return {}, None
            if name == "pull":
                return {}, parameters_for(conn, shard.params_S)
            if name == "judged":
                return {}, parameters_for(conn, shard.eval_params_S)
            if conn.hello.get("role") != "lead":
                raise InvariantError(f"'{name}' is for the primary shard of '{region}'")
            operation = _BY_NAME.get(name)
            if operation is None:
                raise InvariantError(f"unknown operation '{name}' for a shard of '{region}'")
            return self._carry_out(operation, shard, meta, payload)

    @staticmethod
    def _carry_out(
        operation: Operation, owner: Any, meta: Meta, payload: memoryview | None
    ) -> Packed:
        (_, read), (write, _) = operation.request, operation.result
        return write(operation.run(owner, *read(meta, payload)))
