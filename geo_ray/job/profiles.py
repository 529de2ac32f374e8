"""Where profiles are kept, what they are of, and how plans find them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError, OtherModelError, ProfileError
from geo_ray.job.build import parameter_count
from geo_ray.job.model_id import model_id
from geo_ray.job.rundir import local_root
from geo_ray.planning.model_id import ModelId
from geo_ray.planning.profile import Profile, load_profile
from geo_ray.tasks.load import load_task

HERE = "here"
"""The machine type of a region that the section `plan` does not name any for."""


def default_path(experiment: Experiment) -> Path:
    """Where the profile of a configuration lies if nobody says otherwise."""
    return local_root(experiment) / "profiles" / f"{experiment.name}.json"


def find(experiment: Experiment, model: ModelId) -> Path | None:
    """The profile that a plan of this model goes by if nobody names one.

    The configuration's own, or the newest beside it that is of the same model: another
    configuration may have measured the task.
    """
    own = default_path(experiment)
    others = sorted(own.parent.glob("*.json"), key=lambda path: -path.stat().st_mtime)
    for path in [own, *(other for other in others if other != own)]:
        if path.exists() and _is_of(path, model):
            return path
    return None


def _is_of(path: Path, model: ModelId) -> bool:
    try:
        return load_profile(path).model.differs(model) is None
    except ProfileError:
        return False


def begin(experiment: Experiment, base_dir: Path, path: Path, hardware: str) -> Profile:
    """The profile to add to: the one at ``path`` if it is of this model and hardware, or a new one.

    Raises:
        ProfileError: the file there is no profile.
        TaskLoadError: the task cannot be loaded.
    """
    task = load_task(experiment.task, base_dir)
    num_params = parameter_count(task, experiment.seed)
    new = Profile(model=model_id(experiment, base_dir, num_params), hardware=hardware)
    if not path.exists():
        return new
    known = load_profile(path)
    try:
        known.check_model(new.model)
    except OtherModelError:
        return new
    return known if known.hardware == hardware else new


def machines_of(experiment: Experiment, named: Sequence[str]) -> dict[str, str]:
    """The instance type of each region's workers.

    Args:
        experiment: the configuration; a region for which its `plan` has one type needs no name.
        named: ``REGION=TYPE`` each.

    Raises:
        ConfigError: a word makes no sense, or a region could rent several types.
    """
    found = {}
    for word in named:
        region, equals, kind = word.partition("=")
        if not equals or not kind or region not in experiment.region_names:
            raise ConfigError(
                f"--machine {word}: not REGION=TYPE with a region of the run",
                fix=f"Write REGION=TYPE; regions are {', '.join(experiment.region_names)}.",
            )
        found[region] = kind
    offers = {} if experiment.plan is None else experiment.plan.regions
    for region in experiment.region_names:
        types = [each.type for each in offers[region].machines] if region in offers else []
        if region not in found and len(types) > 1:
            raise ConfigError(
                f"region '{region}' could rent {', '.join(types)}: which of them is it now?",
                fix=f"Say --machine {region}=TYPE.",
            )
        found.setdefault(region, types[0] if types else HERE)
    return found
