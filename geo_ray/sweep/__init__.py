"""Search for hyperparameters with Ray Tune: `geo-ray tune`, or `trainable` in code of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geo_ray.sweep.ray_tune import trainable as trainable

__all__ = ["trainable"]


def __getattr__(name: str) -> Any:
    """`trainable`, imported when it is asked for: it takes Ray and PyTorch with it."""
    if name != "trainable":
        raise AttributeError(f"module 'geo_ray.sweep' has no attribute {name!r}")
    from geo_ray.sweep.ray_tune import trainable as found

    return found
