"""Attaches a new driver to the running processes of a run, or decides to start from a checkpoint.

The driver holds the lease; the supervisor, then every server and bridge learn its fencing token
and refuse the driver before. `why_anew` decides (pure): processes are kept unless something was
under way that only the old driver knew. What the handoff record does not name ends. What the
old driver may have heard and not written is reported again; nothing is logged twice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from geo_ray.base.errors import LeaseLostError, RegionLostError
from geo_ray.base.load import digest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Handle, failure_of
from geo_ray.runs import requests
from geo_ray.runs.build import use_one_thread, with_shapes
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.evaluation import BestKeeper, EvalMark
from geo_ray.runs.lease import LeaseKeeper
from geo_ray.runs.requests import MemberRequest
from geo_ray.runs.status import patience_s
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoint_upload import PartDesk, desk_of
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.driver.run_cluster import Reporting, RunCluster
from geo_ray.runtime.driver.run_context import (
    BrokenError,
    Stage,
    controller_of,
    drive_to_end,
    evals_of,
)
from geo_ray.runtime.driver.supervisor import StewardLine
from geo_ray.runtime.launcher import Kept, RunBook
from geo_ray.runtime.policies import LossHealth
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import shard_part_name
from geo_ray.telemetry.event_log import (
    EVENTS_FILE,
    EventLog,
    EventTail,
    newest_stretch,
    note_failure,
)
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary
from geo_ray.training.membership import View

_ENDING: Final = frozenset({"stop_requested", "run_finished", "run_failed"})
_ENDED: Final = frozenset({"run_finished", "run_failed"})
_HEARD_S: Final = 5.0  # within which a steward has heard of a driver that lives
_STILL: Final = frozenset({"starting", "halted"})


@dataclass(frozen=True, slots=True)
class Living:
    """What is seen of a run's processes.

    Attributes:
        same_configuration: whether they have the one that is asked for.
        is_changing: whether the driver before was changing members.
        view: the averager's; None where there is none, or it does not answer.
        phases: of the regions whose servers answer.
        told: kinds of events since the run last began.
        uses_desk: whether any process sends its parts to the machine of the driver before.
    """

    same_configuration: bool
    is_changing: bool
    view: View | None
    phases: Mapping[str, str]
    told: Collection[str]
    uses_desk: bool = False


def why_anew(living: Living) -> str | None:
    """Why a new driver begins anew from a checkpoint; None: it goes on with what is there."""
    if not living.same_configuration:
        return "another configuration is asked for"
    if not living.phases:
        return "no parameter server answers"
    if _ENDING.intersection(living.told):
        return "it was about to end"
    if living.uses_desk:
        return "some of them send their parts of checkpoints to the driver before"
    if living.is_changing or (living.view is not None and living.view.joining):
        return "its members were changing"
    still = sorted(name for name, phase in living.phases.items() if phase in _STILL)
    if still:
        return f"region '{still[0]}' was standing still"
    return None


def why_gone(told: Collection[str], patience_s: float | None, silent_s: float | None) -> str | None:
    """Why there are no processes to go on with; None: the driver before has ended the run itself.

    Args:
        told: kinds of events since the run last began.
        patience_s: for how long they wait for a driver; None: they end with theirs.
        silent_s: since the driver before last wrote something; None: not known.
    """
    if _ENDED.intersection(told):
        return None
    if patience_s is None:
        return "they ended with their driver"
    if silent_s is not None and silent_s >= patience_s - _HEARD_S:
        return f"nobody drove it for {patience_s:g} s, so they have ended"
    return "they have ended: a machine of theirs, or its Ray, may be gone"


_ANSWER_S: Final = 15.0
_KNOWN: Final = 20_000  # events of the log that processes may tell again


@dataclass(frozen=True, slots=True)
class Attached:
    """A run that goes on.

    Attributes:
        experiment: its configuration.
        actors: its processes.
        book: what the driver before has noted.
        steps: of each region, as far as it answers.
        stretch: its events since it last began.
    """

    experiment: Experiment
    actors: ActorGroup
    book: RunBook
    steps: Mapping[str, int]
    stretch: list[Event]

    @property
    def known(self) -> list[Event]:
        """The newest events that are written."""
        return self.stretch[-_KNOWN:]

    @property
    def evaluated(self) -> frozenset[EvalMark]:
        """Evaluations that are written."""
        evals = [event for event in self.stretch if event.kind == "eval"]
        return frozenset((e["step"], e["region"], bool(e.fields.get("final"))) for e in evals)

    @property
    def sent(self) -> dict[tuple[str, str], dict[str, int]]:
        """Bytes that were told to have been sent so far, by link and class."""
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for event in self.stretch:
            if event.kind == "wan":
                sums.setdefault((event["src"], event["dst"]), {}).update(event["bytes_by_class"])
        return sums

    @property
    def requested(self) -> set[tuple[str, int]]:
        """Places of workers that were requested, and of which nothing says that they work."""
        places: set[tuple[str, int]] = set()
        for event in self.stretch:
            if event.kind == "worker_requested":
                places.add((event["region"], event["worker"]))
            elif event.kind == "worker_replaced":
                places.discard((event["region"], event["worker"]))
        return places

    @property
    def startup_s(self) -> float:
        """Of the run."""
        begun = next((event for event in self.stretch if event.kind == "run_started"), None)
        return float(begun.fields.get("startup_s") or 0.0) if begun is not None else 0.0

    @property
    def last_s(self) -> float:
        """When something was written last."""
        return max((event.t_s for event in self.stretch), default=0.0)


def attach_to_processes(
    line: StewardLine,
    driver: int,
    experiment: Experiment,
    shaped: Experiment,
    stretch: Iterable[Event],
    desk: PartDesk | None,
) -> Attached | str:
    """Go on with the processes of a run.

    Args:
        line: to its steward.
        driver: epoch of this driver's lease, which holds.
        experiment: the configuration that is asked for.
        shaped: the same as processes are given it.
        stretch: the run's events since it last began.
        desk: takes parts of newcomers in; None: they go to stores.

    Returns:
        The run; or why it must begin anew from a checkpoint, whatever there was.

    Raises:
        RegionLostError: the steward has ended.
        LeaseLostError: another driver has come since.
    """
    kept = line.attach()
    book = kept.book
    if book is None:
        return "it had not begun to train"
    events = list(stretch)
    as_begun = _as_begun(experiment, book)
    statuses = _attended(book.servers, driver)
    home = statuses.get(("bridge", book.where.home.region), {})
    phases = {region: str(s["phase"]) for (role, region), s in statuses.items() if role == "ps"}
    living = Living(
        digest(_as_begun(shaped, book)) == digest(book.spec.experiment),
        book.is_changing,
        home.get("view"),
        phases,
        {event.kind for event in events},
        book.uses_desk,
    )
    why = why_anew(living)
    if why is not None:
        line.clear()
        return why
    line.keep_only(book.handles)
    actors = _group(line, kept, book, driver, desk)
    for primary in actors.primaries.values():
        primary.pause.remote(False)  # who is missing is looked at anew
    steps = {
        region: int(s.get("version", 0)) for (role, region), s in statuses.items() if role == "ps"
    }
    return Attached(as_begun, actors, book, steps, events)


def _as_begun(experiment: Experiment, book: RunBook) -> Experiment:
    """The configuration, of the regions and the averager that the run last began with."""
    begun = book.spec.experiment
    return experiment.model_copy(update={"members": begun.members, "averager": begun.averager})


def _group(
    line: StewardLine, kept: Kept, book: RunBook, driver: int, desk: PartDesk | None
) -> ActorGroup:
    spec = replace(book.spec, resume=None)
    group = ActorGroup(spec, dict(book.placed), line, line, driver, desk)
    group.go_on_as(kept, book)
    return group


def _attended(
    servers: Mapping[tuple[str, str], Handle], driver: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """What servers and bridges tell that live; the others are missed by who polls them."""
    calls = {key: handle.attend.remote(driver) for key, handle in servers.items()}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    came, told = set(ready), {}
    for key, call in calls.items():
        if call not in came:
            continue
        try:
            told[key] = ray.get(call)
        except ray.exceptions.RayError as error:
            failure = failure_of(error)
            was_overtaken = isinstance(failure.raised, LeaseLostError)
            if was_overtaken or not (failure.is_lost or failure.raised):
                raise failure.as_error() from error
    return told


def living_run(
    experiment: Experiment,
    run: RunDirectory,
    reporting: Reporting,
    cluster: RunCluster,
    lease: LeaseKeeper,
) -> Attached | str | None:
    """The processes of a run that go on without a driver.

    Returns:
        They; or why there are none to go on with; None: the driver before has ended them itself.
    """
    log = run.path / EVENTS_FILE
    stretch = newest_stretch(EventTail(log))
    # Of a run in a bucket the log is a copy that was made just now.
    silent_s = time.time() - log.stat().st_mtime if run.address is None and stretch else None
    line = cluster.living_steward(lease.epoch)
    if line is None:
        told = {event.kind for event in stretch}
        patience = patience_s(experiment.cluster, experiment.run)
        return why_gone(told, patience, silent_s) if told else None
    reporting.status("the run's processes go on: attaching")
    shaped = with_shapes(experiment, load_task(experiment.task, run.base_dir))
    desk = desk_of(run, experiment)
    try:
        return attach_to_processes(line, lease.epoch, experiment, shaped, stretch, desk)
    except RegionLostError:
        return "they have just ended"


def go_on(
    living: Attached,
    run: RunDirectory,
    reporting: Reporting,
    lease: LeaseKeeper,
    away: Collection[str] = (),
) -> Summary:
    """Drive a run whose processes are there, to its end.

    Args:
        living: the run.
        run: its directory.
        reporting: who wants to know.
        lease: the run's, which holds.
        away: regions that are not to take part; those that do are asked to leave.
    """
    use_one_thread()
    experiment, actors = living.experiment, living.actors
    store = CheckpointStore(
        places_of(run, experiment.checkpoint).root(),
        experiment.checkpoint.keep,
        writing=lease.writing,
    )
    epoch = actors.next_epoch()
    saver = Saver(store, experiment, digest(experiment), epoch, _health(store), lease.epoch)
    task = load_task(experiment.task, run.base_dir)
    stage = Stage(actors, experiment, run, task, saver, reporting, lease)
    shards = {region.name: range(region.ps_shards) for region in experiment.regions}
    parts = {shard_part_name(name, i) for name in actors.primaries for i in shards[name]}
    saver.go_on(parts, store.newest_id())
    keeper = BestKeeper.of(experiment, task, run, attaches=True)
    origin_unix_s = living.book.origin_unix_s
    now_s = time.time() - origin_unix_s
    try:
        with EventLog(stage.own_log()) as log, stage.exporting(origin_unix_s) as export:
            recorder = stage.recorder(log, export, living.known)
            for event in living.stretch:
                recorder.pass_on(event)
            evals = evals_of(stage, recorder, keeper, living.evaluated)
            for name in experiment.region_names:
                if name in experiment.present_names and name not in actors.primaries:
                    evals.board.forget(name)
                elif name in actors.primaries and name not in experiment.present_names:
                    evals.board.admit(name, living.steps.get(name, 0))
            controller = controller_of(stage, recorder, evals, origin_unix_s)
            controller.links.go_on(living.sent)
            controller.checkpoints.traffic.go_on(living.sent)
            gone = living.book.gone.but_for(set(away).difference(actors.primaries))
            controller.workers.go_on(living.requested)
            # Who was lost before a resume is absent, and that has not waited.
            controller.members.go_on(gone, unhurried=experiment.members.absent)
            for region in sorted(set(away).intersection(actors.primaries)):
                requests.request_member_change(run.path, MemberRequest(verb="drain", region=region))
            silent_s = max(0.0, now_s - living.last_s)
            recorder.emit("driver_attached", now_s, epoch=lease.epoch, silent_s=silent_s)
            reporting.status("")
            return drive_to_end(stage, controller, living.startup_s)
    except (LeaseLostError, BrokenError):
        raise  # what lies there is another's by now, or the run goes on
    except BaseException as error:
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        saver.close()
        actors.close()
        if actors.desk is not None:
            actors.desk.close()


def _health(store: CheckpointStore) -> LossHealth:
    """How the loss was when a checkpoint was last made."""
    ids = store.ids()
    return LossHealth.restore(store.manifest(ids[-1])) if ids else LossHealth()
