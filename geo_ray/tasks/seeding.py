"""Initialisation that depends on a seed alone and leaves the process's generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from geo_ray.util.generators import generators_restored, plant


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with torch's CPU generator seeded; restore its state afterwards.

    Only the CPU generator is touched: `torch.manual_seed` would reseed the accelerators too, and
    models are initialised on the CPU.
    """
    with generators_restored():
        plant(seed)
        yield
