"""Is there anything to resume? Told before a cluster is started."""

from __future__ import annotations

from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.config.experiment import Experiment
from geo_ray.errors import CheckpointMissingError
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.metrics.totals import RunTotals


def check_resumable(run: RunDirectory, saved: Experiment, wanted: Experiment) -> None:
    """Refuse to resume where nothing would come of it.

    Args:
        run: the directory of the run.
        saved: the configuration that the run went by.
        wanted: the one to go on with.

    Raises:
        CheckpointMissingError: the run is finished and ``wanted`` asks for no more, or it has no
            checkpoint; says where its model is, and how to train further.
    """
    totals = _totals(run)
    has_checkpoint = bool(CheckpointStore(run.checkpoints, saved.checkpoint.keep).ids())
    if totals.started is not None and totals.started["simulated"]:
        raise CheckpointMissingError(
            f"{run.path} was simulated: the checkpoints of a simulation are not written",
            fix="Train it from the start: `geo-ray train CONFIG`.",
        )
    if totals.finished is not None and not (has_checkpoint and _asks_for_more(saved, wanted)):
        raise _finished(run, saved, totals, has_checkpoint=has_checkpoint)
    if not has_checkpoint:
        raise CheckpointMissingError(
            f"{run.path} ended before its first checkpoint",
            fix="Start again with `geo-ray train CONFIG`; checkpoint.every_s says how often a run "
            "saves.",
        )


def _finished(
    run: RunDirectory, saved: Experiment, totals: RunTotals, *, has_checkpoint: bool
) -> CheckpointMissingError:
    model = f"its model is {run.model}" if run.model.exists() else "its model is not there any more"
    further = f"--set train.steps={2 * saved.train.steps}"
    if totals.stop_cause is not None:
        further = "--set train.target=null"
    if has_checkpoint:
        fix = f"To train it further: `geo-ray train --resume RUN --allow-drift {further}`."
    else:
        fix = (
            "It took no checkpoint to go on from. For a longer run, which saves more often: "
            f"`geo-ray train CONFIG {further} --set checkpoint.every_s=10`."
        )
    return CheckpointMissingError(
        f"{run.path} is finished after {totals.steps} steps; {model}", fix=fix
    )


def _asks_for_more(saved: Experiment, wanted: Experiment) -> bool:
    return wanted.train.steps > saved.train.steps or wanted.train.target != saved.train.target


def _totals(run: RunDirectory) -> RunTotals:
    totals = RunTotals()
    path = run.path / EVENTS_FILE
    for event in read_events(path) if path.exists() else ():
        totals.feed(event)
    return totals
