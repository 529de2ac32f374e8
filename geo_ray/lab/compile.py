"""Makes the relay's plan of a topology: fills in defaults, draws seeds, names namespaces."""

from __future__ import annotations

from geo_ray.lab.relay.plan import LabPlan, LinkPlan, StationPlan
from geo_ray.lab.relay.shapes import CapShape, LinkShape
from geo_ray.lab.relay.traces import Trace
from geo_ray.lab.topology import (
    CapConfig,
    DefaultLink,
    LabRegionConfig,
    LinkConfig,
    PointsTrace,
    Topology,
    TraceConfig,
)
from geo_ray.transport.emulation.link_model import link_seed


def compile_plan(topology: Topology, lab_id: str) -> LabPlan:
    """Return the plan of a lab.

    Args:
        topology: the configuration of the lab.
        lab_id: part of the namespaces' names, so that labs do not collide.
    """
    names = topology.region_names
    stations = tuple(_station(topology, region, lab_id) for region in topology.regions)
    links = []
    for src, src_name in enumerate(names):
        for dst, dst_name in enumerate(names):
            if src != dst:
                config = topology.link_between(src_name, dst_name)
                own_seed = link_seed(topology.seed, src_name, dst_name)
                links.append(
                    LinkPlan(src, dst, shape_of(config), own_seed, _trace(config.trace, own_seed))
                )
    return LabPlan(lab_id, topology.mtu, stations, tuple(links))


def _station(topology: Topology, region: LabRegionConfig, lab_id: str) -> StationPlan:
    up, down = region.up or topology.up, region.down or topology.down
    return StationPlan(
        name=region.name,
        namespace=f"geolab-{lab_id}-{region.name}",
        up=_cap(up),
        down=_cap(down),
        congestion_control=topology.congestion_control_of(region.name),
        up_trace=_trace(up.trace, link_seed(topology.seed, region.name, "up")),
        down_trace=_trace(down.trace, link_seed(topology.seed, region.name, "down")),
    )


def shape_of(config: LinkConfig | DefaultLink) -> LinkShape:
    """Return the relay's values of a link, without its trace."""
    return LinkShape(**{key: getattr(config, key) for key in LinkConfig.model_fields})


def _cap(config: CapConfig) -> CapShape:
    return CapShape(config.rate_mbps, config.queue_bytes)


def _trace(config: TraceConfig | None, seed: int) -> Trace | None:
    if config is None:
        return None
    if isinstance(config, PointsTrace):
        return Trace(points=config.points, repeat_s=config.repeat_s)
    return Trace(
        low_mbps=config.low_mbps, high_mbps=config.high_mbps, every_s=config.every_s, seed=seed
    )
