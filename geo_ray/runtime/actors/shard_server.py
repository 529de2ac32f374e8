"""A shard of a parameter server that is not the lead: holds its slice, does what the lead says."""

from __future__ import annotations

import threading

from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.runtime.actors.layout import shared_gradient, shared_parameters
from geo_ray.runtime.actors.parts import write_shard_part
from geo_ray.runtime.messages.exchange import as_bytes, as_tensor, read_contributions, read_reply
from geo_ray.strategies.base import Outgoing, Wait
from geo_ray.training.server.shard import Shard
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.meta import Meta

Result = tuple[Meta, memoryview | None]


class ShardServer:
    """Serves workers (push and pull of a slice) and the lead (operations).

    Args:
        shard: the slice.
        region: its region.
        index: its number, 1 or more.
        parts_dir: where parts of checkpoints go.
    """

    def __init__(self, shard: Shard, region: str, index: int, parts_dir: str) -> None:
        self._shard = shard
        self._region = region
        self._index = index
        self._parts_dir = parts_dir
        self._lock = threading.Lock()

    def handle(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> Result:
        """One request; none of them blocks for long."""
        with self._lock:
            operation = fields.text(meta, "op")
            if operation == "put":
                return self._put(conn, payload)
            if operation == "pull":
                return give(conn, self._shard.params_S)
            if operation == "judged":
                return give(conn, self._shard.eval_params_S)
            if conn.hello.get("role") != "lead":
                raise InvariantError(f"'{operation}' is for the lead of '{self._region}' to say")
            return self._operate(operation, meta, payload)

    def _put(self, conn: LanConnection, payload: memoryview | None) -> Result:
        count = self._shard.params_S.numel()
        shared = conn.shared
        grad_S = as_tensor(payload, count) if shared is None else shared_gradient(shared, count)
        self._shard.put(fields.count(conn.hello, "worker"), grad_S)
        return {}, None

    def _operate(self, operation: str, meta: Meta, payload: memoryview | None) -> Result:
        if operation == "apply":
            measure = fields.flag(meta, "measure")
            mean_sq = self._shard.apply(read_contributions(meta), measure=measure)
            return {"mean_sq": mean_sq}, None
        if operation == "speak":
            return _said(self._shard.outgoing())
        if operation == "finish":
            return _said(self._shard.finish())
        if operation == "merge":
            self._shard.merge(read_reply(meta, payload))
            return {}, None
        if operation == "dropped":
            self._shard.dropped()
            return {}, None
        if operation == "snapshot":
            self._shard.snapshot(fields.count(meta, "id"))
            return {}, None
        if operation == "write_part":
            checkpoint = fields.count(meta, "id")
            state = self._shard.take_snapshot(checkpoint)
            part = write_shard_part(self._parts_dir, checkpoint, self._region, self._index, state)
            return dict(part.model_dump()), None
        if operation == "params":
            return {}, as_bytes(self._shard.params_S.clone())
        raise InvariantError(f"unknown operation '{operation}' for a shard of '{self._region}'")


def give(conn: LanConnection, params_S: Tensor) -> Result:
    """Parameters of a slice, fp32 (S,), to a worker: into shared memory, or as the answer."""
    if conn.shared is None:
        return {}, as_bytes(params_S.clone())
    shared_parameters(conn.shared, params_S.numel()).copy_(params_S)
    return {}, None


def _said(out: Outgoing | Wait | None) -> Result:
    if isinstance(out, Outgoing):
        meta: Meta = {"said": "outgoing", "wait": out.wait, "fragment": out.fragment}
        return meta, as_bytes(out.payload_P)
    return {"said": "wait" if isinstance(out, Wait) else "nothing"}, None
