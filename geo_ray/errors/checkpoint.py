"""Errors of checkpoints (exit code 7)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class CheckpointError(GeoRayError):
    """Something is wrong with checkpoints."""

    code = "CHECKPOINT"
    exit_code = 7
    chapter = "Checkpoint"
    causes = "A save that broke the store's rules, such as a part with a name that is not allowed."
    advice = "Save as docs/checkpoints.md describes: it has the files and the rules."


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are not what their manifest says, and no whole one is left.

    Training is never started anew by accident.
    """

    code = "CHECKPOINT_CORRUPT"
    causes = (
        "A damaged disk, files that were edited, copied in part or deleted. A machine or process "
        "that died during a save does *not* cause this: an unfinished save is invisible."
    )
    advice = (
        "Resume again: `--resume` passes over a damaged checkpoint and takes the newest whole one."
    )
    more = (
        "The resume logs what was wrong with newer ones. If none is whole, restore the "
        "`checkpoints/` directory from a backup, or start anew."
    )


class CheckpointConflictError(CheckpointError):
    """Another writer saves the checkpoints of this run, and came first.

    What it has saved stays as it is; of two writers of one checkpoint at most one succeeds.
    """

    code = "CHECKPOINT_CONFLICT"
    causes = (
        "The run was resumed elsewhere while this one was still going, or was cut off from whoever "
        "resumed it; two runs of one name with the same `checkpoint.store`."
    )
    advice = "Find the other run and let one of the two end; then resume the one that is left."
    more = "Runs that have nothing to do with each other need other names or another prefix."


class CheckpointMissingError(CheckpointError):
    """There is nothing to take up: no checkpoint, or not the one that was named."""

    code = "CHECKPOINT_MISSING"
    causes = (
        "The wrong run directory, the number of a checkpoint that is not there or was removed to "
        "make room, a run that ended before its first checkpoint, a run that was simulated."
    )
    advice = "Start without --resume, or name the right run directory."
    more = "A run that has taken all its steps is told of as `RUN_FINISHED`."


class ConfigDriftError(CheckpointError):
    """The configuration differs from the one that the checkpoint was made with."""

    code = "CONFIG_DRIFT"
    causes = (
        "An edited CONFIG, a release with other defaults, or a task, strategy or codec of your own "
        "whose file has changed. The message lists each difference. Other codecs, regions "
        "or numbers of parameter server shards than the checkpoint's are refused even if the "
        "difference is allowed: what is owed under one codec means nothing to another, and a "
        "checkpoint is not cut anew."
    )
    advice = (
        "Leave CONFIG out to go on as the run was, or name each change that is meant with "
        "--allow-change KEY."
    )
    more = (
        "What the run goes by is in its `config.lock.yaml`; a difference that was allowed is "
        "written there. For other codecs, regions or shards begin a new run."
    )
