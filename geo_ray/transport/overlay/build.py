"""Builds the parts of an overlay from its configuration, for runs and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from geo_ray.transport.overlay.config import (
    AnyOverlay,
    BinaryOverlay,
    NetstormOverlay,
    RackOverlay,
    RingOverlay,
    StarOverlay,
    TransferOptions,
    TsengineOverlay,
)
from geo_ray.transport.overlay.coordinator import Coordinator
from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.netstorm import Netstorm
from geo_ray.transport.overlay.node import Node
from geo_ray.transport.overlay.plan import Grid, Tree
from geo_ray.transport.overlay.policy import (
    PlannedPolicy,
    Policy,
    binary,
    rack,
    ring,
    square_groups,
    star,
)
from geo_ray.transport.overlay.tsengine import Tsengine

_MOST_PARTS: Final = 32  # under way to one region: half of what an endpoint takes by default
_PROBE_BYTES: Final = 256 * 1024


def transfer_of(config: AnyOverlay) -> TransferOptions:
    """Return the transfer options; a star uses the defaults."""
    return TransferOptions() if isinstance(config, StarOverlay) else config.transfer


def grid_of(config: AnyOverlay, num: int) -> Grid:
    """Return the segments of a vector of ``num`` fp32 elements."""
    return Grid(num, max(1, min(num, transfer_of(config).segment_bytes // 4)))


def links_of(config: AnyOverlay, num_regions: int) -> Links:
    """Return an empty table of links with the configured ageing."""
    if isinstance(config, TsengineOverlay | NetstormOverlay):
        return Links(num_regions, config.forget_rounds, config.smoothing)
    return Links(num_regions)


def build_policy(
    config: AnyOverlay, regions: Sequence[str], leader: int, grid: Grid, links: Links, seed: int
) -> Policy:
    """Return the policy of a run.

    Args:
        config: kind and options; fits the regions, see `overlay_problems`.
        regions: names, sorted.
        leader: number of the region that hosts the averager.
        grid: of the vector.
        links: measurements of links; shared with the coordinator.
        seed: of random decisions.
    """
    num, segments = len(regions), grid.count
    if isinstance(config, TsengineOverlay):
        return Tsengine(links, leader, grid, config, seed)
    if isinstance(config, NetstormOverlay):
        storm = Netstorm(links, segments, config.roots or num, config.hysteresis)
        return PlannedPolicy(storm.trees, links, fused=True, probes=config.probes)
    trees = partial(_static, config, tuple(regions), leader, segments)
    return PlannedPolicy(trees, links, fused=isinstance(config, RingOverlay))


def build_node(
    config: AnyOverlay, me: int, num_regions: int, leader: int, grid: Grid, *, fused: bool
) -> Node:
    """Return region ``me``'s node; ``fused`` is the policy's."""
    transfer = transfer_of(config)
    window = max(2, min(_MOST_PARTS, transfer.window_bytes // (4 * grid.segment)))
    return Node(me, num_regions, leader, grid, fused, window, transfer.stall_s)


def build_coordinator(
    leader: int, policy: Policy, links: Links, grid: Grid, seed: int
) -> Coordinator:
    """Return the coordinator, next to the averager in region ``leader``."""
    probe_segments = min(grid.count, max(2, -(-_PROBE_BYTES // (4 * grid.segment))))
    return Coordinator(leader, policy, links, probe_segments, seed)


def tick_s(config: AnyOverlay) -> float:
    """Return the interval of checks for progress of transfers."""
    return min(1.0, transfer_of(config).stall_s / 4)


def _static(
    config: AnyOverlay, regions: tuple[str, ...], leader: int, num_segments: int, _rnd: int
) -> list[Tree]:
    num = len(regions)
    if isinstance(config, BinaryOverlay):
        return binary(num, leader, num_segments)
    if isinstance(config, RingOverlay):
        return ring(num, num_segments)
    if isinstance(config, RackOverlay):
        groups = (
            square_groups(num, leader)
            if config.groups is None
            else [[regions.index(name) for name in group] for group in config.groups]
        )
        return rack(num, leader, num_segments, groups)
    return star(num, leader, num_segments)
