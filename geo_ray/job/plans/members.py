"""The question for a planner when only some of a run's regions take part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from geo_ray.config.experiment import Experiment
from geo_ray.errors import PlanError
from geo_ray.job import rundir
from geo_ray.job.build import wire_plan
from geo_ray.job.planning import Sources
from geo_ray.job.replanning import PlanChange, changed_as_it_goes, replanned, state_of
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


@dataclass(frozen=True, slots=True)
class MembersPlan:
    """What is best for the rest of a run, for those who take part.

    Attributes:
        present: the plan that it follows, of these regions only.
        decision: what to do, if machines and averager could change as well.
        as_it_goes: whether to change the interval and the averager's region alone, which a run can
            do as it goes; None: it can do neither.
    """

    present: Plan
    decision: Decision
    as_it_goes: Decision | None


def free_of(experiment: Experiment, standby: str | None) -> PlanChange:
    """What may change of a run as it goes.

    Args:
        experiment: its configuration.
        standby: the region that stands by for the averager; None: nobody does.
    """
    may_move = experiment.members.follow_plan and experiment.averager.max_divergence == 0
    averagers = () if standby is None or not may_move else (standby,)
    return PlanChange(can_follow(experiment), averagers)


def can_follow(experiment: Experiment) -> bool:
    """Whether a run's interval may change as it goes.

    Not where regions evaluate the same parameters at steps that it decides about; nor where a round
    is told before that it is the last one, by the rows of the round before, to pay what codecs owe.
    """
    follows = experiment.members.follow_plan and experiment.train.keep_best is None
    is_told = experiment.counts_together and wire_plan(experiment).owes
    return follows and not is_told and experiment.strategy.traits.exchange.paced


def plan_of_members(
    run: RunDirectory,
    experiment: Experiment,
    members: Collection[str],
    home: str,
    interval: int | None = None,
    standby: str | None = None,
) -> MembersPlan:
    """What is best for the rest of a run, for those who take part.

    Args:
        run: its directory.
        experiment: its configuration.
        members: who takes part.
        home: where the averager lives.
        interval: that the run has by now; None: that of its plan.
        standby: the region that stands by for the averager; None: nobody does.

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
    now = {"averager": home, "interval": interval or followed.interval}
    present = followed.model_copy(update={"regions": regions} | now)
    events = read_events(run.path / EVENTS_FILE)
    # Who is gone has taken no step since: what is left is left to the others.
    state = state_of(e for e in events if e.kind != "step" or e["region"] in members)
    asked = only_of(experiment, members, home)
    question = (asked, run.base_dir, present, state, run.links, Sources())
    free = free_of(experiment, standby if standby in members else None)
    as_it_goes = changed_as_it_goes(*question, free) if free else None
    return MembersPlan(present, replanned(*question), as_it_goes)
