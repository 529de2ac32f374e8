"""Errors of shared clusters, their jobs and traces (exit code 14)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class SchedulingError(GeoRayError):
    """Jobs cannot be scheduled on a shared cluster."""

    code = "SCHEDULING"
    exit_code = 14
    chapter = "Scheduling"
    causes = "See the codes of this chapter."
    advice = "Correct what is named; docs/scheduling.md describes jobs, clusters and policies."


class ScheduleInputError(SchedulingError):
    """A cluster or a job of it contradicts itself, or they do not fit each other."""

    code = "SCHEDULE_INPUT"
    causes = (
        "A job that is larger than the cluster, data in a region that has no site, negative times, "
        "two jobs of one name, a link without goodput."
    )
    advice = "Correct what is named, or give the cluster more with --machines or --regions."


class TraceError(SchedulingError):
    """A trace of jobs cannot be read."""

    code = "TRACE_INVALID"
    causes = (
        "A file of another format than --format says, columns that are missing, times that are "
        "negative or no numbers, an empty file."
    )
    advice = (
        "Correct the file where it says, or name its format with --format (by default philly); "
        "docs/scheduling.md lists the columns of each."
    )
