"""A simulated cluster for queue tests: jobs run on a virtual clock, independently of the queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from geo_ray.base.errors import ClusterError
from geo_ray.runs.lease import Unfenced
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.inbox import key_of, new_token
from geo_ray.scheduler.queue.job_spec import (
    AnyRequest,
    CancelRequest,
    JobRequest,
    JobSpec,
    JobTiming,
    JobValue,
    MoveRequest,
    RegionNeeds,
    SubmitRequest,
)
from geo_ray.scheduler.queue.loop import (
    Action,
    AskMachines,
    AskStop,
    ChangeMember,
    EndSubmission,
    QueueLoop,
    Submit,
    is_submission_of,
    submission_name,
)
from geo_ray.scheduler.queue.model import (
    ObservedSubmission,
    QueueObservation,
    RunEnd,
    fraction_per_s,
)
from geo_ray.scheduler.queue.state import QueueState
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore

SLOT_S = 10.0
TOKENS = {name: new_token() for name in ("red", "blue", "boss")}


def queue_config(**changes: Any) -> QueueConfig:
    """Return a queue with two tenants, an operator and three regions of 8 CPUs."""
    tenants = {name: {"key": key_of(token)} for name, token in TOKENS.items()}
    tenants["boss"]["operator"] = True  # type: ignore[assignment]
    tree = {
        "name": "q",
        "policy": "fifo",
        "slot_s": SLOT_S,
        "start_s": 2.0,
        "runs": "runs",
        "regions": {name: {"cpus": 8.0} for name in ("us", "eu", "asia")},
        "link": {"mbps": 1000.0, "rtt_s": 0.0},
        "tenants": tenants,
        "patience": {"save_s": 30.0, "resize_s": 5.0},
    }
    return QueueConfig.model_validate_json(json.dumps(tree | changes))


def needs(workers: int = 1, rows: int = 16, cpus: float = 1.0) -> RegionNeeds:
    return RegionNeeds(workers=workers, rows=rows, cpus=cpus, gpus=0.0, server_cpus=1.0)


def job(
    name: str,
    regions: Sequence[str] = ("us",),
    *,
    seconds: float = 20.0,
    value: float = 10.0,
    deadline_s: float | None = None,
    urgency: float = 2.0,
    workers: int = 1,
    least: int | None = None,
    anywhere: bool = False,
    most: int | None = None,
    working_dir: str | None = None,
) -> JobRequest:
    """Return a job that takes a time with its configured workers."""
    steps = 100
    spec = JobSpec(
        regions={region: needs(workers, 16 * workers) for region in regions},
        steps=steps,
        speed=JobTiming(fixed_s=0.0, row_s=seconds / steps / 16, model_bytes=0.0),
        averager=regions[0],
        anywhere=anywhere,
        least_regions=least or (1 if anywhere else len(regions)),
        most_workers=most or workers * len(regions),
    )
    return JobRequest(
        name=name,
        config=config_of(name, spec),
        spec=spec,
        value=JobValue(value=value, deadline_s=deadline_s, urgency=urgency),
        working_dir=working_dir,
    )


def config_of(name: str, spec: JobSpec) -> dict[str, JsonValue]:
    """Return the configuration that matches a specification."""
    regions: list[JsonValue] = [
        {
            "name": region,
            "workers": each.workers,
            "cpus_per_worker": each.cpus,
            "gpus_per_worker": each.gpus,
            "cpus_per_server": each.server_cpus / 2,
        }
        for region, each in spec.regions.items()
    ]
    return {"name": name, "regions": regions, "data": {"batch_size": 16}}


def with_spec(request: JobRequest, **changes: Any) -> JobRequest:
    """Return a job with a changed specification and configuration."""
    spec = request.spec.model_copy(update=changes)
    return request.model_copy(update={"spec": spec, "config": config_of(request.name, spec)})


@dataclass
class SimRun:
    """Run of a job: its directory survives submissions."""

    done: float = 0.0
    members: dict[str, str] = field(default_factory=dict)
    end: RunEnd | None = None


@dataclass
class SimSubmission:
    """An attempt at the job server."""

    request: JobRequest
    began_s: float
    workers: dict[str, int]
    averager: str
    stop_s: float | None = None
    is_over: bool = False
    end: RunEnd | None = None


@dataclass
class SimWorld:
    """A cluster on a virtual clock.

    Attributes:
        config: of the queue.
        capacity: what nodes have.
        speed: of jobs, to what they say; 0 stands still.
        fails: attempts of a job that fail after a second of training.
        fail_code: of the error that they end with.
        acts: what was done.
        before_act: called before anything is done; may raise.
    """

    config: QueueConfig
    capacity: dict[str, tuple[float, float]]
    now_s: float = 0.0
    save_s: float = 1.0
    speed: dict[str, float] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)
    fail_code: str | None = "TASK"
    runs: dict[str, SimRun] = field(default_factory=dict)
    submissions: dict[str, SimSubmission] = field(default_factory=dict)
    acts: list[Action] = field(default_factory=list)
    before_act: Callable[[Action], None] = lambda _: None
    after_act: Callable[[Action], None] = lambda _: None
    is_down: bool = False
    start_s: float | None = None
    step_s: float = 0.5

    @property
    def _start_s(self) -> float:
        return self.config.start_s if self.start_s is None else self.start_s

    def advance(self, now_s: float) -> None:
        """Advance the time."""
        step_s = self.step_s
        while self.now_s < now_s:
            self.now_s = min(now_s, self.now_s + step_s)
            for each in self.submissions.values():
                if not each.is_over:
                    self._train(each, step_s)
        self.check()

    def _train(self, each: SimSubmission, step_s: float) -> None:
        name, run = each.request.name, self.runs[each.request.name]
        if each.stop_s is not None and self.now_s - each.stop_s >= self.save_s:
            each.is_over, each.end = True, "stopped"
            return
        if self.now_s - each.began_s <= self._start_s or each.stop_s is not None:
            return
        members = {r: n for r, n in each.workers.items() if run.members.get(r) == "member"}
        if self.fails.get(name, 0):
            self.fails[name] -= 1
            each.is_over, each.end = True, "failed"
            return
        per_s = fraction_per_s(each.request.spec, members, each.averager, self.config)
        run.done = min(1.0, run.done + per_s * self.speed.get(name, 1.0) * step_s)
        if run.done >= 1.0 - 1e-9:
            each.is_over, each.end = True, "finished"

    def living(self, job: str) -> list[SimSubmission]:
        """Return the active submissions of a job."""
        return [s for s in self.submissions.values() if s.request.name == job and not s.is_over]

    def kill(self, job: str) -> None:
        """Kill the driver of a job: it ends without a message."""
        for each in self.living(job):
            each.is_over, each.end = True, None

    def check(self) -> None:
        """Check that no job is trained twice at once, or after its end."""
        for name in self.runs:
            assert len(self.living(name)) <= 1, name

    def used_cpus(self) -> dict[str, float]:
        """Return the CPUs used by runs, by region."""
        used = dict.fromkeys(self.capacity, 0.0)
        for each in self.submissions.values():
            if each.is_over:
                continue
            for region, stands in self.runs[each.request.name].members.items():
                if stands == "member":
                    used[region] += each.request.spec.needs(region).cpus_of(each.workers[region])
        return used

    # ------------------------------------------------------------------ QueueWorld

    def see(self, state: QueueState, unix_s: float) -> QueueObservation:
        if self.is_down:
            raise ClusterError("nobody answers")
        attempts, mine = {}, set()
        for each in state.living():
            if each.attempt is None:
                continue
            name = submission_name(self.config.name, each.id, each.attempt.number)
            mine.add(name)
            found, run = self.submissions.get(name), self.runs.get(each.name, SimRun())
            if found is None:
                attempts[each.name] = ObservedSubmission("unknown")
                continue
            trains = not found.is_over and self.now_s - found.began_s > self._start_s
            attempts[each.name] = ObservedSubmission(
                "over" if found.is_over else "going",
                run.done,
                trains,
                dict(run.members),
                found.end,
                self.fail_code if found.end == "failed" else None,
                "it broke" if found.end == "failed" else "",
            )
        orphans = [
            name
            for name, each in self.submissions.items()
            if is_submission_of(self.config.name, name) and not each.is_over and name not in mine
        ]
        return QueueObservation(unix_s, dict(self.capacity), attempts, tuple(orphans))

    def act(self, action: Action) -> None:
        self.before_act(action)
        self.acts.append(action)
        match action:
            case Submit():
                self._submit(action)
            case AskStop(job=name):
                for each in self.living(name):
                    each.stop_s = each.stop_s if each.stop_s is not None else self.now_s
            case EndSubmission(submission=name):
                each = self.submissions[name]
                if not each.is_over:
                    each.is_over, each.end = True, "stopped"
            case ChangeMember(job=name, verb=verb, region=region):
                self.runs[name].members[region] = "member" if verb == "add" else "left"
            case AskMachines():
                pass
        self.after_act(action)

    def _submit(self, action: Submit) -> None:
        request = action.request
        name = submission_name(self.config.name, action.id, action.attempt)
        if name in self.submissions:
            return  # as the job server does
        spec = request.spec
        names = list(self.config.regions) if spec.anywhere else list(spec.regions)
        run = self.runs.setdefault(request.name, SimRun())
        run.members = {n: "member" if n in action.workers else "absent" for n in names}
        every = {n: action.workers.get(n, spec.needs(n).workers) for n in names}
        self.submissions[name] = SimSubmission(request, self.now_s, every, action.averager)
        assert len(self.living(request.name)) == 1, f"{request.name} runs twice"


@dataclass
class SimQueue:
    """A queue over a simulated cluster; it can be killed and receive requests."""

    root: Path
    config: QueueConfig
    world: SimWorld
    token: int = 0
    asked: int = 0
    loop: QueueLoop | None = None
    queue_id: str = "queue-of-tests"

    @property
    def store(self) -> ConditionalStore:
        return LocalConditionalStore(self.root)

    def open(self) -> QueueLoop:
        self.token += 1
        self.loop = QueueLoop(
            self.config, self.store, self.world, self.token, Unfenced(), self.queue_id
        )
        return self.loop

    def die(self) -> None:
        self.loop = None

    def tick(self) -> tuple[str, ...]:
        loop = self.loop or self.open()
        return loop.tick(self.world.now_s)

    def run(self, until_s: float, every_s: float = 1.0) -> None:
        while self.world.now_s < until_s:
            self.tick()
            self.world.advance(self.world.now_s + every_s)
        self.tick()

    @property
    def state(self) -> QueueState:
        assert self.loop is not None
        return self.loop.state

    def ask(self, tenant: str, request: AnyRequest, token: str | None = None) -> str:
        signed = inbox.signed(request, self.queue_id, token or TOKENS[tenant])
        inbox.submit(self.store, tenant, signed)
        return request.id

    def _new(self) -> dict[str, Any]:
        self.asked += 1
        return {"id": f"request-{self.asked}", "sent_unix_s": self.asked * 1e-3}

    def submit(self, tenant: str, request: JobRequest) -> str:
        return self.ask(tenant, SubmitRequest(job=request, **self._new()))

    def cancel(self, tenant: str, name: str) -> str:
        return self.ask(tenant, CancelRequest(job=name, **self._new()))

    def move(self, tenant: str, name: str, **how: Any) -> str:
        return self.ask(tenant, MoveRequest(job=name, **how, **self._new()))


def sim_queue(root: Path, capacity: float = 8.0, **changes: Any) -> SimQueue:
    """Return a queue in a directory, over a cluster with some CPUs per region."""
    config = queue_config(**changes)
    world = SimWorld(config, dict.fromkeys(config.regions, (0.0, capacity)))
    return SimQueue(root, config, world)
