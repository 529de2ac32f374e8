"""`schedule`: replays a job trace on a shared cluster under several policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from geo_ray.api.config import FilePath
from geo_ray.base.errors import ScheduleInputError
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import number_text
from geo_ray.prices.price_book import known_book, own_files
from geo_ray.scheduler.bound import OraclePolicy, utility_bound
from geo_ray.scheduler.policies.registry import policy_named
from geo_ray.scheduler.replay import (
    HEADINGS,
    ScheduleOutcome,
    cells,
    check_jobs,
    outcome_of,
    replay_jobs,
    write_schedule_page,
)
from geo_ray.scheduler.schedule import ClusterSchedule, check_schedule
from geo_ray.scheduler.traces import cluster_jobs, read_trace
from geo_ray.scheduler.workload import LoadShape, book_offers, generated_cluster, generated_jobs


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleResult:
    """Results of each policy.

    Attributes:
        schedules: schedule by policy.
        bound: upper bound of the utility; None: not requested.
        oracle: a schedule that knows all jobs in advance; None: not requested.
        title: description of the replayed jobs.
    """

    schedules: Mapping[str, ClusterSchedule]
    bound: float | None
    oracle: ClusterSchedule | None
    title: str

    @property
    def outcomes(self) -> dict[str, ScheduleOutcome]:
        """Return a row per policy."""
        return {name: outcome_of(each) for name, each in self.schedules.items()}

    def __repr__(self) -> str:
        found = "; ".join(
            f"{name} {number_text(outcome.utility)}" for name, outcome in self.outcomes.items()
        )
        return f"<Schedule of {self.title}, utility: {found}>"

    def _repr_html_(self) -> str:
        rows = [cells(name, outcome) for name, outcome in self.outcomes.items()]
        return html_view(f"Schedule of {self.title}", HEADINGS, rows)

    def save(self, path: FilePath) -> Path:
        """Write a page of the schedules.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        return write_schedule_page(self.title, self.schedules, self.bound, Path(path))


def schedule(
    policies: Sequence[str],
    *,
    shape: LoadShape | None = None,
    trace: FilePath | None = None,
    trace_format: str = "philly",
    machine: str | None = None,
    at: Sequence[str] = (),
    seed: int = 0,
    bound: bool = False,
) -> ScheduleResult:
    """Replay jobs on a generated cluster, once under each policy; every schedule is checked.

    Args:
        policies: names of the policies.
        shape: size of the cluster and of generated jobs; for a trace, the first ``jobs`` of it.
        trace: a job trace; None: generated jobs.
        trace_format: format of the trace.
        machine: cloud and type, such as ``aws:p4d.24xlarge``, for prices of your price files and
            of this release; None: generated machines and prices.
        at: with ``machine``, regions of its cloud, in place of the shape's.
        seed: random seed.
        bound: also compute the upper bound, and a schedule that knows all jobs in advance.

    Raises:
        TraceError: the trace cannot be read.
        ScheduleInputError: jobs and cluster do not fit, or a policy is unknown.
        PriceUnknownError: a price of ``machine`` is unknown.
    """
    shape = shape or LoadShape()
    if not policies:
        raise ScheduleInputError("no policy given", fix="Give at least one.")
    offers = None
    if machine is not None:
        offers = book_offers(known_book(own_files()), machine, at)
        shape = replace(shape, regions=len(at))
    chosen = {name: policy_named(name) for name in dict.fromkeys(policies)}
    if trace is None:
        cluster, title = generated_cluster(shape, seed, offers), f"{shape.jobs} generated jobs"
        jobs = generated_jobs(shape, seed)
    else:
        traced = read_trace(Path(trace), trace_format)[: shape.jobs]
        span_s = traced[-1].submit_s - traced[0].submit_s
        rest_s = 4 * max(job.duration_s for job in traced)
        shape = replace(shape, slots=max(shape.slots, round((span_s + rest_s) / shape.slot_s) + 1))
        cluster, title = (
            generated_cluster(shape, seed, offers),
            f"{len(traced)} jobs of {Path(trace).name}",
        )
        jobs = cluster_jobs(traced, cluster, seed)
    check_jobs(cluster, jobs)
    schedules = {}
    for name, policy in chosen.items():
        schedules[name] = replay_jobs(cluster, jobs, policy, seed=seed)
        check_schedule(schedules[name])
    title = f"{title} on {shape.machines} machines"
    if not bound:
        return ScheduleResult(schedules, None, None, title)
    most = utility_bound(cluster, jobs)
    ahead = replay_jobs(cluster, jobs, OraclePolicy(jobs, most), seed=seed)
    check_schedule(ahead)
    return ScheduleResult(schedules, most.utility, ahead, title)
