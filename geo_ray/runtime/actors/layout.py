"""Where a worker's gradient and parameters lie: in shared memory, or beside its messages to shards.

In shared memory both start on a cache line: vector code then gives the same bits wherever the
buffer came from.
"""

from __future__ import annotations

import torch
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
    conn: LanConnection,
    params_S: Tensor,
    room: memoryview | None = None,
    carried_B: Tensor | None = None,
) -> memoryview | None:
    """A copy of a slice's parameters, fp32 (S,), for the answer; None if it is in shared memory.

    ``room`` is a buffer of that size that is not in use any more; None allocates one. What the
    model carries, uint8 (B,), goes before them.
    """
    before = 0 if carried_B is None else carried_B.numel() // 4
    count = before + params_S.numel()
    if conn.shared is not None:
        into, answer = shared_parameters(conn.shared, count), None
    elif room is None:
        into = torch.empty(count)
        answer = as_bytes(into)
    else:
        into, answer = as_tensor(room, count), room
    if carried_B is not None:
        into[:before].view(torch.uint8).copy_(carried_B)
    into[before:].copy_(params_S)
    return answer


def slice_for(
    conn: LanConnection, params_S: Tensor, carried_B: Tensor | None = None
) -> memoryview | None:
    """The same for a worker whose gradient was used: the buffer that it came in takes them."""
    before_bytes = 0 if carried_B is None else carried_B.numel()
    shared = conn.shared is not None
    room = None if shared else conn.room(before_bytes + 4 * params_S.numel())
    return parameters_for(conn, params_S, room, carried_B)


def _offset_bytes(count: int) -> int:
    return -(-4 * count // _LINE_BYTES) * _LINE_BYTES
