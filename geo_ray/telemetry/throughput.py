"""Tokens per second, utilisation and memory of devices, from the events of a run. Pure.

Model FLOPs utilisation (MFU; Chowdhery et al., "PaLM", arXiv 2204.02311): operations that the model
needs for the rows of a second, divided by what the devices can do. Recomputed activations do not
count. Waiting does, so an exchange that blocks training lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from geo_ray.base.text import bytes_text, number_text
from geo_ray.telemetry.events import Event

PEAK_FLOPS: Final[tuple[tuple[str, float], ...]] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Part of a GPU's name, and its dense operations per second in bfloat16 (V100, T4: float16) by the
manufacturer's data sheet. The values are reconstructed and were not compared with it; reports say
so. The first match counts: `H100 PCIe` before `H100`."""


def peak_flops(device: str) -> float | None:
    """Return the operations per second of a GPU; None if the table does not have it."""
    words = device.replace("-", " ").split()
    for name, flops in PEAK_FLOPS:
        wanted = name.split()
        if all(word in words for word in wanted):
            return flops
    return None


@dataclass(frozen=True, slots=True)
class _Device:
    name: str
    share: float
    peak_bytes: int
    total_bytes: int


@dataclass(slots=True)
class Throughput:
    """Folds the events of a run.

    Attributes:
        tokens_per_row: tokens of a row; None if the task does not state them.
        flops_per_row: operations of a row; None if unknown.
        estimated: whether `flops_per_row` is an estimate.
    """

    tokens_per_row: float | None = None
    flops_per_row: float | None = None
    estimated: bool = False
    _devices: dict[str, dict[str, _Device]] = field(default_factory=dict)  # by region and worker
    _peak_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Process the next event."""
        match event.kind:
            case "run_started":
                self.tokens_per_row = event.fields.get("tokens_per_row")
                self.flops_per_row = event.fields.get("flops_per_row")
                self.estimated = bool(event.fields.get("flops_estimated"))
                self._devices.clear()
            case "device":
                region, total = event["region"], event["total_bytes"]
                device = _Device(event["device"], event["share"] or 1.0, event["peak_bytes"], total)
                self._devices.setdefault(region, {})[str(event["worker"])] = device
                before, _ = self._peak_bytes.get(region, (0, 0))
                if device.peak_bytes >= before:
                    self._peak_bytes[region] = device.peak_bytes, total
            case "worker_lost" | "worker_left":
                self._devices.get(event["region"], {}).pop(str(event["worker"]), None)
            case "region_lost" | "region_drained":
                self._devices.pop(event["region"], None)

    def tokens_per_s(self, samples_per_s: float) -> float | None:
        """Return the tokens of so many rows per second; None if rows have no stated tokens."""
        return None if self.tokens_per_row is None else samples_per_s * self.tokens_per_row

    def mfu(self, samples_per_s: Mapping[str, float]) -> float | None:
        """Return the model FLOPs utilisation of regions together.

        Args:
            samples_per_s: rows per second by region.

        Returns:
            A fraction; None if the operations of a row or the peak of a device are unknown.
        """
        devices = [list(self._devices.get(region, {}).values()) for region in samples_per_s]
        if self.flops_per_row is None or not devices or not all(devices):
            return None
        total = 0.0
        for each in (device for group in devices for device in group):
            peak = peak_flops(each.name)
            if peak is None:
                return None
            total += each.share * peak
        return self.flops_per_row * math.fsum(samples_per_s.values()) / total

    def peaks(self) -> dict[str, float]:
        """Return the operations per second that `mfu` assumes, by name of the GPU."""
        found = {
            each.name: peak_flops(each.name)
            for workers in self._devices.values()
            for each in workers.values()
        }
        return {name: peak for name, peak in sorted(found.items()) if peak is not None}

    def memory(self, region: str) -> tuple[int, int] | None:
        """Return the largest memory of a worker in a region, and that of its GPU; None without."""
        return self._peak_bytes.get(region)


def speed_texts(
    tokens_per_s: float | None, mfu: float | None, *, estimated: bool = False
) -> list[str]:
    """Describe a speed: ``7,900 tokens/s``, ``MFU 41% (estimated)``; what is unknown is absent."""
    texts = [] if tokens_per_s is None else [f"{number_text(_rounded(tokens_per_s))} tokens/s"]
    return texts if mfu is None else [*texts, f"MFU {mfu_text(mfu, estimated=estimated)}"]


def mfu_text(mfu: float | None, *, estimated: bool = False) -> str:
    """Give a utilisation: ``41%``, ``41% (estimated)``, ``-`` if unknown."""
    return "-" if mfu is None else f"{mfu:.1%}" + (" (estimated)" if estimated else "")


def memory_text(memory: tuple[int, int] | None) -> str:
    """Give used and total memory: ``12.3 of 80 GB``; ``-`` without a GPU."""
    return "-" if memory is None else f"{bytes_text(memory[0])} of {bytes_text(memory[1])}"


def _rounded(value: float) -> float:
    return round(value) if value >= 100 else round(value, 1)
