"""Plans of a configuration: what `geo-ray plan` does, without the printing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from geo_ray.clouds.price_book import known_book, own_files
from geo_ray.config.experiment import Experiment
from geo_ray.job.build import initial_parameters
from geo_ray.job.data import prepare_manifest
from geo_ray.job.plan_inputs import request_of, section_of, stale_notes
from geo_ray.planning.cloudless import cloudless, everything
from geo_ray.planning.optimal import front, optimal
from geo_ray.planning.plan import Plan
from geo_ray.planning.request import Request
from geo_ray.tasks.load import load_task
from geo_ray.wan.link_table import LinkTable, load_links, table_of

Policy = Literal["optimal", "cloudless", "everything"]
_POLICIES = {"optimal": optimal, "cloudless": cloudless, "everything": everything}


@dataclass(frozen=True, slots=True)
class Planned:
    """What came of it.

    Attributes:
        plan: the one to follow.
        request: what was asked.
        front: plans that nothing beats in both time and money; empty unless asked for.
    """

    plan: Plan
    request: Request
    front: Sequence[Plan] = ()


def make_plan(
    experiment: Experiment,
    base_dir: Path,
    policy: Policy,
    prices: Sequence[Path],
    links: Path | None,
    *,
    with_front: bool = False,
) -> Planned:
    """Plan the run of a configuration; nothing is rented or started.

    Args:
        experiment: the configuration.
        base_dir: where relative paths in it start.
        policy: who decides.
        prices: the user's files of prices; the default ones if there are none.
        links: a measured link table; the emulated links if None.
        with_front: make the front, too.

    Raises:
        GeoRayError: whatever keeps a plan from being made.
    """
    offers = section_of(experiment).regions
    book = known_book(prices or own_files())
    table = load_links(links) if links is not None else _emulated(experiment)
    task = load_task(experiment.task, base_dir)
    num_params = initial_parameters(task, experiment.seed).numel()
    rows = {name: float(offer.rows) for name, offer in offers.items() if offer.rows is not None}
    if any(name not in rows for name in experiment.region_names):
        with tempfile.TemporaryDirectory() as scratch:
            manifest, _ = prepare_manifest(experiment, task, base_dir, Path(scratch))
        for name in experiment.region_names:
            rows[name] = float(manifest.rows(name, "train"))
    request = request_of(experiment, num_params, rows, book, table)
    plan = _POLICIES[policy](request)
    notes = stale_notes(experiment, book, time.time())
    plan = plan.model_copy(update={"notes": tuple(notes)})
    return Planned(plan, request, front(request) if with_front else ())


def _emulated(experiment: Experiment) -> LinkTable:
    return table_of(experiment.links())
