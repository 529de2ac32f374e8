"""Where measured losses are kept, and how plans find them."""

from __future__ import annotations

from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import ProfileError
from geo_ray.job.rundir import local_root
from geo_ray.planning.loss_profile import LossProfile, LossSubject, load_loss_profile
from geo_ray.planning.loss_table import MeasuredLoss


def default_path(experiment: Experiment) -> Path:
    """Where the measured loss of a configuration lies if nobody says otherwise."""
    return local_root(experiment) / "profiles" / "loss" / f"{experiment.name}.json"


def are_any(experiment: Experiment) -> bool:
    """Whether there is anything to look through."""
    return any(default_path(experiment).parent.glob("*.json"))


def find(experiment: Experiment, subject: LossSubject) -> Path | None:
    """The measurement that a plan goes by if nobody names one.

    The configuration's own, or the newest beside it, of the same task, data, strategy and model.
    """
    own = default_path(experiment)
    others = sorted(own.parent.glob("*.json"), key=lambda path: -path.stat().st_mtime)
    for path in [own, *(other for other in others if other != own)]:
        if path.exists() and _is_of(path, subject):
            return path
    return None


def notes_of(profile: LossProfile, path: Path, subject: LossSubject, steps: float) -> list[str]:
    """What to know before believing a measured loss.

    Args:
        profile: the measurement.
        path: its file.
        subject: of the plan.
        steps: of the plan.
    """
    notes = [
        f"loss as measured in {path}: {profile.steps} steps with {len(profile.seeds)} seeds, where "
        f"the job has {steps:g} steps"
    ]
    varied = profile.subject.varies(subject)
    if varied:
        notes.append(f"the loss was measured with other {', '.join(varied)}")
    return notes


def unread_notes(experiment: Experiment) -> list[str]:
    """What to know of a measurement that lies where the configuration's own does."""
    own = default_path(experiment)
    if not own.exists():
        return []
    try:
        load_loss_profile(own)
    except ProfileError as error:
        return [f"passed over: {error.message}"]
    return []


def plan_notes(profile: LossProfile, interval: int, codec: str | None) -> list[str]:
    """What of a plan's loss is not measured."""
    notes = beyond_note(profile, interval)
    if codec not in MeasuredLoss.of(profile).codecs:
        notes.append(f"the loss of {codec} is assumed: it was not measured")
    return notes


def beyond_note(profile: LossProfile, interval: int) -> list[str]:
    """What to know of a plan's interval."""
    longest = max(point.interval for point in profile.points if point.codec is None)
    if interval <= longest:
        return []
    return [f"the loss of {interval} steps is partly assumed: the longest measured is {longest}"]


def _is_of(path: Path, subject: LossSubject) -> bool:
    try:
        found = load_loss_profile(path).subject
    except ProfileError:
        return False
    return found.differs(subject) is None and found.model.differs(subject.model) is None
