"""`geo-ray probe CONFIG.yaml`: an actor in each region, and every link between them in turn."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import ray

from geo_ray.base.errors import ConfigError, GeoRayError, RegionLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import collect, kill
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.ray_cluster.keys import BridgeKeys, BridgeSecrets, Introduction, RunKeys
from geo_ray.ray_cluster.placement import PlacedRegion, place, remove
from geo_ray.ray_cluster.preflight import preflight
from geo_ray.transport.emulation import build_links
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.links import LinkRecord, LinkTable
from geo_ray.transport.probe.node import ProbeNode
from geo_ray.transport.probe.plan import Pair, ProbePlan, ProbeProgress, probe_rounds
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

_PLACE_TIMEOUT_S: Final = 60.0
_START_TIMEOUT_S: Final = 120.0
_CONNECT_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.2
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """State of a probe of a cluster.

    Attributes:
        done: finished directions.
        total: all directions.
        now: current measurement and its progress.
    """

    done: int
    total: int
    now: tuple[tuple[Pair, ProbeProgress], ...]


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Result of a probe of a cluster.

    Attributes:
        table: the measured links.
        failures: why the others could not be measured, by pair.
    """

    table: LinkTable
    failures: Mapping[Pair, GeoRayError]


class ProbeActor:
    """One region's end of a probe.

    Args:
        experiment_json: the configuration: transport and emulated links.
        run_id: distinguishes this probe's sockets from others.
        region: region of this end.
    """

    def __init__(self, experiment_json: str, run_id: str, region: str) -> None:
        self._experiment_json = experiment_json
        self._run_id = run_id
        self._region = region

    def introduce(self) -> Introduction:
        """Read the configuration; return the public halves of this process's keys."""
        self._experiment = Experiment.model_validate_json(self._experiment_json)
        self._secrets = BridgeSecrets(self._region, self._experiment.transport)
        return self._secrets.introduce()

    def open(self, keys: BridgeKeys) -> Address:
        """Listen; return the address."""
        experiment, region = self._experiment, self._region
        identity = EndpointIdentity(self._run_id, region, 1, self._secrets.wan_key(keys))
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        links = build_links(experiment.links(), experiment.seed)
        self._node = ProbeNode(region, (host, 0))
        self._endpoint = Endpoint(
            identity,
            self._node.on_message,
            experiment.transport,
            {dst: model for (src, dst), model in links.items() if src == region},
            certificate=self._secrets.certificate(keys.signed),
        )
        self._node.use(self._endpoint)
        self._endpoint.listen(host, 0)
        return self._endpoint.advertised

    def connect(self, peers: dict[str, Address]) -> None:
        """Dial regions."""
        for peer, address in peers.items():
            self._node.dialed(peer, address[0])
            self._endpoint.connect(peer, address)

    def measure(self, peer: str, plan: ProbePlan) -> LinkRecord:
        """Measure the direction to ``peer``."""
        self._endpoint.wait_connected([peer], _CONNECT_TIMEOUT_S)
        return self._node.measure(peer, plan)

    def progress(self) -> ProbeProgress:
        """Return the progress of the measurement."""
        return self._node.progress()

    def close(self) -> None:
        """Close all sockets and end all threads."""
        self._endpoint.close(0.0)
        self._node.close()


def probe_cluster(
    experiment: Experiment,
    plan: ProbePlan,
    on_status: Callable[[ProbeStatus], None],
    on_phase: Callable[[str], None],
    *,
    disjoint: bool = False,
) -> ProbeOutcome:
    """Measure every link between the regions of an experiment, on its cluster.

    Emulated links are measured as emulated, without a UDP train, which the emulation does not
    affect.

    Args:
        experiment: regions, cluster, transport, emulated links.
        plan: thoroughness of the measurement.
        on_status: called a few times a second.
        on_phase: called with each phase of the preparation.
        disjoint: see `probe_rounds`.

    Raises:
        ConfigError: there is only one region.
        GeoRayError: the cluster cannot be used, or no link could be measured.
    """
    names = experiment.region_names
    if len(names) < 2:
        raise ConfigError(
            "there is only one region, so there is no link to probe",
            fix="Name two regions or more.",
        )
    on_phase("starting the cluster" if experiment.cluster.kind == "local" else "connecting")
    namespace = f"geo_ray-probe-{secrets.token_hex(4)}"
    with connect(experiment.cluster, experiment.labels, namespace=namespace):
        demands = [
            RegionDemand(region.name, (Bundle("bridge", region.cpus_per_server),), region.label)
            for region in experiment.regions
        ]
        on_phase("placing a probe in each region")
        preflight(demands, ask_nodes=experiment.cluster.kind != "local")
        placed = place(demands, _PLACE_TIMEOUT_S)
        try:
            run_id = f"probe-{secrets.token_hex(8)}"
            with _actors(experiment, run_id, placed) as actors:
                on_phase("connecting the regions")
                _connect(actors, RunKeys(run_id, experiment.region_names, experiment.transport))
                return _measure(experiment, actors, plan, on_status, disjoint=disjoint)
        finally:
            remove(placed)


@contextmanager
def _actors(
    experiment: Experiment, run_id: str, placed: Mapping[str, PlacedRegion]
) -> Iterator[dict[str, Any]]:
    # Links do not depend on the task: user classes are not needed to measure them.
    settings = experiment.model_dump(
        mode="json", exclude={"codec", "overlay", "transfers", "averager", "plan"}
    )
    text = json.dumps(settings | {"strategy": {"kind": "asgd"}})
    actors: dict[str, Any] = {}
    try:
        for region in experiment.regions:
            options = {
                "num_cpus": region.cpus_per_server,
                "scheduling_strategy": placed[region.name].strategy("bridge"),
                "max_concurrency": 4,
                "max_restarts": 0,
            }
            actors[region.name] = (
                ray.remote(ProbeActor).options(**options).remote(text, run_id, region.name)
            )
        yield actors
    finally:
        closing = [actor.close.remote() for actor in actors.values()]
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in actors.values():
            kill(actor)


def _connect(actors: Mapping[str, Any], keys: RunKeys) -> None:
    known = collect({r: a.introduce.remote() for r, a in actors.items()}, _START_TIMEOUT_S)
    opened = {r: a.open.remote(keys.for_bridge(r, known[r])) for r, a in actors.items()}
    addresses = collect(opened, _START_TIMEOUT_S)
    names = list(actors)
    dialed = {
        region: actors[region].connect.remote({p: addresses[p] for p in names[i + 1 :]})
        for i, region in enumerate(names)
    }
    collect(dialed, _START_TIMEOUT_S)


def _measure(
    experiment: Experiment,
    actors: Mapping[str, Any],
    plan: ProbePlan,
    on_status: Callable[[ProbeStatus], None],
    *,
    disjoint: bool,
) -> ProbeOutcome:
    emulated = experiment.links()
    rounds = probe_rounds(list(actors), disjoint=disjoint)
    total = sum(len(pairs) for pairs in rounds)
    records: list[LinkRecord] = []
    failures: dict[Pair, GeoRayError] = {}
    for pairs in rounds:
        refs = {}
        for src, dst in pairs:
            is_real = (src, dst) not in emulated
            suited = plan if is_real else plan.model_copy(update={"udp_s": 0.0})
            refs[src, dst] = actors[src].measure.remote(dst, suited)
        _watch(refs, actors, plan, len(records) + len(failures), total, on_status)
        for pair, ref in refs.items():
            try:
                records.append(collect({pair: ref}, _POLL_S)[pair])
            except GeoRayError as error:
                failures[pair] = error
    if not records:
        raise next(iter(failures.values()))
    return ProbeOutcome(LinkTable().with_records(records), failures)


def _watch(
    refs: Mapping[Pair, Any],
    actors: Mapping[str, Any],
    plan: ProbePlan,
    done: int,
    total: int,
    on_status: Callable[[ProbeStatus], None],
) -> None:
    """Wait until every call has ended, or has exceeded its time limit."""
    limit_s = _CONNECT_TIMEOUT_S + plan.ramp_for(1.0) + plan.counted_for(1.0) + plan.udp_s
    deadline_s = time.monotonic() + limit_s + 4 * plan.timeout_s
    left = dict(refs)
    while left and time.monotonic() < deadline_s:
        ended, _ = ray.wait(list(left.values()), num_returns=len(left), timeout=_POLL_S)
        left = {pair: ref for pair, ref in left.items() if ref not in ended}
        asked = {pair: actors[pair[0]].progress.remote() for pair in left}
        try:
            found = collect(asked, _START_TIMEOUT_S)
        except RegionLostError:
            continue  # its measurement also ends with an error
        now = tuple((pair, progress) for pair, progress in found.items())
        on_status(ProbeStatus(done + len(refs) - len(left), total, now))
