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


class CheckpointMissingError(CheckpointError):
    """There is nothing to resume: the run has no checkpoint, or it is finished."""

    code = "CHECKPOINT_MISSING"
    causes = (
        "The wrong run directory, a run that ended before its first checkpoint, a run that has "
        "taken all its steps, a run that was simulated."
    )
    advice = "Start without --resume, or name the right run directory."
    more = "For a finished run the message says where its model is and how to train it further."


class ConfigDriftError(CheckpointError):
    """The configuration differs from the one that the checkpoint was made with."""

    code = "CONFIG_DRIFT"
    causes = (
        "An edited file, another `--set`, or a release with other defaults. The message lists each "
        "difference. Other codecs than the checkpoint's are refused even if the difference is "
        "allowed: what is owed under one codec means nothing to another."
    )
    advice = (
        "Leave CONFIG and --set out to go on as the run was, or add --allow-drift if the "
        "difference is meant."
    )
    more = (
        "What the run goes by is in its `config.lock.yaml`; a difference that was allowed is "
        "written there. For other codecs begin a new run."
    )
