"""The run loop: runs an experiment from start to end.

Two hosts call `run`: `RunLoopActor`, which a supervisor restarts, and a Tune trial
(`geo_ray.sweep.trial`), whose processes end with it. Reading order: `run`, `run_start.started` or
`attach.attached`, `train`, `Controller.run`, `run_finish.finish`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import ray

from geo_ray.base.errors import (
    CheckpointError,
    LeaseLostError,
    RegionLostError,
    RunDirectoryError,
    StoreError,
)
from geo_ray.base.restarts import Restarts
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import watched_head
from geo_ray.runs.checkpoints import store_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.attach import Attached, attached, running_processes
from geo_ray.runtime.launcher import ProcessLauncher
from geo_ray.runtime.run_context import BrokenError, Reporting, RunSetup, Training, held
from geo_ray.runtime.run_finish import Retrying, finish
from geo_ray.runtime.run_order import Resumption
from geo_ray.runtime.run_start import started
from geo_ray.telemetry.event_log import note_failure
from geo_ray.telemetry.summary import Summary

_PAUSE_S: Final = 15.0  # before the retry of a failed restart; doubles with each further failure


def run(
    experiment: Experiment,
    directory: RunDirectory,
    reporting: Reporting,
    launcher: ProcessLauncher,
    *,
    resume: Resumption | None = None,
) -> Summary:
    """Run the experiment to its end, in a process that is connected to the run's cluster.

    Without ``resume`` the run starts from the beginning. ``launcher`` owns its processes.

    Raises:
        GeoRayError: the run ended early; the error says why.
    """
    limit, window_s = experiment.checkpoint.restarts, experiment.train.restart_window_s
    restarts, failed_starts = Restarts(limit, window_s, "checkpoint.restarts"), 0
    with (
        held(directory, reporting, experiment.checkpoint.retry_s) as lease,
        watched_head(ray.get_runtime_context().gcs_address, reporting.interruption.set),
    ):
        reporting = reporting.noted_in(lease)
        setup = RunSetup(experiment, directory, reporting, launcher, lease)
        if experiment.is_served:
            from geo_ray.runtime.serving import serve  # imports DTensor, which takes seconds

            return serve(setup, resume)
        attaches = resume is not None and resume.checkpoint is None
        while True:
            try:
                with _ready(setup, resume, attaches=attaches) as training:
                    return train(training)
            except BrokenError as broken:
                failed_starts = failed_starts + 1 if broken.at_start else 0
                end = None if _may_restart(setup, broken, restarts) else broken.cause
                if end is None and failed_starts:
                    pause_s = _PAUSE_S * 2 ** (failed_starts - 1)
                    if reporting.interruption.wait(pause_s):
                        end = reporting.interruption.why
                if end is not None:
                    note_failure(directory.path, end, reporting.began_unix_s)
                    raise end from None
                resume = Resumption(waits=True, away=broken.away, clock=broken.clock)
                attaches = False


@contextmanager
def _ready(setup: RunSetup, resume: Resumption | None, *, attaches: bool) -> Iterator[Training]:
    """Attach to the processes of an earlier run actor, or start new ones."""
    if attaches and resume is not None:
        found = running_processes(setup)
        if isinstance(found, Attached):
            with attached(setup, found, resume.away) as training:
                yield training
            return
        reporting = setup.reporting
        if reporting.interruption.is_set():  # an interrupted run is not started again
            note_failure(setup.run.path, reporting.interruption.why, reporting.began_unix_s)
            raise reporting.interruption.why
        resume = replace(resume, cause=found)
    with started(setup, resume) as training:
        yield training


def train(training: Training) -> Summary:
    """Control the run until training ends, then write its results.

    Raises:
        BrokenError: a lost region cannot be replaced; the run can continue from a checkpoint.
        GeoRayError: the run ended early for another reason.
    """
    context, controller = training.context, training.controller
    lease, reporting, is_lost = context.lease, context.reporting, False
    lease.note("training")
    try:
        controller.run()
    except RegionLostError as error:
        if controller.policy.is_halting or controller.interrupted.is_set():
            raise
        raise BrokenError(error, controller.members.regions.away, training.clock) from error
    except LeaseLostError:
        is_lost = True
        raise
    finally:
        controller.close()
        if not is_lost:
            controller.evals.end(lambda: time.time() - controller.origin_unix_s)
    reporting.status("writing the model and the summary")
    return finish(training)


def _may_restart(setup: RunSetup, broken: BrokenError, restarts: Restarts) -> bool:
    """Return whether the run restarts from its newest checkpoint; retries an unreachable store."""
    checkpoint, reporting = setup.experiment.checkpoint, setup.reporting
    store = store_of(setup.run, checkpoint)
    retrying = Retrying(checkpoint.retry_s, reporting)
    try:
        retrying.until_done("reading the newest checkpoint", store.latest)
    except (CheckpointError, StoreError, RunDirectoryError):
        return False
    may = restarts.take(time.monotonic())
    if may:
        reporting.status(f"{broken.cause.message}: restarting from the newest checkpoint")
    return may
