"""The end of a run: the final model, the summary, and the order of the shutdown.

Shutdown: 1. `Controller.close` ends all other threads that call Ray; 2. `finish` writes the model
of a finished run; 3. it writes the summary and ``run_finished`` (`note_failure`: ``run_failed``);
4. actors and places end; 5. the report is written; 6. the rest is copied to the bucket and the
lease is released; 7. the supervisor ends. Every step replaces its output atomically, so a crash
between two steps loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointConflictError,
    InvariantError,
    RegionLostError,
    RunDirectoryError,
    StoreError,
)
from geo_ray.ray_cluster.calls import Handle, collect
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.model_file import about_model, keep_longer, save_trained
from geo_ray.runs.report import account
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.launcher import ProcessLauncher
from geo_ray.runtime.run_context import Reporting, Training, held
from geo_ray.runtime.run_order import RunEnd
from geo_ray.storage.folders import Folder
from geo_ray.storage.parts import read_part
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.summary import Summary, Summing, save_summary

_WRITE_S: Final = 180.0
_MOST_PAUSE_S: Final = 30.0
_PIECE_BYTES: Final = 32 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retrying:
    """Retries the steps of a run's end while a store or a disk is unavailable.

    Attributes:
        seconds: time limit of each step.
        reporting: receives the reason for a delay; its interruption ends the retries.
        is_store_away: whether the last checkpoint could not be saved; then the store is not used.
    """

    seconds: float
    reporting: Reporting
    is_store_away: bool = False

    def until_done(self, what: str, step: Callable[[], T]) -> T:
        """Repeat a step until it succeeds; the step must be idempotent.

        Raises:
            StoreError, RunDirectoryError: it did not succeed in time, or before an interruption.
        """
        ends_s, pause_s = time.monotonic() + self.seconds, 1.0
        while True:
            try:
                return step()
            except (StoreError, RunDirectoryError) as error:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or self.reporting.interruption.is_set():
                    raise
                self.reporting.status(f"retrying {what} for {left_s:.0f} s: {error.message}")
                self.reporting.interruption.wait(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def finish(training: Training) -> Summary:
    """Write the final model and the summary.

    The model is written through the store, if the run has one. If the store does not accept it in
    time, the run actor fetches the model from the server of the averager's region, so that the
    run's directory has it.

    Args:
        training: a run whose workers are done.

    Raises:
        GeoRayError: the model or the summary cannot be written.
    """
    context, controller = training.context, training.controller
    experiment, run, reporting = context.experiment, context.run, context.reporting
    actors, recorder = context.actors, controller.recorder
    now_s = time.time() - controller.origin_unix_s
    retrying = Retrying(
        experiment.checkpoint.retry_s,
        reporting,
        is_store_away=controller.policy.is_failing,
    )
    actors.drain_workers()
    tensors, digests = _final_model(actors, places_of(run, experiment.checkpoint), run, retrying)
    if actors.upload_server is not None:  # the model was uploaded through it
        for (src, dst), count in actors.upload_server.crossed().items():
            recorder.emit("wan", now_s, src=src, dst=dst, bytes_by_class={"checkpoint": count})
    summing = Summing(experiment.train.target)
    for event in read_events(run.path / EVENTS_FILE):
        summing.feed(event)
    usd = account(run, summing.totals)
    digest = digests[actors.leader.region]
    summary = summing.summary(startup_s=training.startup_s, usd=usd, digest=digest)
    about = about_model(experiment, summary.steps, summary.eval)
    recorder.check()
    aside = retrying.until_done("the model", lambda: keep_longer(run.model, summary.steps))

    def save() -> None:
        params_P, buffers_B = tensors["params"], tensors.get("model_buffers")
        save_trained(context.task, experiment.seed, params_P, run.model, about, buffers_B)
        save_summary(summary, run.path)

    retrying.until_done("writing the model", save)
    recorder.emit(  # last: a run with this event is not resumed
        "run_finished", now_s, summary=summary.model_dump(), digests=digests
    )
    if aside is not None:
        reporting.status(f"the previous model was of more steps: it was renamed to {aside.name}")
    return summary


def conclude(
    run: RunDirectory,
    reporting: Reporting,
    launcher: ProcessLauncher,
    end: RunEnd,
    retry_s: float,
) -> Summary:
    """Carry out the remaining steps 4 to 7 after a run actor died after step 3.

    Args:
        run: its log says how the run ended.
        reporting: receives its progress.
        launcher: owns its processes.
        end: the end recorded in the log.
        retry_s: how long an unreachable bucket is retried.

    Raises:
        GeoRayError: the error that ended the run early.
    """
    with held(run, reporting, retry_s) as lease:
        launcher.attach(lease.token)
        launcher.clear()
    return end.result()


def _final_model(
    actors: ActorGroup, places: CheckpointPlaces, run: RunDirectory, retrying: Retrying
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the vectors of the final model, and each region's digest of its parameters."""
    leader = actors.leader.region
    others = {r: p.write_model.remote(False) for r, p in actors.primaries.items() if r != leader}
    digests = {r: str(value) for r, (_, value) in collect(others, _WRITE_S).items()}
    primary = actors.primaries[leader]
    if not (places.is_remote and retrying.is_store_away):
        folder = places.model_folder(str(run.path))
        try:
            found = retrying.until_done("the model", partial(_through, primary, folder, places))
            return found[0], digests | {leader: found[1]}
        except (StoreError, RunDirectoryError) as error:
            retrying.reporting.status(
                f"{error.message}: taking the model from region '{leader}' itself"
            )
    sizes, digest = collect({0: primary.model_bytes.remote()}, _WRITE_S)[0]
    tensors = {}
    for name, num_bytes in sizes.items():
        tensors[name] = torch.empty(num_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, _PIECE_BYTES):
            stop = min(num_bytes, start + _PIECE_BYTES)
            piece = collect({0: primary.model_piece.remote(name, start, stop)}, _WRITE_S)[0]
            tensors[name][start:stop] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    tensors["params"] = tensors["params"].view(torch.float32)
    return tensors, digests | {leader: str(digest)}


def _through(
    primary: Handle, folder: Folder, places: CheckpointPlaces
) -> tuple[dict[str, Tensor], str]:
    """Write the model to a folder and read it from there."""
    if places.is_remote:
        places.beside("model").clear()  # left by an earlier, unfinished end
    try:
        part, digest = collect({0: primary.write_model.remote(True)}, _WRITE_S)[0]
    except (RegionLostError, CheckpointConflictError) as error:  # an earlier attempt is late
        if not places.is_remote:
            raise
        raise StoreError(f"{places} does not accept the model: {error.message}") from error
    if part is None:
        raise InvariantError("the averager's region wrote no model")
    tensors, _ = read_part(folder, part)
    with suppress(StoreError):
        folder.remove([part.file])
    return tensors, str(digest)
