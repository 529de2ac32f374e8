"""Where a worker's gradient and parameters lie in the memory that it shares with a shard.

Both start on a cache line: vector code then gives the same bits wherever the buffer came from.
"""

from __future__ import annotations

from torch import Tensor

from geo_ray.runtime.messages.exchange import as_tensor

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


def _offset_bytes(count: int) -> int:
    return -(-4 * count // _LINE_BYTES) * _LINE_BYTES
