"""From a configuration, prices and links to the question that a planning policy answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from geo_ray.clouds.price import INTERNET, PriceRecord
from geo_ray.clouds.price_book import PriceBook
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError, PriceBookError
from geo_ray.job.build import last_errors
from geo_ray.job.plans.machines import section_of, site_of
from geo_ray.job.plans.sizes import ModelSize
from geo_ray.observe.text import age_text
from geo_ray.planning.config import PlanConfig
from geo_ray.planning.loss_profile import LossProfile
from geo_ray.planning.loss_table import AssumedLoss, MeasuredLoss
from geo_ray.planning.model.start_model import StartModel, fit_start
from geo_ray.planning.model.step_model import fit_steps
from geo_ray.planning.model.timing import Pattern
from geo_ray.planning.model.work import HOUR_S, JobWork
from geo_ray.planning.policies.fixed import Counts
from geo_ray.planning.profile import Profile
from geo_ray.planning.request import Request
from geo_ray.planning.residency import allowed_averagers
from geo_ray.planning.search.ways import Limits
from geo_ray.planning.tradeoffs import BITS_PER_PARAM
from geo_ray.transport.links.table import LinkTable

_INTERVALS: Final = tuple(2**n for n in range(10))


def request_of(
    experiment: Experiment,
    size: ModelSize,
    rows: Mapping[str, float],
    book: PriceBook,
    links: LinkTable,
    profile: Profile | None = None,
    loss: LossProfile | None = None,
) -> Request:
    """The question.

    Args:
        experiment: the run; has a section `plan`.
        size: of its model.
        rows: of training data by region.
        book: prices.
        links: of every pair of regions.
        profile: what was measured; the configuration's own numbers count more.
        loss: what intervals and codecs cost as measured; else as assumed.

    Raises:
        ConfigError: there is no section `plan`, or it lacks a region or a machine's speed, or the
            strategy cannot be planned.
        ProfileError: the profile has no steps of a region.
        PriceUnknownError: something has no price.
        CurrencyError: a price's currency has no rate.
        PlanInfeasibleError: residency rules contradict each other.
    """
    plan = section_of(experiment)
    check_strategy(experiment)
    names = list(experiment.region_names)
    start = _start(plan, profile)
    intervals = _intervals(experiment, plan)
    work = JobWork(
        steps=experiment.train.steps * max(1, experiment.worker_steps),
        rows_per_step=sum(r.rows_per_step(experiment.data.batch_size) for r in experiment.regions),
        rows={name: plan.regions[name].rows or rows[name] for name in names},
        num_params=size.num_params,
        pattern=_pattern(experiment, intervals),
        startup_s=start.fixed_s,
        worker_start_s=start.worker_s,
        evaluations_s=evaluations_s(experiment, profile),
    )
    measured = {} if profile is None else {name: fit_steps(name, profile.steps) for name in names}
    hosts = allowed_averagers(plan.residency, names)
    preferred = experiment.averager_region
    return Request(
        work=work,
        sites=[site_of(name, experiment, book, measured.get(name), size) for name in names],
        links=links,
        usd_per_gb=_egress(plan, names, book),
        averagers=sorted(hosts, key=lambda name: name != preferred),
        intervals=intervals,
        codecs=codecs_of(experiment, plan.codecs),
        loss=AssumedLoss() if loss is None else MeasuredLoss.of(loss),
        loss_budget=plan.loss_budget,
        objective=plan.objective,
        limits=Limits(
            math.inf if plan.deadline_h is None else plan.deadline_h * HOUR_S,
            math.inf if plan.budget_usd is None else plan.budget_usd,
        ),
        overhead_s={} if profile is None else {p.codec: p.overhead_s for p in profile.exchanges},
        last_errors=last_errors(experiment),
        first_in_full=experiment.strategy.traits.sends == "model",
    )


def stale_notes(experiment: Experiment, book: PriceBook, now_unix_s: float) -> list[str]:
    """What is to be said of prices that are older than they are to be believed."""
    plan = section_of(experiment)
    used = {record.key: record for record in _records(plan, book)}.values()
    old = [record for record in used if record.is_stale(now_unix_s)]
    if not old:
        return []
    oldest = age_text(max(record.age_s(now_unix_s) for record in old))
    return [f"{len(old)} prices are stale, the oldest of {oldest} ago: `geo-ray prices refresh`"]


def _records(plan: PlanConfig, book: PriceBook) -> Iterator[PriceRecord]:
    """Every price that a plan may use: machines, servers, disks, traffic."""
    for name, region in plan.regions.items():
        for machine in region.machines:
            for market in machine.markets:
                yield book.instance(region.cloud, region.at, machine.type, market)
        if region.server is not None:
            yield book.instance(region.cloud, region.at, region.server)
        if region.disk is not None:
            yield book.disk(region.cloud, region.at, region.disk)
        for other, there in plan.regions.items():
            if other != name:
                to = there.at if region.cloud == there.cloud else INTERNET
                yield book.egress(region.cloud, region.at, to)


def check_strategy(experiment: Experiment) -> None:
    """Refuse strategies that the model of `JobWork` is wrong for.

    Raises:
        ConfigError: regions take unequal numbers of steps until all have seen enough rows.
    """
    if len(experiment.regions) > 1 and experiment.strategy.traits.region.ends_together:
        raise ConfigError(
            f"strategy {experiment.strategy.kind} cannot be planned: its regions take unequal "
            "numbers of steps, and a plan's model gives all of them the same",
            fix="Predict it with `geo-ray simulate`, or plan with another strategy.",
        )


def counts_of(plan: PlanConfig) -> Counts:
    """The machines that policy `fixed` is about."""
    return {
        name: {(m.type, m.markets[0]): m.count for m in region.machines if m.count}
        for name, region in plan.regions.items()
    }


def _start(plan: PlanConfig, profile: Profile | None) -> StartModel:
    if plan.startup_s is not None:
        return StartModel(plan.startup_s)
    if profile is None or not profile.starts:
        raise ConfigError(
            "plan.startup_s: null stands for what a profile has measured, and there is none",
            fix="Give the seconds from renting to the first step, or run `geo-ray profile`.",
        )
    return fit_start(profile.starts)


def evaluations_s(experiment: Experiment, profile: Profile | None, done: int = 0) -> float:
    """Seconds of all evaluations that are to come; the last one is after the last step.

    Args:
        experiment: the run.
        profile: what was measured.
        done: steps that a region has taken.
    """
    every, last = experiment.train.eval_every, experiment.train.steps - 1
    if profile is None:
        return 0.0
    between = last // every - min(done, last) // every if every else 0
    return (between + 1) * profile.evaluation_s


def _egress(
    plan: PlanConfig, names: Sequence[str], book: PriceBook
) -> dict[tuple[str, str], float]:
    found = {}
    for src in names:
        for dst in names:
            here, there = plan.regions[src], plan.regions[dst]
            if src == dst:
                continue
            if (here.cloud, here.at) == (there.cloud, there.at):
                raise PriceBookError(
                    f"plan.regions: '{src}' and '{dst}' are both in {here.cloud} {here.at}, and "
                    "traffic inside a region has no price here",
                    fix="Give each region of the run a region of its own, or join the two.",
                )
            to = there.at if here.cloud == there.cloud else INTERNET
            # Of the first tier: the account's month is not the job's to know.
            found[src, dst] = book.usd_of_volume(book.egress(here.cloud, here.at, to), 1.0)
    return found


def _intervals(experiment: Experiment, plan: PlanConfig) -> list[int]:
    """In local steps; the option counts those of a region, each of which may be several."""
    exchange, local = experiment.strategy.traits.exchange, max(1, experiment.worker_steps)
    present = exchange.interval
    if present is None:
        return [max(1, round(exchange.every * local))]
    choices = [present, *_INTERVALS] if plan.intervals is None else plan.intervals
    return [each * local for each in dict.fromkeys(choices)]


def _pattern(experiment: Experiment, intervals: Sequence[int]) -> Pattern:
    """How the strategy exchanges, as it says itself for each interval; in local steps."""
    strategy, local = experiment.strategy, max(1, experiment.worker_steps)
    present = strategy.traits
    every, hidden = {}, {}
    own = present.exchange.interval  # a run may go on with it, whatever a new plan could choose
    for interval in [*intervals, *([] if own is None else [own * local])]:
        exchange = present.exchange
        if exchange.interval is not None and isinstance(strategy, BaseModel):
            changed = {"interval": max(1, interval // local)}
            exchange = strategy.model_copy(update=changed).traits.exchange
        every[interval] = exchange.every * local
        if exchange.hidden_steps is not None:
            hidden[interval] = min(exchange.hidden_steps, exchange.every) * local
    return Pattern(
        present.exchange.stands_still,
        present.exchange.last,
        present.exchange.fragments,
        present.averager.bound,
        present.exchange.by_speed,
        present.in_rounds or present.averager.bound is not None,
        local,
        every,
        hidden,
    )


def codecs_of(experiment: Experiment, named: Sequence[str | None] | None) -> list[str | None]:
    """The codecs that a plan chooses among.

    Args:
        experiment: the run.
        named: by the user; None: the configured one and the usual.

    Raises:
        ConfigError: nobody knows how small one of them makes an update.
    """
    if named is not None:
        unknown = [codec for codec in named if codec not in BITS_PER_PARAM]
        if unknown:
            known = ", ".join(str(codec) for codec in BITS_PER_PARAM)
            raise ConfigError(
                f"plan.codecs: it is not known how small {unknown[0]} makes an update",
                fix=f"Choose among {known}.",
            )
        return list(named)
    up = experiment.codec.up
    present = None if up is None else up.kind
    if present not in BITS_PER_PARAM:
        known = ", ".join(str(codec or "null") for codec in BITS_PER_PARAM)
        raise ConfigError(
            f"codec {present} cannot be planned: nobody knows how small it makes an update and "
            "what it costs in loss",
            fix=f"Name plan.codecs, to choose among {known}; or ask `geo-ray simulate`.",
        )
    return list(dict.fromkeys([present, *BITS_PER_PARAM]))
