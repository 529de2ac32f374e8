"""Chooses and builds the exchange transport of a bridge, as the experiment configures it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from geo_ray.base.errors import GeoRayError, InvariantError
from geo_ray.codecs.base import DifferentialCodec
from geo_ray.codecs.feedback import open_coded
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import wire_plan
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.exchange.differential import Differential, EndpointSite
from geo_ray.runtime.exchange.direct import (
    Answers,
    AveragerOutput,
    BridgeFailure,
    DirectPath,
    StagedPath,
    UpdatePath,
    UpdateStage,
)
from geo_ray.runtime.exchange.overlay import OverlayPath, OverlaySetting
from geo_ray.runtime.exchange.standby import StandbyPath
from geo_ray.runtime.exchange.upload_scheduling import Transfers
from geo_ray.storage.places import PartPlaces
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager, AveragerFactory
from geo_ray.training.failover import Caller, LivenessWatch, StandbyNode
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.replication import AveragerReplica, ReplicatedAverager
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.links import load_links

log = logging.getLogger(__name__)

PathKind = Literal["direct", "standby", "overlay"]
StageKind = Literal["plain", "transfers", "differential"]

COMBINE: Final[dict[PathKind, tuple[StageKind, ...]]] = {
    "direct": ("plain", "transfers", "differential"),
    "standby": ("plain", "transfers"),
    "overlay": ("plain",),
}
"""Supported stages of each path; `Experiment` refuses all other combinations, with reasons."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The path of all updates of a run, and its stage."""

    path: PathKind
    stage: StageKind


@dataclass(frozen=True, slots=True)
class PathSetting:
    """Arguments of a bridge's exchange transport.

    Attributes:
        experiment: the run.
        num_params: P.
        averager: the averager, if `averager_lives_in` this region.
        event_buffer: receives events for the controller.
        places: where parts of checkpoints are written.
        timeout_s: longest wait of the region for an answer.
        saved: state of the stage from the checkpoint that the run resumes from.
        run_dir: the run's directory.
        leader: the averager's leader; None: as configured, at the start.
        make: builds a new averager, for a region that becomes standby.
    """

    experiment: Experiment
    num_params: int
    averager: Averager | None
    event_buffer: EventBuffer
    places: PartPlaces
    timeout_s: float
    saved: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str = ""
    leader: AveragerLeader | None = None
    make: AveragerFactory | None = None


def choose_path(experiment: Experiment) -> PathChoice:
    """Return the path that an experiment configures.

    Raises:
        InvariantError: the combination is not supported.
    """
    path: PathKind = "direct"
    if experiment.overlay.kind != "star":
        path = "overlay"
    elif experiment.averager.standby is not None:
        path = "standby"
    stages: list[StageKind] = []
    if _differential(experiment) is not None:
        stages.append("differential")
    if experiment.transfers is not None:
        stages.append("transfers")
    choice = PathChoice(path, stages[0] if stages else "plain")
    if len(stages) > 1 or choice.stage not in COMBINE[path]:
        raise InvariantError(f"updates cannot take path {path} with {stages}")
    return choice


def build_path(setting: PathSetting, site: EndpointSite, failure: BridgeFailure) -> UpdatePath:
    """Build the path of the updates of one bridge.

    Args:
        setting: its arguments.
        site: the bridge's endpoint, which listens.
        failure: the bridge's failure.
    """
    experiment = setting.experiment
    endpoint, region = site.endpoint, site.endpoint.identity.region
    choice = choose_path(experiment)
    leader = setting.leader or AveragerLeader(experiment.averager_region)
    own = setting.averager if region == leader.region else None
    output = AveragerOutput(setting.event_buffer, setting.places, failure)
    answers = Answers(region, setting.timeout_s, partial(_is_connected, endpoint))
    failure.listen(answers.end)

    def stage(path: StagedPath) -> UpdateStage:
        codec = _differential(experiment)
        if choice.stage == "differential" and codec is not None:
            return Differential(codec, setting.num_params, site, path, setting.saved)
        if choice.stage == "transfers" and experiment.transfers is not None:
            return Transfers(region, experiment.transfers, path, endpoint)
        return UpdateStage()

    match choice.path:
        case "direct":
            return DirectPath(endpoint, leader, own, output, answers, stage)
        case "standby":
            node = _standby_node(setting, region, leader)
            return StandbyPath(node, endpoint, output, answers, setting.event_buffer, stage)
        case "overlay":
            overlay = OverlaySetting(
                region=region,
                regions=experiment.present_names,
                leader=leader.region,
                config=experiment.overlay,
                num_params=setting.num_params,
                seed=experiment.seed,
                links_mbps=_known_links_mbps(Path(setting.run_dir)),
            )
            return OverlayPath(
                overlay, experiment.strategy, own, output, endpoint, setting.timeout_s
            )


def _is_connected(endpoint: Endpoint, peer: str) -> bool:
    stats = endpoint.stats().get(peer)
    return stats is not None and bool(stats["connected"])


def averager_lives_in(experiment: Experiment, region: str) -> bool:
    """Return whether the bridge of ``region`` needs an averager: as leader or as standby."""
    return region in (experiment.averager_region, experiment.first_standby)


def dials(experiment: Experiment) -> list[tuple[str, str]]:
    """Return the pairs of bridges (dialing, dialed) besides those of the averager, each once."""
    leader, names = experiment.averager_region, sorted(experiment.present_names)
    others = [name for name in names if name != leader]
    sums_on_the_way = experiment.transfers is not None and experiment.transfers.aggregate
    may_move = experiment.averager.standby is not None
    if may_move or sums_on_the_way or experiment.overlay.kind != "star":
        return [(a, b) for a in others for b in others if b < a]
    return []


def _differential(experiment: Experiment) -> DifferentialCodec | None:
    """Return the codec for updates, if parts of its encoding may be lost in transit."""
    codec = experiment.codec.up
    return None if codec is None else codec.traits.differential


def _standby_node(setting: PathSetting, region: str, leader: AveragerLeader) -> StandbyNode:
    """Build the standby node of ``region`` for an averager that may move."""
    experiment, averager = setting.experiment, setting.averager
    config, plan, standby = experiment.averager, wire_plan(experiment), experiment.first_standby
    if setting.make is None:
        raise InvariantError(f"'{region}' cannot be standby: no averager is built there")

    def vector(message: UpdateMessage | ReplyMessage) -> Tensor:
        if message.coded is None:
            return message.payload_P
        codec = plan.up if isinstance(message, UpdateMessage) else plan.down
        return open_coded(codec, message.coded, setting.num_params)

    keeps = config.max_divergence > 0 and experiment.strategy.traits.sends == "change"
    watch = LivenessWatch(region, leader, config.failover_s, config.rejoin_s)
    preferred, bound = config.named_standbys, config.max_divergence
    node = StandbyNode(region, Caller(vector, keeps), watch, setting.make, preferred, bound)
    if averager is not None and region == leader.region:
        has_standby = standby is not None
        node.primary = ReplicatedAverager(averager, bound, has_standby=has_standby)
        node.standby = standby
    elif averager is not None and setting.leader is None and region == standby:
        node.replica = AveragerReplica(averager)
    return node


def _known_links_mbps(run_dir: Path) -> dict[tuple[str, str], float]:
    """Return the goodput of ordered pairs from the run's link table; empty if there is none."""
    path = RunDirectory(run_dir, run_dir).links
    if not path.exists():
        return {}
    try:
        table = load_links(path)
    except GeoRayError as error:
        log.warning("the overlay starts without link measurements: %s", error)
        return {}
    return {record.pair: record.goodput_mbps for record in table.links}
