"""The end of a run: its model, its summary, and the order of all steps.

The steps are these, in this order, whether the run is finished, stopped or has failed:

1. Stop: `Controller.close` ends every other thread of the driver that calls Ray; then the best
   model is written to its end.
2. Model: `finish` has it written, unless the run did not come to its end.
3. Summary: `finish` writes the summary, then the event ``run_finished``; of a run that failed,
   `note_failure` writes ``run_failed``.
4. Processes: actors end, their places and a cluster that was made for the run are given back.
5. Report: `reported` writes the page.
6. Lease: `mirrored` copies the rest to the run's bucket, and `driving` gives the lease back.

Every step replaces what it writes as a whole. So a driver that ends between two of them costs
nothing: the run has its last checkpoint since before step 1, and `--resume` comes to the same end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import read_part
from geo_ray.config.experiment import Experiment
from geo_ray.errors import InvariantError
from geo_ray.job.account import account
from geo_ray.job.checkpoints import places_of
from geo_ray.job.model_file import about_model, keep_longer, save_trained
from geo_ray.job.recorder import Recorder
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.metrics.summary import Summary, Summing, save_summary
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import collect
from geo_ray.tasks.base import Task

_WRITE_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The end of a run: its summary, and where a model of more steps is that was there before."""

    summary: Summary
    aside: Path | None


def finish(
    actors: ActorGroup,
    experiment: Experiment,
    run: RunDirectory,
    task: Task,
    recorder: Recorder,
    times_s: tuple[float, float],
) -> FinishedRun:
    """Have the model written, and write the summary.

    Args:
        actors: of the run.
        experiment: the run.
        run: its directory.
        task: gives the module.
        recorder: takes the last event.
        times_s: how long the start took, and the present time by the run's clock.

    Raises:
        GeoRayError: whatever keeps them from being written.
    """
    startup_s, now_s = times_s
    actors.dismiss_workers()
    places = places_of(run, experiment.checkpoint)
    home, folder = actors.home.region, places.model_folder(str(run.path))
    if places.far:
        folder.clear()  # of an end before this one that was not come to
    written: dict[str, tuple[PartInfo | None, str]] = collect(
        {r: primary.write_model.remote(r == home) for r, primary in actors.primaries.items()},
        _WRITE_S,
    )
    part, model_digest = written[home]
    if part is None:
        raise InvariantError(f"region '{home}' wrote no model")
    tensors, _ = read_part(folder, part)
    folder.remove([part.file])
    if actors.desk is not None:  # the model has come over it
        for (src, dst), count in actors.desk.crossed().items():
            recorder.emit("wan", now_s, src=src, dst=dst, bytes_by_class={"checkpoint": count})
    summing = Summing(experiment.train.target)
    for event in read_events(run.path / EVENTS_FILE):
        summing.feed(event)
    usd = account(run, summing.totals)
    summary = summing.summary(startup_s=startup_s, usd=usd, digest=model_digest)
    about = about_model(experiment, summary.steps, summary.eval)
    recorder.check()
    aside = keep_longer(run.model, summary.steps)
    save_trained(task, experiment.seed, tensors["params"], run.model, about, tensors.get("carried"))
    save_summary(summary, run.path)
    recorder.emit(  # last: a run that has this event is not resumed
        "run_finished",
        now_s,
        summary=summary.model_dump(),
        digests={region: value for region, (_, value) in written.items()},
    )
    return FinishedRun(summary, aside)
