"""The Ray actors: thin shells that build the parts of a region and keep them running.

Ray carries only small control messages to them. Everything big goes over `geo_ray.transport`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from geo_ray.clock import SystemClock
from geo_ray.job.build import build_averager, use_one_thread
from geo_ray.runtime.actors.bridge import Bridge
from geo_ray.runtime.actors.deadlines import step_timeout_s
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.actors.parts import AVERAGER_PART
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.paths.build import attach_roads, averager_lives_in
from geo_ray.runtime.paths.differential import DifferentialPath, PathEnds, road_for
from geo_ray.runtime.paths.overlay_attach import attach_overlay
from geo_ray.training.averager.averager import Averager
from geo_ray.transport.emulation.link_model import build_links
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.lan.server import LanServer
from geo_ray.transport.security.cert_store import files_of
from geo_ray.transport.security.tls import TlsBytes, TlsFiles
from geo_ray.transport.wire.message import EndpointIdentity

Address = tuple[str, int]


def _host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class BridgeActor:
    """A region's bridge, with the averager if this region hosts it.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec = spec
        self._region = region
        self._averager: Averager | None = None
        self._road: DifferentialPath | None = None

    def ready(self) -> None:
        """Build what lives here; not in the constructor, whose errors Ray turns into text."""
        use_one_thread()
        spec = self._spec
        spec.check_run_directory(self._region)
        if not averager_lives_in(spec.experiment, self._region):
            return
        self._averager = build_averager(spec.experiment, spec.num_params)
        if spec.resume is not None:
            tensors, meta = spec.resume.read(AVERAGER_PART)
            self._averager.restore(tensors, meta["control"])  # type: ignore[arg-type]

    def open(self, origin_unix_s: float, certificate: TlsBytes | None) -> tuple[Address, Address]:
        """Listen, on the run's clock.

        Args:
            origin_unix_s: when that began.
            certificate: this region's for the run; None if it lies in a directory here, or no TLS.

        Returns:
            Where other regions, and where the own region, reach this bridge.
        """
        spec, region, experiment = self._spec, self._region, self._spec.experiment
        self._event_buffer = EventBuffer(region, origin_unix_s)
        self._bridge = Bridge(
            region,
            experiment.averager_region,
            self._averager if region == experiment.averager_region else None,
            self._event_buffer,
            spec.parts_dir,
            step_timeout_s(experiment.train, spec.num_params),
        )
        links = build_links(experiment.links(), experiment.seed)
        shaping = {dst: model for (src, dst), model in links.items() if src == region}
        run_start_s = SystemClock().now_s() - self._event_buffer.now_s()
        self._endpoint = Endpoint(
            EndpointIdentity(spec.run_id, region, spec.epoch, spec.key),
            self._bridge.on_message,
            experiment.transport,
            shaping,
            run_start_s=run_start_s,
            certificate=certificate or self._own_certificate(),
        )
        self._bridge.use(self._endpoint)
        self._lan = LanServer(_host(), spec.key, self._bridge.handle)
        bound = self._endpoint.listen(_host(), 0)
        ends = PathEnds(self._endpoint, bound, run_start_s, shaping, self._bridge.refuse)
        self._road = road_for(experiment.codec.up, spec.num_params, ends)
        self._bridge.use_lossy(self._road)
        run_dir = Path(spec.parts_dir).parent
        attach_overlay(experiment, spec.num_params, run_dir, self._bridge, self._endpoint)
        attach_roads(
            experiment,
            region,
            self._bridge,
            self._endpoint,
            self._averager,
            self._event_buffer,
            spec.num_params,
        )
        return self._endpoint.advertised, self._lan.address

    def _own_certificate(self) -> TlsFiles | None:
        directory = self._spec.experiment.transport.certs
        return None if directory is None else files_of(Path(directory), self._region)

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge and keep the link up."""
        self._endpoint.connect(peer, address)
        if self._road is not None:
            self._road.connect(peer, address)

    def poll(self) -> dict[str, Any]:
        """State and new events."""
        return {"status": self._bridge.status(), "events": self._event_buffer.take()}

    def request_stop(self) -> None:
        """Let all regions finish."""
        self._bridge.request_stop()

    def request_checkpoint(self, checkpoint: int, halt: bool) -> bool:
        """Begin a checkpoint of all regions."""
        return self._bridge.request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str) -> None:
        """Another region is dead and will not come back."""
        self._bridge.report_dead(region)

    def close(self) -> None:
        """Close all sockets."""
        self._bridge.close()
        self._lan.close()
        self._endpoint.close(1.0)
