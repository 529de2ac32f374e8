"""What a run asks of a cluster: processes and their resources, by region."""

from __future__ import annotations

from dataclasses import replace

from geo_ray.config.experiment import Experiment
from geo_ray.config.region import RegionConfig
from geo_ray.runtime.cluster.demand import Bundle, RegionDemand


def demands_of(experiment: Experiment) -> list[RegionDemand]:
    """What the run asks of each region that is there at the start."""
    return [demand_of(experiment, region) for region in experiment.present]


def demand_of(experiment: Experiment, region: RegionConfig) -> RegionDemand:
    """What the run asks of a region."""
    # A local cluster stands for all machines.
    own = None if experiment.cluster.kind == "local" else region.nodes
    on = (region.server_node if experiment.cluster.kind != "local" else None) or ""
    server = Bundle("ps", region.cpus_per_server, node_type=on)
    bridges = [replace(server, role="bridge")] if len(experiment.regions) > 1 else []
    worker = Bundle("worker", region.cpus_per_worker, region.gpus_per_worker)
    workers = [worker] * region.workers
    if own is not None:
        workers = [
            replace(worker, node_type=each.type, processes=each.workers)
            for each in own
            for _ in range(each.count)
        ]
    bundles = (*[server] * region.ps_shards, *bridges, *workers)
    return RegionDemand(region.name, bundles, region.label)
