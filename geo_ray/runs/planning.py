"""Plans of a configuration, as `geo-ray plan` makes them.

Also finds the step and loss profiles of plans.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from geo_ray.base.canonical import canonical_json, sha256_hex
from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    OtherModelError,
    PlanInfeasibleError,
    ProfileError,
)
from geo_ray.data.manifest import load_manifest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import LossProfile, LossSubject, MeasuredLoss, load_loss_profile
from geo_ray.planner.plan import ModelId, Plan
from geo_ray.planner.policies import check_limits, cloudless, everything, fixed, front, optimal
from geo_ray.planner.predict import Unsure, link_error, with_range
from geo_ray.planner.profile import Profile, StepModel, load_profile
from geo_ray.planner.progress import Noise
from geo_ray.planner.request import Request
from geo_ray.prices.price_book import known_book, own_files
from geo_ray.runs.build import parameter_count
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.directory import local_root
from geo_ray.runs.follow_plan import model_id
from geo_ray.runs.plan_inputs import (
    ModelSize,
    check_knows_task,
    counts_of,
    machine_notes,
    model_size,
    request_of,
    section_of,
    stale_notes,
    step_models,
    with_memory,
)
from geo_ray.transport.links import LinkTable, load_links, table_of

_NO_SIZE: Final = ModelSize(0, None)
HERE = "here"
"""Machine type of a region for which the section `plan` lists none."""


def default_profile_path(experiment: Experiment) -> Path:
    """Return the default path of a configuration's profile."""
    return local_root(experiment) / "profiles" / f"{experiment.name}.json"


def _own_then_newest(own: Path) -> list[Path]:
    others = sorted(own.parent.glob("*.json"), key=os.path.getmtime, reverse=True)
    return [path for path in [own, *(other for other in others if other != own)] if path.exists()]


def find_profile(experiment: Experiment, model: ModelId) -> Path | None:
    """Return the default profile for a plan of this model.

    It is the configuration's own, or the newest one in the directory with the same model, because
    another configuration may have measured the task.
    """
    own = default_profile_path(experiment)
    for path in _own_then_newest(own):
        if _is_profile_of(path, model):
            return path
    return None


def _is_profile_of(path: Path, model: ModelId) -> bool:
    try:
        return load_profile(path).model.differs(model) is None
    except ProfileError:
        return False


def begin_profile(experiment: Experiment, base_dir: Path, path: Path, hardware: str) -> Profile:
    """Return the profile at ``path`` if it is of this model and hardware, or a new one.

    Raises:
        ProfileError: the file is not a profile.
        TaskLoadError: the task cannot be loaded.
        ConfigError: a region has a training loop of its own.
    """
    check_knows_task(experiment)
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


def machine_types_of(experiment: Experiment, named: Sequence[str]) -> dict[str, str]:
    """Return the instance type of each region's workers.

    Args:
        experiment: the configuration; regions for which its `plan` has one type need no entry.
        named: entries ``REGION=TYPE``.

    Raises:
        ConfigError: an entry is invalid, or a region could rent several types.
    """
    found = {}
    for word in named:
        region, equals, kind = word.partition("=")
        if not equals or not kind or region not in experiment.region_names:
            raise ConfigError(
                f"--machine {word}: not REGION=TYPE with a region of the run",
                fix=f"Write REGION=TYPE; the regions are {', '.join(experiment.region_names)}.",
            )
        found[region] = kind
    offers = {} if experiment.plan is None else experiment.plan.regions
    for region in experiment.region_names:
        types = [each.type for each in offers[region].machines] if region in offers else []
        if region not in found and len(types) > 1:
            raise ConfigError(
                f"region '{region}' could rent {', '.join(types)}: the current type is ambiguous",
                fix=f"Give --machine {region}=TYPE.",
            )
        found.setdefault(region, types[0] if types else HERE)
    return found


_OF_TRAINING = ("mode", "clip_norm", "clip_mean_norm", "stragglers")


def subject_of(experiment: Experiment, base_dir: Path, model: ModelId) -> LossSubject:
    """Return the identity of the task, and the other inputs of its loss.

    Args:
        experiment: the configuration.
        base_dir: base of a relative path to its manifest.
        model: identity of its model.

    Raises:
        ManifestError: the manifest is missing or invalid.
    """
    tree = experiment.model_dump(mode="json")
    traits = experiment.strategy.traits
    strategy = {key: value for key, value in tree["strategy"].items() if key != "interval"}
    sections = {
        "strategy": strategy,
        "codec": tree["codec"],
        "optimizer": tree["optimizer"],
        "data.batch_size": tree["data"]["batch_size"],
        "regions": [[r["workers"], r["batch_sizes"]] for r in tree["regions"]],
        "train": {key: tree["train"][key] for key in _OF_TRAINING},
        "overlay": tree["overlay"],
        "transfers": tree["transfers"],
        # In rounds the order of updates is independent of the links.
        "emulate": None if traits.in_rounds else tree["emulate"],
    }
    return LossSubject(
        model=model,
        data=_data(experiment, base_dir),
        regions=experiment.region_names,
        strategy=experiment.strategy.kind,
        settings={name: sha256_hex(canonical_json(value)) for name, value in sections.items()},
    )


def _data(experiment: Experiment, base_dir: Path) -> str:
    generate = experiment.data.generate
    if generate is not None:
        return sha256_hex(canonical_json({"generate": generate.model_dump(mode="json")}))
    address = str(experiment.data.manifest)
    if "://" not in address:
        address = str(base_dir / address)
    found = load_manifest(address).model_dump(mode="json")
    return sha256_hex(canonical_json({**found, "stores": None}))  # copies of the data are equal


def default_loss_path(experiment: Experiment) -> Path:
    """Return the default path of a configuration's loss profile."""
    return local_root(experiment) / "profiles" / "loss" / f"{experiment.name}.json"


def has_loss_profiles(experiment: Experiment) -> bool:
    """Return whether there are any files to search."""
    return any(default_loss_path(experiment).parent.glob("*.json"))


def find_loss_profile(experiment: Experiment, subject: LossSubject) -> Path | None:
    """Return the default loss profile for a plan.

    It is the configuration's own, or the newest one in the directory with the same task, data,
    strategy and model.
    """
    own = default_loss_path(experiment)
    for path in _own_then_newest(own):
        if _is_loss_of(path, subject):
            return path
    return None


def loss_notes(profile: LossProfile, path: Path, subject: LossSubject, steps: float) -> list[str]:
    """Return the limitations of a measured loss.

    Args:
        profile: the loss profile.
        path: its file.
        subject: task and model of the plan.
        steps: steps of the plan.
    """
    notes = [
        f"loss as measured in {path}: {profile.steps} steps with {len(profile.seeds)} seeds, where "
        f"the job has {steps:g} steps"
    ]
    varied = profile.subject.varies(subject)
    if varied:
        notes.append(f"the loss was measured with other {', '.join(varied)}")
    return notes


def unread_loss_notes(experiment: Experiment) -> list[str]:
    """Return notes about a file in the place of the configuration's own profile."""
    own = default_loss_path(experiment)
    if not own.exists():
        return []
    try:
        load_loss_profile(own)
    except ProfileError as error:
        return [f"ignored: {error.message}"]
    return []


def plan_loss_notes(profile: LossProfile, interval: int, codec: str | None) -> list[str]:
    """Return notes about assumed parts of a plan's loss."""
    notes = beyond_loss_note(profile, interval)
    if codec not in MeasuredLoss.of(profile).codecs:
        notes.append(f"the loss of {codec} is assumed: it was not measured")
    return notes


def beyond_loss_note(profile: LossProfile, interval: int) -> list[str]:
    """Return notes about a plan's interval."""
    longest = max(point.interval for point in profile.points if point.codec is None)
    if interval <= longest:
        return []
    return [f"the loss of {interval} steps is partly assumed: the longest measured is {longest}"]


def _is_loss_of(path: Path, subject: LossSubject) -> bool:
    try:
        found = load_loss_profile(path).subject
    except ProfileError:
        return False
    return found.differs(subject) is None and found.model.differs(subject.model) is None


Policy = Literal["optimal", "cloudless", "everything", "fixed"]
_POLICIES = {"optimal": optimal, "cloudless": cloudless, "everything": everything}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A plan and its request.

    Attributes:
        plan: the plan.
        request: the planning request.
        front: the Pareto front of time and cost; empty unless requested.
    """

    plan: Plan
    request: Request
    front: Sequence[Plan] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """Inputs of a plan, in addition to the configuration.

    Attributes:
        prices: the user's price files; empty: the default ones.
        links: a measured link table; None: the emulated links, or the profile's.
        profile: a file of `geo-ray profile`; None: found automatically.
        extrapolate: allow values outside the measured range.
        loss: a file of `geo-ray profile --loss`; None: found automatically.
    """

    prices: Sequence[Path] = ()
    links: Path | None = None
    profile: Path | None = None
    extrapolate: bool = False
    loss: Path | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """Collected inputs of the planner.

    Attributes:
        request: the planning request, with the configured batch.
        model: identity of the model.
        profile: measurements, if any.
        notes: limitations of a plan.
        emulates_links: whether links are emulated rather than measured.
        loss: measured loss of intervals and codecs, if any.
        size: size of the model.
    """

    request: Request
    model: ModelId
    profile: Profile | None
    notes: tuple[str, ...]
    emulates_links: bool
    loss: LossProfile | None = None
    size: ModelSize = _NO_SIZE


def inputs_of(experiment: Experiment, base_dir: Path, sources: Sources) -> Inputs:
    """Collect the inputs of a plan; arguments and errors as for `make_plan`."""
    section = section_of(experiment)
    book = known_book(sources.prices or own_files())
    task = load_task(experiment.task, base_dir)
    size = model_size(task, experiment.seed)
    model = model_id(experiment, base_dir, size.num_params)
    path = sources.profile or find_profile(experiment, model)
    profile = None if path is None else load_profile(path)
    if profile is not None:
        profile.check_model(model)
    rows = {name: float(offer.rows) for name, offer in section.regions.items() if offer.rows}
    if not experiment.groups and any(name not in rows for name in experiment.region_names):
        with tempfile.TemporaryDirectory() as scratch:
            manifest, _ = prepare_manifest(experiment, task, base_dir, Path(scratch))
        for name in experiment.region_names:
            rows[name] = float(manifest.rows(name, "train"))
    links = _links(experiment, sources.links, profile)
    loss, loss_notes = _loss(experiment, base_dir, model, sources.loss)
    request = request_of(experiment, size, rows, book, links, profile, loss)
    notes = [
        *stale_notes(experiment, book, time.time()),
        *machine_notes(experiment, request.sites, size),
    ]
    if path is not None:
        notes.append(f"steps as measured in {path}")
    notes += loss_notes
    return Inputs(
        request,
        model,
        profile,
        tuple(notes),
        sources.links is None and bool(experiment.links()),
        loss,
        size,
    )


def make_plan(
    experiment: Experiment,
    base_dir: Path,
    policy: Policy,
    sources: Sources,
    *,
    with_front: bool = False,
) -> PlannedJob:
    """Plan the run of a configuration; nothing is rented or started.

    Args:
        experiment: the configuration.
        base_dir: base of its relative paths.
        policy: planning policy.
        sources: prices, links and measured steps.
        with_front: also compute the Pareto front.

    Raises:
        GeoRayError: a plan cannot be made.
    """
    inputs = inputs_of(experiment, base_dir, sources)
    base, profile = inputs.request, inputs.profile
    plan, request = _best(experiment, base, policy, profile)
    fits = step_models(experiment, profile)
    if not sources.extrapolate:
        _check_range(plan, fits, experiment)
    notes = inputs.notes
    if inputs.loss is not None:
        notes += tuple(plan_loss_notes(inputs.loss, plan.interval, plan.codec))
    plan = plan.model_copy(
        update={"notes": notes, "model": inputs.model, "base_steps": base.work.steps}
    )
    plan = with_memory(plan, experiment, inputs.size)
    error = max((fit.error for fit in fits.values()), default=None)
    plan = with_range(plan, Unsure(error, link_error(base.links, plan.averager)))
    return PlannedJob(plan, request, front(request) if with_front else ())


def _best(
    experiment: Experiment, base: Request, policy: Policy, profile: Profile | None
) -> tuple[Plan, Request]:
    """Return the best plan over all allowed batches.

    Raises:
        PlanInfeasibleError: no plan meets every constraint, with any batch.
    """
    section, base_rows = section_of(experiment), round(base.work.rows_per_step)
    noise = None
    if profile is not None and profile.noise is not None:
        noise = Noise(**profile.noise.model_dump())
    found: list[tuple[Plan, Request]] = []
    last_error: PlanInfeasibleError | None = None
    for rows in section.batch_sizes or (base_rows,):
        request, gain = base, 1.0
        if rows != base_rows:
            steps = section.progress.steps(base.work.steps, base_rows, rows, noise)
            gain = section.progress.gain(base_rows, rows, noise)
            request = replace(base, work=replace(base.work, steps=steps, rows_per_step=rows))
        try:
            if policy == "fixed":
                plan = fixed(request, counts_of(section))
            else:
                plan = _POLICIES[policy](request)
            if policy != "optimal":
                check_limits(plan, request.limits)
        except PlanInfeasibleError as error:  # another batch may be feasible
            last_error = error
            continue
        found.append((plan.model_copy(update={"lr_gain": gain}), request))
    if not found and last_error is not None:
        raise last_error
    is_money = section.objective == "cost"
    return min(found, key=lambda pair: pair[0].total_usd if is_money else pair[0].total_s)


def _check_range(plan: Plan, fits: Mapping[str, StepModel], experiment: Experiment) -> None:
    offers = section_of(experiment).regions
    for region in plan.regions:
        given = {m.type for m in offers[region.region].machines if m.rows_per_s is not None}
        for machines in region.machines:
            if region.region in fits and machines.type not in given:
                fits[region.region].check(machines.type, region.workers, machines.rows)


def _loss(
    experiment: Experiment, base_dir: Path, model: ModelId, named: Path | None
) -> tuple[LossProfile | None, list[str]]:
    """Return the measured loss of intervals and codecs, and notes about it.

    Raises:
        OtherModelError: the given file is of another task.
        ProfileError: the given file is not a loss profile.
        GeoRayError: the data cannot be identified without the manifest.
    """
    if len(experiment.regions) < 2 or (named is None and not has_loss_profiles(experiment)):
        return None, []
    try:
        subject = subject_of(experiment, base_dir, model)
    except GeoRayError as error:
        if named is not None:
            raise
        return None, [f"no measured loss was searched: {error.message}"]
    unread = [] if named is not None else unread_loss_notes(experiment)
    path = named or find_loss_profile(experiment, subject)
    if path is None:
        return None, unread
    found = load_loss_profile(path)
    found.check_subject(subject)
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    return found, [*unread, *loss_notes(found, path, subject, steps)]


def _links(experiment: Experiment, path: Path | None, profile: Profile | None) -> LinkTable:
    if path is not None:
        return load_links(path)
    specs = experiment.links()
    if specs or profile is None:
        return table_of(specs)
    return profile.links
