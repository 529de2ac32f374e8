"""A shard of a parameter server that is not the primary one: does what that one asks."""

from __future__ import annotations

import threading

from geo_ray.errors import InvariantError, LinkDownError
from geo_ray.runtime.actors.layout import pushed_gradient, slice_for
from geo_ray.runtime.actors.parts import HeldShard
from geo_ray.runtime.actors.remote_shard import OPERATIONS, Packed, read_change
from geo_ray.runtime.messages.exchange import read_pull
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.meta import Meta

_BY_NAME = {operation.name: operation for operation in OPERATIONS}
(_WRITE,) = (operation for operation in OPERATIONS if operation.run is HeldShard.write_part)


class ShardServer:
    """Serves workers (push and fetch of a slice) and the primary shard (`OPERATIONS`).

    Args:
        held: the slice.
    """

    def __init__(self, held: HeldShard) -> None:
        self._held = held
        self._lock = threading.Lock()
        self._epochs: dict[int, int] = {}  # of workers

    def handle(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> Packed:
        """One request; only the one that writes a checkpoint's part takes long."""
        if fields.text(meta, "op") == _WRITE.name and conn.hello.get("role") == "lead":
            (_, read), (write, _) = _WRITE.request, _WRITE.result
            return write(_WRITE.run(self._held, *read(meta, payload)))  # beside all others
        with self._lock:
            shard, region, name = self._held.shard, self._held.region, fields.text(meta, "op")
            if name == "put":
                worker = self._admit(conn)
                grad_S = pushed_gradient(conn, payload, shard.params_S.numel())
                shard.put(fields.count(meta, "share") if "share" in meta else worker, grad_S)
                return {}, None
            if name == "fetch":
                pull = read_pull(self._admit(conn), meta)
                return {}, slice_for(conn, shard.fetch(pull))
            if conn.hello.get("role") != "lead":
                raise InvariantError(f"'{name}' is for the primary shard of '{region}'")
            operation = _BY_NAME.get(name)
            if operation is None:
                raise InvariantError(f"unknown operation '{name}' for a shard of '{region}'")
            (_, read), (write, _) = operation.request, operation.result
            arguments, change = read(meta, payload), read_change(meta)
            return write(shard.ask(operation.run, *arguments, change=change))

    def _admit(self, conn: LanConnection) -> int:
        """The rank of a worker, of which a newer incarnation must not have been here."""
        worker, epoch = fields.count(conn.hello, "worker"), fields.count(conn.hello, "epoch")
        newest = self._epochs[worker] = max(epoch, self._epochs.get(worker, 0))
        if epoch < newest:
            raise LinkDownError(
                f"worker {worker} of region '{self._held.region}' in epoch {epoch} was replaced: "
                f"epoch {newest} is the present one"
            )
        return worker
