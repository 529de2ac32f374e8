"""Overlays of every kind on a modelled network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.network_models.overlay_model import Lines, OverlayModel
from geo_ray.transport.overlay.build import build_policy, links_of
from geo_ray.transport.overlay.config import (
    AnyOverlay,
    BinaryOverlay,
    NetstormOverlay,
    RackOverlay,
    RingOverlay,
    StarOverlay,
    TsengineOverlay,
)
from geo_ray.transport.overlay.coordinator import Coordinator
from geo_ray.transport.overlay.plan import Grid

KINDS: dict[str, AnyOverlay] = {
    "star": StarOverlay(),
    "binary": BinaryOverlay(),
    "rack": RackOverlay(),
    "ring": RingOverlay(),
    "tsengine": TsengineOverlay(),
    "netstorm": NetstormOverlay(),
}
MBPS = 10.0
VECTOR_MBIT = 10.0  # one vector over one line takes a second


def model_of(
    config: AnyOverlay,
    num_regions: int,
    num_segments: int = 12,
    *,
    hub: int = 0,
    lines: Lines | None = None,
    seed: int = 0,
    **node_options: Any,
) -> OverlayModel:
    """Regions of which each line carries one whole vector per second."""
    grid = Grid(3 * num_segments - (num_segments > 1), 3)  # the last segment is shorter
    links = links_of(config, num_regions)
    names = [f"r{i}" for i in range(num_regions)]
    policy = build_policy(config, names, hub, grid, links, seed)
    coordinator = Coordinator(hub, policy, links, probe_segments=min(2, grid.count), seed=seed)
    segment_bytes = round(VECTOR_MBIT * 1e6 / 8 / num_segments)
    lines = lines or Lines.capped(num_regions, MBPS)
    return OverlayModel(lines, coordinator, grid, segment_bytes, **node_options)


def vectors_of(model: OverlayModel, seed: int = 0) -> list[NDArray[np.float32]]:
    """What each region contributes."""
    num = model.nodes[0].grid.num
    random = np.random.default_rng(seed)
    return [random.normal(size=num).astype(np.float32) for _ in model.nodes]


def check_round(
    results: dict[int, NDArray[np.float32]],
    vectors: Sequence[NDArray[np.float32]],
    regions: int | None = None,
) -> None:
    """All have the same bits, and they are the mean of all contributions, each counted once."""
    assert len(results) == (len(vectors) if regions is None else regions)
    assert len({result.tobytes() for result in results.values()}) == 1
    mean = np.mean(np.asarray(vectors, dtype=np.float64), axis=0)
    for result in results.values():
        np.testing.assert_allclose(result, mean, rtol=1e-6, atol=1e-6)
