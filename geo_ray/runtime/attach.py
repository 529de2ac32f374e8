"""Attaches a restarted run loop to the running processes of its predecessor.

The run loop holds the lease. The supervisor, then every server and bridge, learn its fencing token
and refuse the predecessor. `restart_reason` (pure) decides whether to attach: it does unless an
operation was in progress that only the predecessor knew. Processes that are not in the handoff
record are ended. Events that the predecessor may have received and not written are reported again;
nothing is logged twice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from geo_ray.base.errors import LeaseLostError
from geo_ray.base.load import digest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Handle, failure_of
from geo_ray.runs import requests
from geo_ray.runs.build import use_one_thread, with_shapes
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.evaluation import BestKeeper, EvalMark
from geo_ray.runs.requests import MemberRequest
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoint_upload import CheckpointUploadServer, upload_server_of
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.launcher import Handoff, HandoffRecord, ProcessLauncher
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.run_context import (
    BrokenError,
    RunContext,
    RunSetup,
    Training,
    controller_of,
    evals_of,
)
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import shard_part_name
from geo_ray.telemetry.event_log import (
    EVENTS_FILE,
    EventLog,
    EventTail,
    newest_segment,
    note_failure,
)
from geo_ray.telemetry.events import Event
from geo_ray.training.membership import View

_ENDING: Final = frozenset({"stop_requested", "run_finished", "run_failed"})
_ENDED: Final = frozenset({"run_finished", "run_failed"})
_STILL: Final = frozenset({"starting", "halted"})


@dataclass(frozen=True, slots=True)
class ProcessObservation:
    """Observed state of a run's processes.

    Attributes:
        same_configuration: whether their configuration is the requested one.
        is_changing: whether the previous run actor was changing members.
        view: the averager's view; None if there is none, or if it does not answer.
        phases: phases of the regions whose servers answer.
        reported: kinds of events since the run last began.
        uses_upload_server: whether any process uploads parts to the previous run actor's machine.
    """

    same_configuration: bool
    is_changing: bool
    view: View | None
    phases: Mapping[str, str]
    reported: Collection[str]
    uses_upload_server: bool = False


def restart_reason(observed: ProcessObservation) -> str | None:
    """Return why a new run actor restarts from a checkpoint; None: it attaches to the processes."""
    if not observed.same_configuration:
        return "another configuration was requested"
    if not observed.phases:
        return "no parameter server answers"
    if _ENDING.intersection(observed.reported):
        return "it was about to end"
    if observed.uses_upload_server:
        return "some of them upload parts of checkpoints to the previous run actor"
    if observed.is_changing or (observed.view is not None and observed.view.joining):
        return "its members were changing"
    still = sorted(name for name, phase in observed.phases.items() if phase in _STILL)
    if still:
        return f"region '{still[0]}' was paused"
    return None


def gone_reason(reported: Collection[str]) -> str | None:
    """Return why an interrupted run has no processes; None: it never trained, or it has ended.

    Args:
        reported: kinds of events since the run last began.
    """
    if not reported or _ENDED.intersection(reported):
        return None
    return "they have ended with their supervisor"


_ANSWER_S: Final = 15.0
_KNOWN: Final = 20_000  # events of the log that processes may report again


@dataclass(frozen=True, slots=True)
class Attached:
    """A running run to attach to.

    Attributes:
        experiment: its configuration.
        actors: its processes.
        record: last record of the previous run actor.
        steps: step of each region whose server answers.
        segment: its events since it last began.
    """

    experiment: Experiment
    actors: ActorGroup
    record: HandoffRecord
    steps: Mapping[str, int]
    segment: list[Event]

    @property
    def known(self) -> list[Event]:
        """The newest written events."""
        return self.segment[-_KNOWN:]

    @property
    def evaluated(self) -> frozenset[EvalMark]:
        """The written evaluations."""
        evals = [event for event in self.segment if event.kind == "eval"]
        return frozenset((e["step"], e["region"], bool(e.fields.get("final"))) for e in evals)

    @property
    def sent(self) -> dict[tuple[str, str], dict[str, int]]:
        """Bytes reported as sent so far, by link and class."""
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for event in self.segment:
            if event.kind == "wan":
                sums.setdefault((event["src"], event["dst"]), {}).update(event["bytes_by_class"])
        return sums

    @property
    def requested(self) -> set[tuple[str, int]]:
        """Places of requested workers that are not reported to work yet."""
        places: set[tuple[str, int]] = set()
        for event in self.segment:
            if event.kind == "worker_requested":
                places.add((event["region"], event["worker"]))
            elif event.kind == "worker_replaced":
                places.discard((event["region"], event["worker"]))
        return places

    @property
    def startup_s(self) -> float:
        """Duration of the run's first start."""
        begun = next((event for event in self.segment if event.kind == "run_started"), None)
        return float(begun.fields.get("startup_s") or 0.0) if begun is not None else 0.0

    @property
    def last_s(self) -> float:
        """Time of the last written event."""
        return max((event.t_s for event in self.segment), default=0.0)


def running_processes(setup: RunSetup) -> Attached | str | None:
    """Look for running processes that an earlier run actor has left.

    From then on the supervisor, servers and bridges refuse that run actor. Processes that cannot
    continue are ended.

    Returns:
        The processes; or why there are none to attach to; None: the run has ended by itself.

    Raises:
        LeaseLostError: another run actor has attached since.
    """
    launcher, experiment, run = setup.launcher, setup.experiment, setup.run
    token = setup.lease.token
    events = newest_segment(EventTail(run.path / EVENTS_FILE))
    handoff = launcher.attach(token)
    if handoff is None or handoff.record is None:
        return gone_reason({event.kind for event in events})
    record = handoff.record
    setup.reporting.status("attaching to the run's processes")
    shaped = with_shapes(experiment, load_task(experiment.task, run.base_dir))
    statuses = _attended(record.servers, token)
    leader = statuses.get(("bridge", record.where.leader.region), {})
    phases = {region: str(s["phase"]) for (role, region), s in statuses.items() if role == "ps"}
    seen = ProcessObservation(
        digest(_as_begun(shaped, record)) == digest(record.spec.experiment),
        record.is_changing,
        leader.get("view"),
        phases,
        {event.kind for event in events},
        record.uses_upload_server,
    )
    why = restart_reason(seen)
    if why is not None:
        launcher.clear()
        return why
    launcher.keep_only(record.handles)
    actors = _group(launcher, handoff, record, token, upload_server_of(run, experiment))
    for primary in actors.primaries.values():
        primary.pause.remote(False)  # absences are evaluated again
    steps = {
        region: int(s.get("version", 0)) for (role, region), s in statuses.items() if role == "ps"
    }
    return Attached(_as_begun(experiment, record), actors, record, steps, events)


def _as_begun(experiment: Experiment, record: HandoffRecord) -> Experiment:
    """Return the configuration with the regions and the averager of the run's last start."""
    begun = record.spec.experiment
    return experiment.model_copy(update={"members": begun.members, "averager": begun.averager})


def _group(
    launcher: ProcessLauncher,
    handoff: Handoff,
    record: HandoffRecord,
    token: int,
    upload_server: CheckpointUploadServer | None,
) -> ActorGroup:
    spec = replace(record.spec, resume=None)
    group = ActorGroup(spec, dict(record.placed), launcher, launcher, token, upload_server)
    group.restore(handoff, record)
    return group


def _attended(
    servers: Mapping[tuple[str, str], Handle], token: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the reports of servers and bridges; those missing are detected by polling."""
    calls = {key: handle.attend.remote(token) for key, handle in servers.items()}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    came, reported = set(ready), {}
    for key, call in calls.items():
        if call not in came:
            continue
        try:
            reported[key] = ray.get(call)
        except ray.exceptions.RayError as error:
            failure = failure_of(error)
            was_overtaken = isinstance(failure.raised, LeaseLostError)
            if was_overtaken or not (failure.is_lost or failure.raised):
                raise failure.as_error() from error
    return reported


@contextmanager
def attached(setup: RunSetup, found: Attached, away: Collection[str] = ()) -> Iterator[Training]:
    """Attach to a run whose processes train, and end them after the block.

    Args:
        setup: the run.
        found: its processes.
        away: regions that must not take part; those that do are asked to leave.
    """
    use_one_thread()
    run, reporting, lease = setup.run, setup.reporting, setup.lease
    experiment, actors = found.experiment, found.actors
    store = CheckpointStore(
        places_of(run, experiment.checkpoint).root(),
        experiment.checkpoint.keep,
        writing=lease.writing,
    )
    attempt = actors.next_attempt()
    saver = Saver(store, experiment, digest(experiment), attempt, _health(store), lease.token)
    task = load_task(experiment.task, run.base_dir)
    context = RunContext(actors, experiment, run, task, saver, reporting, lease)
    shards = {region.name: range(region.ps_shards) for region in experiment.regions}
    parts = {shard_part_name(name, i) for name in actors.primaries for i in shards[name]}
    saver.resume(parts, store.newest_id())
    keeper = BestKeeper.of(experiment, task, run, attaches=True)
    origin_unix_s = found.record.origin_unix_s
    now_s = time.time() - origin_unix_s
    try:
        with EventLog(context.own_log()) as log, context.exporting(origin_unix_s) as export:
            recorder = context.recorder(log, export, found.known)
            for event in found.segment:
                recorder.pass_on(event)
            evals = evals_of(context, recorder, keeper, found.evaluated, context.own_log())
            for name in experiment.region_names:
                if name in experiment.present_names and name not in actors.primaries:
                    evals.collector.forget(name)
                elif name in actors.primaries and name not in experiment.present_names:
                    evals.collector.admit(name, found.steps.get(name, 0))
            controller = controller_of(context, recorder, evals, origin_unix_s)
            controller.links.resume(found.sent)
            controller.checkpoints.traffic.resume(found.sent)
            gone = found.record.gone.but_for(set(away).difference(actors.primaries))
            controller.workers.resume(found.requested)
            # Regions lost before a resume are absent; the run does not wait for them.
            controller.members.resume(gone, unhurried=experiment.members.absent)
            for region in sorted(set(away).intersection(actors.primaries)):
                requests.request_member_change(run.path, MemberRequest(verb="drain", region=region))
            downtime_s = max(0.0, now_s - found.last_s)
            recorder.emit("run_actor_attached", now_s, token=lease.token, downtime_s=downtime_s)
            reporting.status("")
            yield Training(context, controller, found.startup_s)
    except (LeaseLostError, BrokenError):
        raise  # another process writes to the run, or the run restarts
    except BaseException as error:
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        context.close()


def _health(store: CheckpointStore) -> LossHealth:
    """Return the loss statistics of the newest checkpoint."""
    ids = store.ids()
    return LossHealth.restore(store.manifest(ids[-1])) if ids else LossHealth()
