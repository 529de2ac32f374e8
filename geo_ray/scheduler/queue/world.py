"""The Ray cluster of a queue: nodes, runs and the autoscaler; implements `QueueWorld`.

Each run directory is accessed on a separate thread, since a job may write anything there; the queue
waits at most `LOOK_S` for it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray

from geo_ray.base.errors import (
    ClusterError,
    GeoRayError,
    QueueRequestError,
    RunDirectoryError,
    RunFinishedError,
)
from geo_ray.base.threads import BoundedCalls
from geo_ray.cloud.autoscaler.actor import find_autoscaler
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.detached import NAMESPACE
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.runs import requests
from geo_ray.runs.remote import pass_on, view_copy
from geo_ray.runs.requests import MemberRequest, Verb, request_member_change
from geo_ray.runs.status import Beside, StatusReader
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_config import run_of, run_tree
from geo_ray.scheduler.queue.job_server import JobCode, QueueJobServer, SubmissionReport
from geo_ray.scheduler.queue.job_spec import JobSpec
from geo_ray.scheduler.queue.loop import (
    Action,
    AskMachines,
    AskStop,
    ChangeMember,
    EndSubmission,
    Submit,
    is_submission_of,
    submission_name,
)
from geo_ray.scheduler.queue.model import ObservedSubmission, QueueObservation, RunEnd
from geo_ray.scheduler.queue.state import QueueState
from geo_ray.storage.uri import is_s3
from geo_ray.telemetry.event_log import Ending
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.status import MembersFold
from geo_ray.telemetry.totals import RunTotals

_ENDS: Final[dict[str, RunEnd]] = {
    Ending.FINISHED.value: "finished",
    Ending.STOPPED.value: "stopped",
    Ending.FAILED.value: "failed",
}
_MOST_EVENTS: Final = 20_000
LOOK_S: Final = 2.0
"""Timeout of an access to a run directory; the access itself continues."""
_READ_S: Final = 60.0  # for the log of a run that has ended
_GONE: Final = ("lost", "left", "absent", "joining", "did not join")


class QueuedRun:
    """Observes the run of a job; see the module.

    Args:
        place: directory or URL of the run, unique to the job.
        spec: specification of the job.
    """

    def __init__(self, place: str, spec: JobSpec) -> None:
        self._place, self._spec = place, spec
        self._reader: StatusReader | None = None
        self._members: MembersFold | None = None
        self._joined: dict[str, int] = {}  # steps that joining regions have completed
        self._calls = BoundedCalls(f"the directory of run {place}", LOOK_S, RunDirectoryError)
        self._found: ObservedSubmission | None = None  # of the newest read, until it is returned
        self._over_s: float | None = None

    def begin_look(self) -> Callable[[], ObservedSubmission]:
        """Begin to read the state of the run, for an active submission.

        Returns:
            Function that waits for the result. A late result is returned by the next call. It
            raises `RunDirectoryError` if the directory cannot be read in time, and `StoreError` if
            the bucket does not answer.
        """
        wait = self._calls.begin(self._look)

        def look() -> ObservedSubmission:
            try:
                wait()
            except RunDirectoryError:
                if self._found is None:
                    raise
            found, self._found = self._found, None
            return found or ObservedSubmission("going")

        return look

    def _look(self) -> None:
        self._found = self._seen()

    def has_read_all(self) -> bool:
        """Whether the log of an ended run was read completely, or for a minute."""
        self._over_s = self._over_s or time.monotonic()
        return self._is_read or time.monotonic() - self._over_s >= _READ_S

    @property
    def _is_read(self) -> bool:
        """Whether the whole log was read: each read covers only a part of a long log."""
        return self._reader is None or self._reader.read_fraction >= 1.0

    def _seen(self) -> ObservedSubmission:
        self._reader = self._reader or self._opened()
        if self._reader is None:
            return ObservedSubmission("going")
        status = self._reader.read(_MOST_EVENTS)  # bounded, whatever the length of the log
        now, names = self._members, self._reader.config.region_names
        members = {} if now is None else {name: now.of(name).state for name in names}
        regions = [each for each in status.regions if each.steps is not None]
        there = [each for each in regions if members.get(each.name) not in _GONE] or regions
        done = None
        if not self._is_read:
            pass  # the fraction read so far is a lower bound
        elif there and self._spec.anywhere and len(self._spec.regions) > 1:
            done = sum(each.samples for each in regions) / self._spec.rows
        elif there:
            steps = {each.name: max(each.step, self._joined.get(each.name, 0)) for each in there}
            done = min(steps[each.name] / max(1, each.steps or 1) for each in there)
        return ObservedSubmission(
            "going",
            None if done is None else min(1.0, done),
            trains=status.is_going is not False and any(each.step for each in there),
            members=members,
            end=_ENDS.get(status.phase),
            code=status.code,
            message=status.message or "",
            problem=next(iter(self._reader.problems), ""),
        )

    def ask_stop(self) -> None:
        """Ask the run to save and stop; idempotent.

        Raises:
            RunDirectoryError: the directory cannot be written in time.
            StoreError: the bucket does not answer.
        """
        self._calls.begin(self._ask_stop)()

    def ask_member(self, verb: Verb, region: str) -> None:
        """Let a region join or leave.

        Raises:
            RunDirectoryError: the directory cannot be written in time.
            StoreError: the bucket does not answer.
        """
        self._calls.begin(partial(self._ask_member, verb, region))()

    def _ask_stop(self) -> None:
        path = self._path()
        requests.request_stop(path)
        pass_on(self._address(), path)

    def _ask_member(self, verb: Verb, region: str) -> None:
        path = self._path()
        request_member_change(path, MemberRequest(verb=verb, region=region))
        pass_on(self._address(), path)

    def _opened(self) -> StatusReader | None:
        try:
            return StatusReader(self._path(), beside=self._beside)
        except RunDirectoryError:
            return None  # it does not exist yet, or is being created

    def _beside(self) -> Beside:
        fold, self._joined = MembersFold(), {}
        self._members = fold

        def feed(event: Event, _: RunTotals) -> None:
            fold.feed(event)
            if event.kind == "run_started":
                self._joined.clear()
            elif event.kind == "region_joined":
                self._joined[event["region"]] = int(event["step"])

        return feed

    def _path(self) -> Path:
        return view_copy(self._place) if is_s3(self._place) else Path(self._place)

    def _address(self) -> str | None:
        return self._place if is_s3(self._place) else None


_ANSWER_S: Final = 10.0
_log = logging.getLogger(__name__)
_MEMBERS_AGAIN_S: Final = 20.0
_MACHINES_AGAIN_S: Final = 60.0


@dataclass(slots=True)
class RayQueueWorld:
    """World of a queue on a Ray cluster; see the module.

    Attributes:
        config: the queue.
        server: the cluster's job server.
    """

    config: QueueConfig
    server: QueueJobServer
    _runs: dict[str, QueuedRun] = field(default_factory=dict)
    _asked_s: dict[object, float] = field(default_factory=dict)

    def see(self, state: QueueState, unix_s: float) -> QueueObservation:
        """See `QueueWorld`."""
        there = {
            name: report
            for name, report in self.server.submissions().items()
            if is_submission_of(self.config.name, name)
        }
        looks, mine = {}, set()
        for job in state.living():
            if job.attempt is None:
                continue
            name = submission_name(self.config.name, job.id, job.attempt.number)
            mine.add(name)
            run = self._runs.setdefault(
                job.name, QueuedRun(run_of(self.config, job.id), job.request.spec)
            )
            report = there.get(name)
            looks[job.name] = report, run, None if report is None else run.begin_look()
        attempts = {name: _seen(*look) for name, look in looks.items()}
        self._runs = {name: run for name, run in self._runs.items() if name in attempts}
        orphans = [
            name for name, report in there.items() if not report.is_over and name not in mine
        ]
        return QueueObservation(unix_s, capacity_of(self.config), attempts, tuple(orphans))

    def act(self, action: Action) -> None:
        """See `QueueWorld`."""
        match action:
            case Submit(id=job_id, request=request, attempt=attempt):
                name = submission_name(self.config.name, job_id, attempt)
                try:
                    tree = run_tree(request, job_id, action.workers, action.averager, self.config)
                except Exception as error:  # errors concern this tenant's configuration only
                    raise QueueRequestError(
                        f"the configuration of job {request.name} is invalid: {error!r}"
                    ) from error
                self.server.submit(name, tree, self._code_of(action), action.tenant)
            case AskStop(job=job):
                if self._is_due(action, _MEMBERS_AGAIN_S):
                    self._runs[job].ask_stop()
            case EndSubmission(submission=name):
                if self._is_due(action, _MEMBERS_AGAIN_S):
                    self.server.end(name)
            case ChangeMember(job=job, verb=verb, region=region):
                if self._is_due(action, _MEMBERS_AGAIN_S):
                    self._runs[job].ask_member(verb, region)
            case AskMachines():
                if self._is_due(action, _MACHINES_AGAIN_S):
                    self._follow(action)

    def _code_of(self, action: Submit) -> JobCode | None:
        """Return a job's code, if its tenant may still bring it."""
        path, tenant = action.request.working_dir, self.config.tenants.get(action.tenant)
        if path is None:
            return None
        if tenant is None or tenant.working_dirs is None:
            raise QueueRequestError(f"jobs of tenant {action.tenant} may no longer bring code")
        return JobCode(tenant.working_dirs, path)

    def _is_due(self, action: Action, again_s: float) -> bool:
        """Whether an action is due, and was not executed a moment ago."""
        now_s = time.monotonic()
        known = {each: at_s for each, at_s in self._asked_s.items() if now_s - at_s < again_s}
        is_due = action not in known
        self._asked_s = known | ({action: now_s} if is_due else {})
        return is_due

    def _follow(self, action: AskMachines) -> None:
        cluster = str(self.config.autoscaler)
        try:
            actor: Any = find_autoscaler(cluster, NAMESPACE)
            ray.get(actor.follow.remote(action.target), timeout=_ANSWER_S)
        except Exception as error:  # of many types; it may be restarting
            self._asked_s.pop(action, None)
            raise ClusterError(f"the autoscaler of {cluster} does not answer: {error}") from error


def capacity_of(config: QueueConfig) -> dict[str, tuple[float, float]]:
    """Return GPUs and CPUs by region.

    They are those of live nodes that are not draining, or of machines that may be launched.
    """
    nodes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    try:
        drained = set(ray_internals.draining_nodes())
        for node in ray_internals.nodes():
            region = node["Labels"].get(REGION_LABEL)
            if node["Alive"] and region is not None and node["NodeID"] not in drained:
                has: Mapping[str, float] = node["Resources"]
                nodes[region][0] += has.get("GPU", 0.0)
                nodes[region][1] += has.get("CPU", 0.0)
    except Exception as error:  # without the nodes, no decision is possible
        raise ClusterError(f"cannot list the nodes of Ray: {error}") from error
    found = {}
    for name, region in config.regions.items():
        gpus, cpus = nodes[name]
        machine = region.machines
        if machine is not None and config.autoscaler is not None:
            gpus, cpus = machine.gpus * machine.cap, machine.cpus * machine.cap
        found[name] = (
            gpus if region.gpus is None else min(gpus, region.gpus),
            cpus if region.cpus is None else min(cpus, region.cpus),
        )
    return found


def _seen(
    report: SubmissionReport | None, run: QueuedRun, look: Callable[[], ObservedSubmission] | None
) -> ObservedSubmission:
    if report is None or look is None:
        return ObservedSubmission("unknown")
    try:
        observed = look()
    except Exception as error:  # an error concerns this run only
        message = error.message if isinstance(error, GeoRayError) else repr(error)
        _log.warning("queue: %s", message)
        observed = ObservedSubmission("going", problem=message)
    if not report.is_over or (not report.succeeded and not run.has_read_all()):
        return replace(observed, end=None, code=None, message="")
    # The run's own message may be of an earlier attempt: the output of this attempt has precedence.
    if report.succeeded or report.code == RunFinishedError.code:
        return replace(
            observed, state="over", trains=False, end="finished", code=None, message=report.message
        )
    ended = replace(observed, state="over", trains=False)
    if report.code is not None:
        return replace(ended, end="failed", code=report.code, message=report.message)
    return ended if observed.end == "failed" else replace(ended, code=None, message=report.message)
