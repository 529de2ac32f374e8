"""The cluster of a queue as it is, and what is done there; see `QueueWorld`."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ray

from geo_ray.errors import ClusterError, GeoRayError, QueueRequestError, RunFinishedError
from geo_ray.job.queued.tree import run_of, run_tree
from geo_ray.queue.actions import (
    Action,
    AskMachines,
    AskStop,
    ChangeMember,
    EndSubmission,
    Submit,
    is_submission_of,
    submission_name,
)
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.seen import QueueSeen, SubmissionSeen
from geo_ray.queue.state import QueueState
from geo_ray.runtime.autoscaler.actor import find_autoscaler
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.labels import REGION_LABEL
from geo_ray.runtime.cluster.served import NAMESPACE
from geo_ray.runtime.queue.job_server import JobCode, QueueJobServer, SubmissionTold
from geo_ray.runtime.queue.queued_run import QueuedRun

_ANSWER_S: Final = 10.0
_log = logging.getLogger(__name__)
_MEMBERS_AGAIN_S: Final = 20.0
_MACHINES_AGAIN_S: Final = 60.0


@dataclass(slots=True)
class RayQueueWorld:
    """See the module.

    Attributes:
        config: the queue.
        server: the cluster's job server.
    """

    config: QueueConfig
    server: QueueJobServer
    _runs: dict[str, QueuedRun] = field(default_factory=dict)
    _asked_s: dict[object, float] = field(default_factory=dict)

    def see(self, state: QueueState, unix_s: float) -> QueueSeen:
        """See `QueueWorld`."""
        there = {
            name: told
            for name, told in self.server.submissions().items()
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
            told = there.get(name)
            looks[job.name] = told, run, None if told is None else run.begin_look()
        attempts = {name: _seen(*look) for name, look in looks.items()}
        self._runs = {name: run for name, run in self._runs.items() if name in attempts}
        strays = [name for name, told in there.items() if not told.is_over and name not in mine]
        return QueueSeen(unix_s, room_of(self.config), attempts, tuple(strays))

    def act(self, action: Action) -> None:
        """See `QueueWorld`."""
        match action:
            case Submit(id=job_id, request=request, attempt=attempt):
                name = submission_name(self.config.name, job_id, attempt)
                try:
                    tree = run_tree(request, job_id, action.workers, action.averager, self.config)
                except Exception as error:  # of what its tenant has sent
                    raise QueueRequestError(
                        f"the configuration of job {request.name} makes no sense: {error!r}"
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
        """Return a job's own code, as its tenant may bring it now."""
        path, tenant = action.request.working_dir, self.config.tenants.get(action.tenant)
        if path is None:
            return None
        if tenant is None or tenant.working_dirs is None:
            raise QueueRequestError(f"jobs of tenant {action.tenant} may bring no code any more")
        return JobCode(tenant.working_dirs, path)

    def _is_due(self, action: Action, again_s: float) -> bool:
        """Whether an action is to be done now, and not only again so soon."""
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
        except Exception as error:  # of many kinds; it may be starting anew
            self._asked_s.pop(action, None)
            raise ClusterError(f"the autoscaler of {cluster} does not answer: {error}") from error


def room_of(config: QueueConfig) -> dict[str, tuple[float, float]]:
    """Return GPUs and CPUs by region: of living nodes that are not drained, or to be rented."""
    nodes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    try:
        drained = set(ray_private.draining_nodes())
        for node in ray_private.nodes():
            region = node["Labels"].get(REGION_LABEL)
            if node["Alive"] and region is not None and node["NodeID"] not in drained:
                has: Mapping[str, float] = node["Resources"]
                nodes[region][0] += has.get("GPU", 0.0)
                nodes[region][1] += has.get("CPU", 0.0)
    except Exception as error:  # whatever Ray says: without it nothing is decided
        raise ClusterError(f"Ray does not tell of its nodes: {error}") from error
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
    told: SubmissionTold | None, run: QueuedRun, look: Callable[[], SubmissionSeen] | None
) -> SubmissionSeen:
    if told is None or look is None:
        return SubmissionSeen("unknown")
    try:
        seen = look()
    except Exception as error:  # of this run alone, whatever it is: the others go on
        message = error.message if isinstance(error, GeoRayError) else repr(error)
        _log.warning("queue: %s", message)
        seen = SubmissionSeen("going", problem=message)
    if not told.is_over or (not told.succeeded and not run.has_told_all()):
        return replace(seen, end=None, code=None, told="")
    # The run's own words may be of an attempt before: what this one has printed comes first.
    if told.succeeded or told.code == RunFinishedError.code:
        return replace(seen, state="over", trains=False, end="finished", code=None, told=told.told)
    ended = replace(seen, state="over", trains=False)
    if told.code is not None:
        return replace(ended, end="failed", code=told.code, told=told.told)
    return ended if seen.end == "failed" else replace(ended, code=None, told=told.told)
