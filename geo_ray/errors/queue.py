"""Errors of the live queue and of the jobs in it (exit code 15)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class QueueError(GeoRayError):
    """The queue cannot do what it was asked."""

    code = "QUEUE"
    exit_code = 15
    chapter = "Queue"
    causes = "See the codes of this chapter."
    advice = "Read the message; `geo-ray queue list QUEUE` shows how the queue stands."


class QueueMissingError(QueueError):
    """There is no queue where one was named, or nobody serves it."""

    code = "QUEUE_MISSING"
    causes = "Another directory or address than the one that the queue's `state` names, or a typo."
    advice = "Start it with `geo-ray queue start CONFIG` on the cluster, or name its folder."


class QueueJournalError(QueueError):
    """What a queue has written down cannot be understood."""

    code = "QUEUE_JOURNAL"
    causes = "It was written by a later release, or somebody changed a file of it."
    advice = "Use the release of geo_ray that wrote it, or restore the folder."


class QueueDeniedError(QueueError):
    """Who asks may not have that done."""

    code = "QUEUE_DENIED"
    causes = (
        "A token of another queue or tenant, a tenant that the queue's configuration does not "
        "have, a job of another tenant, a job moved ahead of another tenant's."
    )
    advice = "Ask with the token of the job's tenant, or have an operator of the queue do it."


class QueueRequestError(QueueError):
    """What is asked makes no sense for this queue."""

    code = "QUEUE_REQUEST"
    causes = (
        "A job that is not there or has ended, a name that is taken, a job that is larger than "
        "the cluster, a region that the queue does not have."
    )
    advice = "Correct what is named; `geo-ray queue list QUEUE` shows the jobs."


class TenantQuotaError(QueueError):
    """A tenant has as much in the queue as its configuration allows."""

    code = "TENANT_QUOTA"
    causes = "More jobs, more workers for one job, or more worth than the tenant's quota."
    advice = "Wait for a job to end, cancel one, or ask for less."


class SpeedUnknownError(QueueError):
    """How fast a job is cannot be told, so no slot can be planned for it."""

    code = "SPEED_UNKNOWN"
    causes = "No profile of the task was found, and nobody said how fast a worker is."
    advice = "Measure it with `geo-ray profile CONFIG`, or say it with --rows-per-s."


class NotWorthError(QueueError):
    """A job was turned away: what it is worth does not pay for what it takes from others."""

    code = "NOT_WORTH"
    causes = "The cluster is full of worthier jobs, or the deadline cannot be kept."
    advice = "Submit it again later, with more worth, or with a later deadline."


class JobOverranError(QueueError):
    """A job took far longer than its own numbers say."""

    code = "JOB_OVERRAN"
    causes = "It is slower than it said, or others on its machines take their time."
    advice = "Measure its speed with `geo-ray profile`, then go on with --resume."


class JobStalledError(QueueError):
    """A job had machines and took no step for too long."""

    code = "JOB_STALLED"
    causes = "Machines that do not come, a link that is down, a task that hangs."
    advice = "Look at its run with `geo-ray status RUN`, then submit it again."


class JobFailedError(QueueError):
    """A job failed again and again."""

    code = "JOB_FAILED"
    causes = "The run's own error, which the message names."
    advice = "Mend what the run's error says, then submit it again."
