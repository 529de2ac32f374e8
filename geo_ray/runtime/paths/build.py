"""Builds the roads that a bridge's updates take beside the plain one, as the experiment says."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from geo_ray.codecs.common.feedback import open_coded
from geo_ray.config.experiment import Experiment
from geo_ray.job.build import wire_plan
from geo_ray.runtime.actors.bridge import Bridge
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.paths.standby import StandbyPath
from geo_ray.runtime.paths.transfers import TransfersPath
from geo_ray.runtime.paths.upload_coordinator import AveragerHome, UploadCoordinator
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.caller import Caller
from geo_ray.training.averager.replication import ReplicatedAverager, ShadowAverager
from geo_ray.training.averager.standby import StandbyNode
from geo_ray.training.averager.takeover import Watch
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import Message


def averager_lives_in(experiment: Experiment, region: str) -> bool:
    """Whether the bridge of ``region`` needs an averager: as its home, or as its standby."""
    return region in (experiment.averager_region, experiment.averager.standby)


def attach_roads(
    experiment: Experiment,
    region: str,
    bridge: Bridge,
    endpoint: Endpoint,
    averager: Averager | None,
    event_buffer: EventBuffer,
    num_params: int,
) -> None:
    """Give ``bridge`` what the experiment asks for: turns for transfers, a standby.

    Args:
        experiment: the run.
        region: the bridge's.
        bridge: before its first message.
        endpoint: its own.
        averager: if `averager_lives_in` this region.
        event_buffer: takes events for the controller.
        num_params: P.
    """
    standby: StandbyPath | None = None
    if experiment.averager.standby is not None:
        node = standby_node(experiment, region, averager, num_params)
        standby = StandbyPath(node, endpoint, bridge, event_buffer)
        bridge.use_standby(standby)
    if experiment.transfers is None:
        return
    hub: AveragerHome = bridge if standby is None else standby
    say: Callable[[str, Message], None] = endpoint.send if standby is None else standby.post
    uploads = UploadCoordinator(
        experiment.transfers, experiment.averager_region, hub, say, lambda: rtts_s(endpoint)
    )
    home = experiment.averager_region
    road = TransfersPath(
        region,
        experiment.transfers,
        (lambda: home) if standby is None else (lambda: standby.hub),
        say,
        uploads,
        bridge.give,
    )
    bridge.use_transfers(road)
    if standby is not None:
        standby.use_transfers(road)


def standby_node(
    experiment: Experiment, region: str, averager: Averager | None, num_params: int
) -> StandbyNode:
    """The part of ``region`` in an averager that may move."""
    config, hub = experiment.averager, experiment.averager_region
    plan = wire_plan(experiment)

    def vector(message: Update | Reply) -> Tensor:
        if message.coded is None:
            return message.payload_P
        codec = plan.up if isinstance(message, Update) else plan.down
        return open_coded(codec, message.coded, num_params)

    keeps = config.max_divergence > 0 and experiment.strategy.traits.sends == "change"
    watch = Watch(
        region,
        tuple(sorted(experiment.region_names)),
        hub,
        config.standby,
        config.takeover_s,
        config.rejoin_s,
    )
    node = StandbyNode(region, Caller(hub, 1, vector, keeps), watch)
    if averager is not None and region == hub:
        node.primary = ReplicatedAverager(averager, config.max_divergence)
    elif averager is not None:
        node.shadow = ShadowAverager(averager)
    return node


def dials(experiment: Experiment) -> list[tuple[str, str]]:
    """Which region's bridge dials which, beside the averager's: (who, whom), each pair once."""
    hub, names = experiment.averager_region, sorted(experiment.region_names)
    others = [name for name in names if name != hub]
    sums_on_the_way = experiment.transfers is not None and experiment.transfers.aggregate
    if sums_on_the_way or experiment.overlay.kind != "star":
        return [(a, b) for a in others for b in others if b < a]
    standby = experiment.averager.standby
    return [] if standby is None else [(name, standby) for name in others if name != standby]


def rtts_s(endpoint: Endpoint) -> dict[str, float]:
    """Shortest round trips by region, as far as there was one."""
    found = {peer: stats["rtt_min_s"] for peer, stats in endpoint.stats().items()}
    return {peer: rtt_s for peer, rtt_s in found.items() if rtt_s is not None}
