"""Errors that end a run early (exit code 8)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class RunError(GeoRayError):
    """A run ended early."""

    code = "RUN"
    exit_code = 8
    chapter = "Run"
    causes = "See the codes of this chapter."


class RunDirectoryError(RunError):
    """A run directory, or a file in it, cannot be written or read.

    Files that were being written have been removed; the last good checkpoint is untouched.
    """

    code = "RUN_DIRECTORY"
    causes = (
        "A full disk, a quota, a read-only file system, missing permissions, a file that is in the "
        "way, a directory that is no run."
    )
    advice = "Free space or choose another `run.dir`."


class RunFinishedError(RunError):
    """The run that is to go on has taken all its steps, or met its target."""

    code = "RUN_FINISHED"
    causes = (
        "`--resume` of a run that is finished, with nothing that asks for more of it; a change of "
        "members that was asked of it."
    )
    advice = "Take its model, or train it further with more steps."
    more = (
        "The message says where its model is, and the command that trains it further. A script "
        "that resumes a run until it is finished may take this code for success."
    )


class RegionLostError(RunError):
    """A region's parameter server or bridge died, and the run cannot go on without it."""

    code = "REGION_LOST"
    causes = "A machine that was reclaimed or crashed, memory that ran out."
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = "The region needs machines again before that."


class WorkerLostError(RunError):
    """Workers died more often than `train.max_worker_restarts` allows."""

    code = "WORKER_LOST"
    causes = (
        "Memory that runs out is the usual one; a crash in the task's code or in a native library "
        "is another."
    )
    advice = (
        "Read the worker's log for the cause; if memory ran out, use a smaller `data.batch_size` "
        "or fewer workers."
    )
    more = (
        "The logs of a local cluster are kept in the run's `logs` folder. With `train.elastic` a "
        "region goes on with the workers that are left."
    )


class AveragerFailedError(RunError):
    """The averager met an error that it cannot go on after; every region is told at once."""

    code = "AVERAGER_FAILED"
    causes = (
        "A strategy that raised while it combined updates; a message between regions that could "
        "not be handled."
    )
    advice = (
        "Read the traceback in the log of the named region's bridge; what was committed before is "
        "in the last checkpoint."
    )
    more = (
        "The message names the exception and its line. Errors of a class of your own have a code "
        "of their own, `OWN_CODE`."
    )


class StalledError(RunError):
    """Every region waits for the averager, and the averager for none that makes progress."""

    code = "STALLED"
    causes = "A strategy that leaves a region without an answer that it was to give."
    advice = (
        "Check when the strategy answers: each update needs an answer, at once or in the answers "
        "to a later one."
    )
    more = (
        "No length of time leads to this: a slow step, a slow link or a long round is waited for. "
        "What is needed is that no worker computes and no answer is on its way."
    )


class RunHeldError(RunError):
    """Another process drives the run: it holds the run's lease and renews it."""

    code = "RUN_HELD"
    causes = (
        "A second `geo-ray train --resume RUN` of a run that is going on, in another terminal, on "
        "another machine, or by a job server that started it again too early."
    )
    advice = "Stop the other one first, or wait until it has ended."
    more = (
        "Nothing was written to the run. A process that is killed gives its lease up at once if "
        "the next one starts on its machine, and after 12.5 s without a renewal anywhere else."
    )


class DriverMissingError(RunError):
    """A change of members was asked of a run that nobody drives."""

    code = "DRIVER_MISSING"
    causes = "The run was stopped, has failed, or was cut off: whoever drove it is gone."
    advice = "Go on with it first: `geo-ray train --resume RUN`."
    more = "Nothing was asked, so a resume does not do it later."


class MembersRefusedError(RunError):
    """Whoever drives the run refuses a change of its members; the run goes on as before."""

    code = "MEMBERS_REFUSED"
    causes = (
        "A region that takes part already, or does not; one that hosts the averager where nobody "
        "stands by for it; fewer regions than `members.min` would be left; a run that is about to "
        "end; overlays, transfers or `dgt`, whose regions must all be there."
    )
    advice = "See who takes part with `geo-ray members RUN`."
    more = "The message has the reason; docs/membership.md has the rules."


class LeaseLostError(RunError):
    """Another process has taken the run over, so this one writes nothing to it any more."""

    code = "LEASE_LOST"
    causes = (
        "A process that stood still for longer than its lease lives (a suspended machine, a "
        "stopped process, a file system that hung) while somebody resumed the run elsewhere."
    )
    advice = "Nothing is to be done: the run goes on where the message says."
    more = "Events and checkpoints since the takeover are those of the other process alone."


class DriverLostError(RunError):
    """The process that drove the run on the cluster is gone."""

    code = "DRIVER_LOST"
    causes = "Memory that ran out on the node where the run was started, or that node went down."
    advice = "Resume with `geo-ray train --resume RUN`; nothing committed is lost."
    more = (
        "The run's processes train on for `run.driverless_s`, and who resumes in that time goes on "
        "with them."
    )


class HeadLostError(RunError):
    """The head of the Ray cluster does not answer any more."""

    code = "HEAD_LOST"
    causes = "The head's machine went down, or its processes were killed and not started again."
    advice = "Start the cluster again, then `geo-ray train --resume RUN`."
    more = (
        "Training goes on without the head for a while. Ray ends every process of a node that has "
        "not reached the head for `RAY_gcs_rpc_server_reconnect_timeout_s`, 60 s unless it is set; "
        "after half of that the run is saved and ended. A head with its state on disk that is "
        "back by then is no trouble at all."
    )


class InterruptedRunError(RunError):
    """The user or the job server stopped the run."""

    code = "INTERRUPTED"
    exit_code = 130
    causes = "Ctrl-C, a termination signal, `ray job stop`."
    advice = "Resume with `geo-ray train --resume RUN`."
    more = (
        "Nothing is broken, so the terminal shows `stopped:` and the message instead of `error` "
        "and the code."
    )
