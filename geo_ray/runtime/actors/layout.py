"""Where a worker's gradient and parameters lie: in shared memory, or beside its messages to shards.

In shared memory both start on a cache line: vector code then gives the same bits wherever the
buffer came from.
"""

from __future__ import annotations

from torch import Tensor

from geo_ray.runtime.messages.exchange import as_bytes, as_tensor
from geo_ray.transport.lan.server import LanConnection

_LINE_BYTES = 64


def shared_bytes(count: int) -> int:
    """Size of the buffer for a slice of ``count`` parameters."""
    return _offset_bytes(count) + 4 * count


def shared_gradient(shared: memoryview, count: int) -> Tensor:
    """The worker's gradient, fp32 (count,); written by the worker, read by the shard."""
    return as_tensor(shared[: 4 * count], count)


def shared_parameters(shared: memoryview, count: int) -> Tensor:
    """The worker's parameters, fp32 (count,); written by the shard, read by the worker."""
    start = _offset_bytes(count)
    return as_tensor(shared[start : start + 4 * count], count)


def pushed_gradient(conn: LanConnection, payload: memoryview | None, count: int) -> Tensor:
    """The gradient that a worker pushed, fp32 (count,); `FrameError` if it has another size."""
    return as_tensor(payload, count) if conn.shared is None else shared_gradient(conn.shared, count)


def parameters_for(
    conn: LanConnection, params_S: Tensor, room: memoryview | None = None
) -> memoryview | None:
    """A copy of a slice's parameters, fp32 (S,), for the answer; None if it is in shared memory.

    ``room`` is a buffer of that size that is not in use any more; None allocates one.
    """
    if conn.shared is not None:
        shared_parameters(conn.shared, params_S.numel()).copy_(params_S)
        return None
    if room is None:
        return as_bytes(params_S.clone())
    as_tensor(room, params_S.numel()).copy_(params_S)
    return room


def slice_for(conn: LanConnection, params_S: Tensor) -> memoryview | None:
    """The same for a worker whose gradient was used: the buffer that it came in takes them."""
    room = None if conn.shared is not None else conn.room(4 * params_S.numel())
    return parameters_for(conn, params_S, room)


def _offset_bytes(count: int) -> int:
    return -(-4 * count // _LINE_BYTES) * _LINE_BYTES
