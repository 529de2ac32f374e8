"""The question for a planner when only some of a run's regions take part."""

from __future__ import annotations

from collections.abc import Collection

from geo_ray.config.experiment import Experiment
from geo_ray.errors import PlanError
from geo_ray.job import rundir
from geo_ray.job.planning import Sources
from geo_ray.job.replanning import replanned, state_of
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.planning.plan import Plan
from geo_ray.planning.replan import Decision


def only_of(experiment: Experiment, members: Collection[str], home: str) -> Experiment:
    """The configuration as if there were no other regions.

    Args:
        experiment: of the run.
        members: who takes part.
        home: where the averager lives.
    """
    plan = experiment.plan
    offers = {} if plan is None else {n: o for n, o in plan.regions.items() if n in members}
    return experiment.model_copy(
        update={
            "regions": tuple(r for r in experiment.regions if r.name in members),
            "plan": None if plan is None else plan.model_copy(update={"regions": offers}),
            "averager": experiment.averager.model_copy(update={"region": home}),
        }
    )


def plan_of_members(
    run: RunDirectory, experiment: Experiment, members: Collection[str], home: str
) -> tuple[Plan, Decision]:
    """What is best for the rest of a run, for those who take part.

    Args:
        run: its directory.
        experiment: its configuration.
        members: who takes part.
        home: where the averager lives.

    Returns:
        The plan that it follows, of these regions only; what to do.

    Raises:
        PlanError: it follows none, or one without some of them.
        GeoRayError: whatever else keeps a plan from being made.
    """
    followed = rundir.followed_plan(run)
    if followed is None:
        raise PlanError("the run follows no plan", fix="Begin it with `geo-ray train --plan`.")
    regions = tuple(each for each in followed.regions if each.region in members)
    missing = set(members) - {each.region for each in regions}
    if missing:
        raise PlanError(
            f"the run's plan has nothing for {', '.join(sorted(missing))}",
            fix="Make a plan with all regions of the configuration.",
        )
    present = followed.model_copy(update={"regions": regions, "averager": home})
    events = read_events(run.path / EVENTS_FILE)
    # Who is gone has taken no step since: what is left is left to the others.
    state = state_of(e for e in events if e.kind != "step" or e["region"] in members)
    asked = only_of(experiment, members, home)
    return present, replanned(asked, run.base_dir, present, state, run.links, Sources())
