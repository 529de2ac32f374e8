"""Report of the GPU of a worker and of its memory."""

from __future__ import annotations

import time
from typing import Final

import torch

from geo_ray.runtime.remote_shard import ShardLink
from geo_ray.transport.wire.fields import Meta

_EVERY_S: Final = 10.0


class DeviceReport:
    """Memory of a worker's GPU; a worker on the CPU has nothing to report.

    Args:
        device: device of the worker.
        share: fraction of the GPU that the worker has.
    """

    def __init__(self, device: str, share: float = 1.0) -> None:
        self._device = torch.device(device) if device.startswith("cuda") else None
        self._share = share
        self._peak_bytes = 0
        self._next_s = 0.0

    def report(self, primary: ShardLink) -> None:
        """Report the GPU after the first step, and later if more of its memory was used."""
        about = self.due(time.monotonic())
        if about is not None:
            primary.client.request(about, None, timeout_s=60.0)

    def due(self, now_s: float) -> Meta | None:
        """Return a message for the parameter server; None if there is nothing new."""
        if self._device is None or now_s < self._next_s:
            return None
        self._next_s = now_s + _EVERY_S
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if peak_bytes <= self._peak_bytes:
            return None
        self._peak_bytes = peak_bytes
        about = torch.cuda.get_device_properties(self._device)
        return {
            "op": "device",
            "device": about.name,
            "share": self._share,
            "peak_bytes": peak_bytes,
            "total_bytes": about.total_memory,
        }


ON_CPU: Final = DeviceReport("cpu")
"""Reports nothing."""
