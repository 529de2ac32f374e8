"""What a bridge's end of the overlay is made of, and what is known of links before a run begins."""

from __future__ import annotations

import logging
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError
from geo_ray.job.rundir import RunDirectory
from geo_ray.runtime.actors.bridge import Bridge
from geo_ray.runtime.actors.deadlines import step_timeout_s
from geo_ray.runtime.paths.overlay import OverlaySetting
from geo_ray.runtime.paths.overlay_rounds import AveragerPort, OverlayRounds
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.links.table import load_links

_LOGGER = logging.getLogger(__name__)


def attach_overlay(
    experiment: Experiment, num_params: int, run_dir: Path, bridge: Bridge, endpoint: Endpoint
) -> None:
    """Let a bridge's rounds take the overlay that the run wants; nothing for a star.

    Args:
        experiment: the run.
        num_params: P.
        run_dir: may hold what was measured of links before.
        bridge: before its first message.
        endpoint: its own.
    """
    region = endpoint.identity.region
    if experiment.overlay.kind == "star":
        return
    is_hub = region == experiment.averager_region
    setting = OverlaySetting(
        region=region,
        regions=experiment.region_names,
        hub=experiment.averager_region,
        config=experiment.overlay,
        num_params=num_params,
        seed=experiment.seed,
        links_mbps=known_links_mbps(run_dir),
    )
    port = AveragerPort(bridge.take_in_round, bridge.refuse) if is_hub else None
    timeout_s = step_timeout_s(experiment.train, num_params)
    rounds = OverlayRounds(setting, experiment.strategy, port, timeout_s)
    bridge.use_overlay(rounds)
    rounds.use(endpoint)


def known_links_mbps(run_dir: Path) -> dict[tuple[str, str], float]:
    """Goodput of ordered pairs, from the run's link table; nothing if there is none."""
    path = RunDirectory(run_dir, run_dir).links
    if not path.exists():
        return {}
    try:
        table = load_links(path)
    except GeoRayError as error:
        _LOGGER.warning("the overlay begins without what was measured: %s", error)
        return {}
    return {record.pair: record.goodput_mbps for record in table.links}
