"""Facts about emulated links that the real shaper and the simulator must share."""

from __future__ import annotations

import hashlib

from geo_ray.config.experiment import Experiment


def link_seed(seed: int, src: str, dst: str) -> int:
    """The seed of one direction's random events."""
    key = f"{seed}/{src}>{dst}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


def round_trip_s(experiment: Experiment, src: str, dst: str) -> float:
    """Emulated propagation delay there and back, in seconds."""
    there, back = experiment.link(src, dst), experiment.link(dst, src)
    return (there.delay_s if there else 0.0) + (back.delay_s if back else 0.0)
