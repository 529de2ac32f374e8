"""Plans of a configuration: what `geo-ray plan` does, without the printing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from geo_ray.clouds.price_book import known_book, own_files
from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError, PlanInfeasibleError
from geo_ray.job.data import prepare_manifest
from geo_ray.job.loss import files as loss_files
from geo_ray.job.loss.subject import subject_of
from geo_ray.job.model_id import model_id
from geo_ray.job.plans.inputs import counts_of, request_of, stale_notes
from geo_ray.job.plans.machines import notes_of, section_of
from geo_ray.job.plans.sizes import model_size
from geo_ray.job.profiles import find
from geo_ray.planning.infeasible import check_limits
from geo_ray.planning.loss_profile import LossProfile, load_loss_profile
from geo_ray.planning.model.noise import Noise
from geo_ray.planning.model.spread import Unsure, link_error, with_range
from geo_ray.planning.model.step_model import StepModel, fit_steps
from geo_ray.planning.model_id import ModelId
from geo_ray.planning.plan import Plan
from geo_ray.planning.policies.cloudless import cloudless, everything
from geo_ray.planning.policies.fixed import fixed
from geo_ray.planning.policies.optimal import front, optimal
from geo_ray.planning.profile import Profile, load_profile
from geo_ray.planning.request import Request
from geo_ray.tasks.load import load_task
from geo_ray.transport.links.table import LinkTable, load_links, table_of

Policy = Literal["optimal", "cloudless", "everything", "fixed"]
_POLICIES = {"optimal": optimal, "cloudless": cloudless, "everything": everything}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What came of it.

    Attributes:
        plan: the one to follow.
        request: what was asked.
        front: plans that nothing beats in both time and money; empty unless asked for.
    """

    plan: Plan
    request: Request
    front: Sequence[Plan] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a plan's numbers come from, beside the configuration.

    Attributes:
        prices: the user's files of prices; the default ones if there are none.
        links: a measured link table; the emulated links, or the profile's, if None.
        profile: a file of `geo-ray profile`; if None, the one that `profiles.find` finds.
        extrapolate: go beyond what the profile has measured.
        loss: a file of `geo-ray profile --loss`; if None, the one that `loss.files.find` finds.
    """

    prices: Sequence[Path] = ()
    links: Path | None = None
    profile: Path | None = None
    extrapolate: bool = False
    loss: Path | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What planning goes by.

    Attributes:
        request: the question, with the configured batch.
        model: what it is for.
        profile: what was measured, if anything.
        notes: what to know before believing a plan.
        emulates_links: whether links are the configuration's own, and not measured.
        loss: what intervals and codecs cost as measured, if anything.
    """

    request: Request
    model: ModelId
    profile: Profile | None
    notes: tuple[str, ...]
    emulates_links: bool
    loss: LossProfile | None = None


def inputs_of(experiment: Experiment, base_dir: Path, sources: Sources) -> Inputs:
    """Bring together what a plan needs; arguments and errors as for `make_plan`."""
    section = section_of(experiment)
    book = known_book(sources.prices or own_files())
    task = load_task(experiment.task, base_dir)
    size = model_size(task, experiment.seed)
    model = model_id(experiment, base_dir, size.num_params)
    path = sources.profile or find(experiment, model)
    profile = None if path is None else load_profile(path)
    if profile is not None:
        profile.check_model(model)
    rows = {name: float(offer.rows) for name, offer in section.regions.items() if offer.rows}
    if any(name not in rows for name in experiment.region_names):
        with tempfile.TemporaryDirectory() as scratch:
            manifest, _ = prepare_manifest(experiment, task, base_dir, Path(scratch))
        for name in experiment.region_names:
            rows[name] = float(manifest.rows(name, "train"))
    links = _links(experiment, sources.links, profile)
    loss, loss_notes = _loss(experiment, base_dir, model, sources.loss)
    request = request_of(experiment, size, rows, book, links, profile, loss)
    notes = [
        *stale_notes(experiment, book, time.time()),
        *notes_of(experiment, request.sites, size),
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
        base_dir: where relative paths in it start.
        policy: who decides.
        sources: of prices, links and measured steps.
        with_front: make the front, too.

    Raises:
        GeoRayError: whatever keeps a plan from being made.
    """
    inputs = inputs_of(experiment, base_dir, sources)
    base, profile = inputs.request, inputs.profile
    plan, request = _best(experiment, base, policy, profile)
    fits = {}
    if profile is not None:
        fits = {name: fit_steps(name, profile.steps) for name in experiment.region_names}
    if not sources.extrapolate:
        _check_range(plan, fits, experiment)
    notes = inputs.notes
    if inputs.loss is not None:
        notes += tuple(loss_files.plan_notes(inputs.loss, plan.interval, plan.codec))
    plan = plan.model_copy(
        update={"notes": notes, "model": inputs.model, "base_steps": base.work.steps}
    )
    error = max((fit.error for fit in fits.values()), default=None)
    plan = with_range(plan, Unsure(error, link_error(base.links, plan.averager)))
    return PlannedJob(plan, request, front(request) if with_front else ())


def _best(
    experiment: Experiment, base: Request, policy: Policy, profile: Profile | None
) -> tuple[Plan, Request]:
    """The best plan over all batches that are allowed.

    Raises:
        PlanInfeasibleError: no plan keeps every constraint, whatever the batch.
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
        except PlanInfeasibleError as error:  # another batch may do
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
    """What intervals and codecs cost as measured, and what to know of it.

    Raises:
        OtherModelError: the file that is named is of another task.
        ProfileError: it is none.
        GeoRayError: whose data these are cannot be told, for want of the manifest.
    """
    if len(experiment.regions) < 2 or (named is None and not loss_files.are_any(experiment)):
        return None, []
    try:
        subject = subject_of(experiment, base_dir, model)
    except GeoRayError as error:
        if named is not None:
            raise
        return None, [f"no measured loss was looked for: {error.message}"]
    unread = [] if named is not None else loss_files.unread_notes(experiment)
    path = named or loss_files.find(experiment, subject)
    if path is None:
        return None, unread
    found = load_loss_profile(path)
    found.check_subject(subject)
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    return found, [*unread, *loss_files.notes_of(found, path, subject, steps)]


def _links(experiment: Experiment, path: Path | None, profile: Profile | None) -> LinkTable:
    if path is not None:
        return load_links(path)
    specs = experiment.links()
    if specs or profile is None:
        return table_of(specs)
    return profile.links
