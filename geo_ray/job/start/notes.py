"""What is probably a mistake in a run that can start all the same: said before it does."""

from __future__ import annotations

import logging
import os
from typing import Final

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.job.data import data_region

_log = logging.getLogger(__name__)

WORKERS_PER_CORE: Final = 4
"""More workers than that on one core of a local cluster are said to be many."""


def warn_at_start(experiment: Experiment, manifest: Manifest, *, simulated: bool) -> None:
    """Log every note about a run that is about to start.

    Args:
        experiment: the run.
        manifest: its data.
        simulated: whether it computes in this process.
    """
    cores = len(os.sched_getaffinity(0))
    for note in start_notes(experiment, manifest, None if simulated else cores):
        _log.warning("%s", note)


def start_notes(experiment: Experiment, manifest: Manifest, cores: int | None) -> list[str]:
    """The notes; see the module's docstring.

    Args:
        experiment: the run.
        manifest: its data.
        cores: of this machine; None if workers have no processes of their own.
    """
    return [
        *_few_rows(experiment, manifest),
        *_late(experiment),
        *(_unused_certificates(experiment) if cores is not None else ()),
        *(_not_simulated(experiment) if cores is None else _many_workers(experiment, cores)),
    ]


def _not_simulated(experiment: Experiment) -> list[str]:
    """What a real run would do beside what the simulator does."""
    notes = []
    if experiment.averager.standby is not None:
        notes.append(
            "averager.standby is not simulated: a real run sends its standby a copy of every "
            "update, and may wait for it"
        )
    if experiment.transfers is not None and experiment.transfers.aggregate:
        notes.append("transfers.aggregate is not simulated: every update goes by itself")
    return notes


def _few_rows(experiment: Experiment, manifest: Manifest) -> list[str]:
    """A batch has more rows than its region has: some are in it twice."""
    notes = []
    for region in experiment.regions:
        rows = manifest.rows(data_region(region, manifest), "train")
        largest = max(region.batch_sizes or (experiment.data.batch_size,))
        if largest > rows:
            key = "batch_sizes of the region" if region.batch_sizes else "data.batch_size"
            notes.append(
                f"region '{region.name}' has {rows} training rows, fewer than the {largest} of one "
                f"batch ({key}): every batch has some of them more than once"
            )
    return notes


def _late(experiment: Experiment) -> list[str]:
    """What is to happen every so many steps would happen once, at the end."""
    train, exchange = experiment.train, experiment.strategy.traits.exchange
    notes = []
    if train.eval_every > train.steps and "eval_every" in train.model_fields_set:
        notes.append(
            f"train.eval_every: {train.eval_every} is beyond train.steps = {train.steps}: nothing "
            "is evaluated before the end"
        )
    interval = exchange.interval
    if len(experiment.regions) > 1 and interval is not None and interval > train.steps:
        notes.append(
            f"strategy.interval: {interval} is beyond train.steps = {train.steps}: regions train "
            "alone until the end"
        )
    return notes


def _unused_certificates(experiment: Experiment) -> list[str]:
    """Links of this machine need no certificate, unless `transport.tls` is required."""
    transport = experiment.transport
    if transport.certs is None or transport.tls == "required" or len(experiment.regions) < 2:
        return []
    if transport.tls == "off":
        return ["transport.certs is not used: transport.tls is off"]
    if experiment.cluster.kind != "local" or transport.advertise_host is not None:
        return []
    return [
        "transport.certs is not used: all links are loopback addresses of this machine, which "
        "transport.tls: auto leaves without TLS; required uses it there, too"
    ]


def _many_workers(experiment: Experiment, cores: int) -> list[str]:
    workers = sum(region.workers for region in experiment.regions)
    if experiment.cluster.kind != "local" or workers <= WORKERS_PER_CORE * cores:
        return []
    return [
        f"regions: {workers} workers, each a process of its own, on {cores} cores of this machine: "
        "they will be slow, and memory may run out; `geo-ray simulate` needs one process"
    ]
