"""A run whose regions join from their own training loops, or are groups: it has only an averager.

The averager (`AveragerActor`) is a process of the run's supervisor, and so are the ranks of regions
with `group` (`geo_ray.runtime.groups`). The run loop (`serve`) polls them, records events, and
writes model and summary. Credentials of the regions are files in the run's directory.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
import torch
from torch import Tensor, nn

from geo_ray.base.errors import GeoRayError, InvariantError, RankLostError, RegionLostError
from geo_ray.base.restarts import Restarts
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import RowWork, checked_metrics
from geo_ray.data.tasks.load import load_task
from geo_ray.data.tasks.model_buffers import BufferEntry
from geo_ray.experiment.experiment import Experiment
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import SignedEndpoints
from geo_ray.joining.layout import Layout
from geo_ray.joining.protocol import SERVER, JoinTerms, region_of
from geo_ray.joining.replication import ReplicatedService
from geo_ray.joining.server import STANDBY, HolderServer, JoinServer, JoinStandby
from geo_ray.joining.service import ABSENT, Stage
from geo_ray.joining.site import parse_address
from geo_ray.joining.slices import SavedRun, SavedSlice
from geo_ray.ray_cluster.preflight import CheckedCluster
from geo_ray.runs.checkpoints import check_unused, places_of
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.evaluation import StoppingRule
from geo_ray.runs.model_file import about_model, save_module, save_trained
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.requests import take_stop_request
from geo_ray.runs.start_checks import check_evaluation
from geo_ray.runtime.averagers import AveragerProcesses, write_credentials
from geo_ray.runtime.group_actor import JOIN_KEY
from geo_ray.runtime.groups import Groups
from geo_ray.runtime.replanning import CurrentLeader, PlanFor, PlanWatch, ReplanPolicy
from geo_ray.runtime.reporting import StatusLine
from geo_ray.runtime.run_context import RayMetrics, Reporting, RunSetup, planner_of
from geo_ray.runtime.run_order import Resumption
from geo_ray.runtime.run_start import check_places, find_checkpoint
from geo_ray.runtime.served_checkpoints import (
    ServedCheckpoints,
    SliceHead,
    bytes_of,
    read_saved,
    set_bytes,
)
from geo_ray.runtime.spec import RunSpec, TokenFence, demands_of
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.telemetry.event_log import (
    EVENTS_FILE,
    EventLog,
    last_time_s,
    note_failure,
    read_events,
)
from geo_ray.telemetry.events import TIMES
from geo_ray.telemetry.export.base import ExportOrder
from geo_ray.telemetry.export.exporters import exporting
from geo_ray.telemetry.summary import Summary, Summing, save_summary
from geo_ray.training.parameters import BufferLayout, digest
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SecretReceiver
from geo_ray.transport.wire.message import PeerStats
from geo_ray.transport.wire.sockets import Address, reserve

_POLL_S: Final = 0.2
_TRAFFIC_S: Final = 5.0  # between two records of traffic
_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_LOOK_S: Final = 0.05
_SAVING_S: Final = 0.05
_LATE_S: Final = 30.0  # a region that others wait for so long is shown
_ENDS: Final = (Stage.DONE.value, Stage.STOPPED.value)
JOIN_FOLDER: Final = "join"
"""Folder of a run's directory with the credentials of its regions."""


def terms_of(experiment: Experiment) -> JoinTerms:
    """Return what the ranks of a served run must know."""
    serve = experiment.served_at
    return JoinTerms(
        name=experiment.name,
        regions=experiment.region_names,
        strategy=experiment.strategy,
        codec=experiment.codec,
        steps=experiment.train.steps,
        rows=serve.rows or (experiment.rows if experiment.knows_task else None),
        seed=experiment.seed,
        eval_every=experiment.train.eval_every,
        holders=serve.holders,
        saves_at_end=experiment.checkpoint.is_periodic,
        goal=f"steps {experiment.train.steps}",
    )


class _SliceActor:
    """An actor that holds slices: what its checkpoints have in common.

    Args:
        terms_json: the run.
        transport_json: settings of connections.
        host: where to listen.
        cpus: CPUs that are reserved for it.
    """

    def __init__(self, terms_json: str, transport_json: str, host: str, cpus: float) -> None:
        torch.set_num_threads(max(1, int(cpus)))
        self._terms = JoinTerms.model_validate_json(terms_json)
        self._transport = TransportConfig.model_validate_json(transport_json)
        self._host, self._receiver = host, SecretReceiver()
        self._slices: list[SavedSlice] = []
        self._saving = -1  # checkpoint that they are sent for
        self._resumed: SavedRun | None = None

    def add_saved(self, head: SliceHead) -> None:
        """Take in a slice of the checkpoint to resume from, without the values of its tensors."""
        self._slices.append(head.empty())

    def add_piece(self, index: int, name: str, start: int, data: bytes) -> None:
        """Set some bytes of a tensor of a slice."""
        set_bytes(self._slices[index].tensors[name], start, data)

    def resume(
        self,
        checkpoint: int,
        layout: str,
        steps: Mapping[str, int],
        strategy: Mapping[str, object],
    ) -> None:
        """Continue from a checkpoint, all slices of which are here."""
        slices, whole = tuple(self._slices), Layout.from_json(layout)
        self._resumed = SavedRun(checkpoint, whole, slices, steps, strategy)

    def saved_piece(self, index: int, name: str, start: int, stop: int) -> bytes:
        """Return some bytes of a tensor of the checkpoint."""
        return bytes_of(self._slices[index].tensors[name], start, stop)

    def _opened(self, credentials: bytes) -> JoinCredentials:
        text = self._receiver.open(credentials, JOIN_KEY).decode()
        return JoinCredentials.parse(text, "the credentials of the averager")


class HolderActor(_SliceActor):
    """A process that holds the slices of one part of the model, next to the averager.

    Args:
        terms_json: the run.
        transport_json: settings of connections.
        host: where to listen.
        number: its number, from 1.
        cpus: CPUs that are reserved for it.
    """

    def __init__(
        self, terms_json: str, transport_json: str, host: str, number: int, cpus: float
    ) -> None:
        _SliceActor.__init__(self, terms_json, transport_json, host, cpus)
        self._number = number
        self._listening: HolderServer | None = None

    def introduce(self) -> tuple[str, bytes]:
        """Return the address of its machine, and its public key."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return host, self._receiver.public

    def listen(self, credentials: bytes, server: Address, advertised: str, port: int) -> int:
        """Start to listen, and connect to the server.

        Args:
            credentials: those of the server, sealed for this process.
            server: where the server listens.
            advertised: host of this process for ranks.
            port: where to listen; 0 takes a free one.

        Returns:
            The port.
        """
        self._listening = HolderServer(
            self._terms,
            self._number,
            self._opened(credentials),
            server,
            self._host,
            port,
            advertised,
            self._transport,
            () if self._resumed is None else self._resumed.slices,
        )
        self._slices, self._resumed = [], None
        return self._listening.address[1]

    @property
    def _server(self) -> HolderServer:
        if self._listening is None:
            raise InvariantError("a holder was asked before it listened")
        return self._listening

    def publish(self, signed: SignedEndpoints) -> None:
        """Take in where the server listens, and its standby will."""
        self._server.learn(signed)

    def check(self) -> None:
        """Do nothing: the process lives."""

    def saved_heads(self) -> tuple[list[SliceHead], str, dict[str, int]]:
        """Return the slices of the checkpoint; see `AveragerActor.saved_heads`."""
        with self._server.lock:
            self._slices = self._server.holder.averagers.saved()
        return [SliceHead.of(each) for each in self._slices], "", {}

    def model_piece(self, start: int, stop: int) -> bytes:
        """Return a part of the final parameters of its range."""
        return self._server.holder.averagers.model_H[start:stop].numpy().tobytes()

    def links(self) -> dict[str, dict[str, int]]:
        """Return the bytes received from each region, and sent to it."""
        return _sums_of(self._server.links())

    def close(self) -> None:
        """Close all connections."""
        self._server.close()


class AveragerActor(_SliceActor):
    """The averager of a served run.

    Args:
        terms_json: the run.
        transport_json: settings of connections.
        host: where to listen.
        lost_after_s: a region that is away for so long is lost.
        least: with fewer regions, the run waits.
        wait_s: longest such wait.
        cpus: CPUs that are reserved for it.
        has_standby: whether the run has a standby.
    """

    def __init__(
        self,
        terms_json: str,
        transport_json: str,
        host: str,
        lost_after_s: float,
        least: int,
        wait_s: float,
        cpus: float,
        has_standby: bool,
    ) -> None:
        _SliceActor.__init__(self, terms_json, transport_json, host, cpus)
        self._fence = TokenFence()
        self._lost_after_s, self._has_standby = lost_after_s, has_standby
        self._least, self._wait_s = least, wait_s
        self._listening: JoinServer | None = None
        self._follower: JoinStandby | None = None
        self._reserved: socket.socket | None = None  # the port of a standby

    # -------------------------------------------------------------- start

    def introduce(self, port: int) -> tuple[str, bytes, int, int]:
        """Return the address of its machine, its public key, the reserved port, its process id.

        Args:
            port: port of a standby; another one is taken if it is not free.
        """
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        if self._has_standby:
            self._reserved = reserve(self._host, port)
        reserved = 0 if self._reserved is None else self._reserved.getsockname()[1]
        return host, self._receiver.public, reserved, os.getpid()

    def listen(
        self,
        credentials: bytes,
        port: int,
        term: int,
        promoted: ReplicatedService | None = None,
    ) -> int:
        """Start to listen as the server.

        Args:
            credentials: those of the server, sealed for this process.
            port: where to listen.
            term: its number; grows with every server of the run.
            promoted: state of the standby that becomes the server.

        Returns:
            The port.
        """
        if self._reserved is not None:
            self._reserved.close()
        self._listening = JoinServer(
            self._terms,
            self._opened(credentials),
            self._host,
            port,
            self._transport,
            self._lost_after_s,
            self._resumed,
            self._least,
            self._wait_s,
            term,
            has_standby=self._has_standby,
            promoted=promoted,
        )
        self._slices, self._resumed = [], None
        return self._listening.address[1]

    # -------------------------------------------------------------- standby

    def follow(self, credentials: bytes, server: Address) -> None:
        """Connect to the server as its standby.

        Args:
            credentials: those of a standby, sealed for this process.
            server: where it listens.
        """
        self._follower = JoinStandby(self._opened(credentials), server, self._transport)

    def take_snapshot(self) -> ReplicatedService:
        """Return the server's state for the standby that connects.

        Raises:
            RegionLostError: no standby has connected in time.
        """
        until_s = time.monotonic() + _ANSWER_S
        while (found := self._server.take_snapshot()) is None:
            if time.monotonic() > until_s:
                raise RegionLostError(f"no standby has connected within {_ANSWER_S:g} s")
            time.sleep(_LOOK_S)
        return found

    def restore(self, snapshot: ReplicatedService) -> None:
        """Begin as a standby with the server's state."""
        self._standby.restore(snapshot)

    def is_standby_ready(self) -> bool:
        """Return whether this standby may replace the server.

        Raises:
            RegionLostError: it never will.
        """
        if self._standby.failure is not None:
            raise RegionLostError(f"the standby has failed: {self._standby.failure!r}")
        return self._standby.is_ready

    def promote(self, credentials: bytes, term: int) -> None:
        """Replace the server; see `listen`.

        Raises:
            InvariantError: the standby is not ready.
        """
        port = 0 if self._reserved is None else self._reserved.getsockname()[1]
        self.listen(credentials, port, term, self._standby.promote())

    def publish(self, signed: SignedEndpoints) -> None:
        """Send a list of the run's addresses to all ranks."""
        self._server.publish(signed)

    def release_standby(self) -> None:
        """Continue without the standby."""
        self._server.release_standby()

    @property
    def _standby(self) -> JoinStandby:
        if self._follower is None:
            raise InvariantError("the averager was asked as a standby, which it is not")
        return self._follower

    @property
    def _server(self) -> JoinServer:
        if self._listening is None:
            raise InvariantError("the averager was asked before it listened")
        return self._listening

    # -------------------------------------------------------------- checkpoints

    def begin_save(
        self, checkpoint: int, keep: list[int], timeout_s: float, halt: bool
    ) -> int | None:
        """Begin a checkpoint, see `JoinService.begin_save`; return its id, or None if not now."""
        return self._server.begin_save(checkpoint, keep, timeout_s, halt=halt)

    def saved_heads(self) -> tuple[list[SliceHead], str, dict[str, int]]:
        """Return the slices of the checkpoint, the model's layout, and the steps of regions."""
        with self._server.lock:
            saved = self._server.service.saved_run
        self._slices, self._saving = list(saved.slices), saved.id
        return (
            [SliceHead.of(each) for each in saved.slices],
            saved.layout.to_json(),
            {**saved.steps},
        )

    def end_save(self, checkpoint: int | None) -> None:
        """Forget a checkpoint that was being made; see `JoinService.end_save`."""
        if checkpoint in (None, self._saving):
            self._slices = []
        self._server.end_save(checkpoint)

    # -------------------------------------------------------------- training

    def poll(self, token: int, seen: int) -> dict[str, Any]:
        """Return new events and the state of the run to a run actor.

        Args:
            token: fencing token of the run actor.
            seen: events that it has.

        Raises:
            LeaseLostError: a later run actor has attached.
            RegionLostError: a standby may have replaced this server.
        """
        self._fence.check(token)
        with self._server.lock:
            if self._server.is_fenced:
                raise RegionLostError("the server has ended without its standby")
            service = self._server.service
            seen, events = self._server.events(seen)
            return {
                "stage": service.stage.value,
                "missing": service.missing(),
                "saves": service.saves,
                "awaited": service.awaited(),
                "events": events,
                "seen": seen,
                "now_s": self._server.now_s(),
                "failure": service.failure,
                "save": None if service.save is None else service.save.shown(),
                "rounds": service.version,
                "members": list(service.steps),
                "interval": service.averagers.interval,
                "stalled_s": self._server.stalled_s,
            }

    def links(self) -> dict[str, dict[str, int]]:
        """Return the bytes received from each region, and sent to it."""
        return _sums_of({k: v for k, v in self._server.links().items() if k != STANDBY})

    def lose_holder(self, holder: int, cause: str) -> None:
        """End the run: a process that holds slices is lost."""
        self._server.lose_holder(holder, cause)

    def request_stop(self) -> None:
        """Let all regions finish with their next answer."""
        self._server.request_stop()

    def set_interval(self, steps: int) -> None:
        """Change the steps between exchanges, for all regions."""
        self._server.set_interval(steps)

    def lose(self, region: str, cause: str) -> None:
        """Continue without a region."""
        self._server.lose(region, cause)

    def end(self, cause: str, drain_s: float) -> None:
        """End the run at once: tell all ranks, and close all connections.

        Args:
            cause: why.
            drain_s: longest wait until ranks know it.
        """
        self._server.end(cause)
        self._server.close(drain_s)

    def model(self) -> str:
        """Return the layout of the model as text."""
        layout = self._server.service.layout
        return "[]" if layout is None else layout.to_json()

    def buffers(self) -> tuple[tuple[BufferEntry, ...], bytes]:
        """Return the description of the model buffers, and their final values, (B,)."""
        service = self._server.service
        return service.buffer_layout.entries, service.buffers_B.numpy().tobytes()

    def model_piece(self, start: int, stop: int) -> bytes:
        """Return a part of the final parameters of its range of the model."""
        return self._server.service.model_P[start:stop].numpy().tobytes()

    def close(self) -> None:
        """Close all connections."""
        self._server.close()


def _sums_of(links: Mapping[str, PeerStats]) -> dict[str, dict[str, int]]:
    """Return the bytes received from each region, and sent to it, over all its ranks."""
    found: dict[str, dict[str, int]] = {}
    for peer, each in links.items():
        if region_of(peer) == SERVER:
            continue  # between the processes that hold slices
        counts = found.setdefault(region_of(peer), {"sent": 0, "received": 0})
        counts["sent"] += sum(each["bytes_sent"].values())
        counts["received"] += sum(each["bytes_received"].values())
    return found


def serve(setup: RunSetup, resume: Resumption | None) -> Summary:
    """Serve a run to the regions that join it, until all have finished.

    If the averager's process or all regions are lost, it continues from the newest checkpoint, as
    often as ``checkpoint.restarts`` allows, and waits for the regions to join again.

    Args:
        setup: the run.
        resume: how the run continues; None: it starts from the beginning.

    Raises:
        CheckpointError: the run is resumed, and has no checkpoint that can be read.
        PreflightError: the run starts, and the cluster is not fit.
        GeoRayError: the run ended early; the error says why.
    """
    run, reporting, config = setup.run, setup.reporting, setup.experiment.checkpoint
    restarts = Restarts(
        config.restarts, setup.experiment.train.restart_window_s, "checkpoint.restarts"
    )
    places = places_of(run, config)
    store = CheckpointStore(places.root(), config.keep, writing=setup.lease.writing)
    checked = CheckedCluster()
    try:
        if resume is None:
            check_unused(store)
            checked = check_places(setup, demands_of(setup.experiment))
        while True:
            try:
                return _serve_once(setup, store, resume, checked, restarts)
            except (RegionLostError, RankLostError) as error:
                if not _is_served_again(setup.reporting, store, restarts):
                    raise
                restarts.take(time.monotonic())
                reporting.status(f"{error.message}: restarting from the newest checkpoint")
                resume = Resumption(waits=True)
    except BaseException as error:
        note_failure(run.path, error, reporting.began_unix_s)
        raise


def _is_served_again(reporting: Reporting, store: CheckpointStore, restarts: Restarts) -> bool:
    """Return whether a run whose regions or processes are lost continues from a checkpoint."""
    is_over = reporting.interruption.is_set() or not store.ids()
    return not is_over and restarts.is_left(time.monotonic())


def _serve_once(
    setup: RunSetup,
    store: CheckpointStore,
    resume: Resumption | None,
    checked: CheckedCluster,
    restarts: Restarts,
) -> Summary:
    experiment, run, launcher = setup.experiment, setup.run, setup.launcher
    folder = run.path / JOIN_FOLDER
    found = None if resume is None else find_checkpoint(store, resume, setup.reporting)
    saved = None if found is None else read_saved(found, experiment)
    run_id = write_credentials(experiment, folder)
    launcher.attach(setup.lease.token)
    launcher.begin(run_id, experiment.region_names, experiment.transport)
    task, manifest_address = _prepared(experiment, run)
    demands = demands_of(experiment)
    placed = launcher.place(demands, _START_S + checked.longest_s)
    try:
        checked.check_joining(demands, setup.reporting.status)
        terms, places = terms_of(experiment), placed[SERVER]
        averagers = AveragerProcesses(experiment, terms, launcher, places, folder)
        averagers.start(saved, setup.reporting.observer.awaiting)
        spec = RunSpec(
            experiment_json=experiment.model_dump_json(),
            base_dir=str(run.base_dir),
            working_dir=str(Path.cwd()),
            manifest_address=manifest_address,
            run_id=run_id,
            run_dir=str(run.path),
        )
        own = {r.name: JoinCredentials.read(folder / f"{r.name}.pem") for r in experiment.groups}
        saved_in = f"{places_of(run, experiment.checkpoint).main}-ranks"
        groups = Groups(experiment, spec, launcher, placed, averagers, saved_in, own)
        checkpoints = ServedCheckpoints(store, experiment, averagers, setup.lease.token)
        plans = ServedPlans(
            experiment,
            averagers,
            planner_of(run, experiment),
            setup.reporting.status,
            ReplanPolicy(),
        )
        try:
            step = None if found is None else found.manifest.step
            served = _Serving(
                setup, averagers, groups, task, checkpoints, step, store, restarts, plans
            )
            return served.run()
        except GeoRayError as error:
            raise groups.cause_of(error) from error
        finally:
            plans.close()
            checkpoints.close()
            averagers.close()
    finally:
        launcher.remove(placed)


def _prepared(experiment: Experiment, run: RunDirectory) -> tuple[Task | None, str]:
    """Return the task and the address of its manifest; None and "" if no group trains a task."""
    regions = experiment.task_regions
    if not regions:
        return None, ""
    task = load_task(experiment.task, run.base_dir)
    own = experiment.model_copy(update={"regions": regions})
    manifest, address = prepare_manifest(own, task, run.base_dir, run.data)
    check_evaluation(own, task, manifest)
    return task, address


def reach_note(address: str) -> str:
    """Return a warning if other machines cannot reach the address of a run, or ""."""
    host, _ = parse_address(address)
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        return ""
    return (
        f"{host} is a loopback address, which only this machine can reach: set serve.advertise to "
        "the machine's name or IP, and serve.host to an address that others reach"
    )


def awaited_text(
    awaited: Mapping[str, tuple[float, str | None]],
    now_s: float,
    unix_s: float,
    longest_s: float,
    groups: Collection[str] = (),
) -> str:
    """Return which regions the others wait for, since when, and what to do; "" for none.

    Args:
        awaited: see `JoinService.awaited`.
        now_s: present time of the same clock.
        unix_s: present time.
        longest_s: longest wait for a lost region.
        groups: regions whose loops geo_ray starts.
    """
    found = []
    for name, (since_s, cause) in sorted(awaited.items()):
        if cause is None and now_s - since_s < _LATE_S:
            continue
        at = time.strftime("%H:%M:%S", time.localtime(unix_s - (now_s - since_s)))
        why, remedy = "the others have sent their updates", "see whether its loop still steps"
        if cause is not None:
            why = f"it was lost: {cause}"
            who = "geo_ray starts" if name in groups else "start"
            remedy = f"{who} its loop again within {longest_s:g} s (members.wait_s)"
        found.append(f"waiting for region '{name}' since {at} ({why}): {remedy}")
    return "; ".join(found)


class ServedPlans:
    """Replans a served run that follows a plan when its regions change.

    Only the interval can change: the averager stays with the process that serves the run.

    Args:
        experiment: the run.
        averagers: where it is served.
        plan_for: plans; None: the run follows no plan.
        status: shows the current activity.
        policy: decides when.
    """

    def __init__(
        self,
        experiment: Experiment,
        averagers: AveragerProcesses,
        plan_for: PlanFor | None,
        status: StatusLine,
        policy: ReplanPolicy,
    ) -> None:
        self._averagers, self._status = averagers, status
        self._leader = CurrentLeader(experiment.averager_region)
        self._local_steps = max(1, experiment.worker_steps)
        self._events: list[dict[str, Any]] = []
        self._watch = PlanWatch(policy, plan_for, self)

    def tick(self, found: Mapping[str, Any], now_s: float) -> None:
        """Plan if it is due, and use the result.

        Args:
            found: answer of `AveragerActor.poll`.
            now_s: monotonic time.
        """
        steps = found["interval"]
        interval = None if steps is None else steps * self._local_steps
        self._watch.tick(found["members"], self._leader, now_s, interval)

    def server_replaced(self) -> None:
        """Ask the promoted standby for the interval, whose log may end before the change."""
        self._watch.leader_moved()

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call, without times."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Wait for planning in progress."""
        self._watch.close()

    # -------------------------------------------------------------- `PlanServices`

    def emit(self, kind: str, **fields: Any) -> None:
        """See `PlanServices.emit`."""
        self._events.append({"kind": kind, **fields})

    def show(self, text: str) -> None:
        """See `PlanServices.show`."""
        self._status(text)

    def set_interval(self, interval: int) -> None:
        """See `PlanServices.set_interval`."""
        self._averagers.ask("set_interval", max(1, interval // self._local_steps))

    def move_averager(self) -> None:
        """See `PlanServices.move_averager`."""
        raise InvariantError("the averager of a served run cannot move")


class _Serving:
    """The loop of a served run."""

    def __init__(
        self,
        setup: RunSetup,
        averagers: AveragerProcesses,
        groups: Groups,
        task: Task | None,
        checkpoints: ServedCheckpoints,
        resumed_step: int | None,
        store: CheckpointStore,
        restarts: Restarts,
        plans: ServedPlans,
    ) -> None:
        self._plans = plans
        self._setup, self._averagers, self._seen = setup, averagers, 0
        self._store, self._restarts = store, restarts
        self._groups, self._task = groups, task
        self._checkpoints, self._resumed_step = checkpoints, resumed_step
        self._before_s = 0.0  # time of the run's clock at this start
        self._origin_unix_s = 0.0
        self._traffic_s = time.monotonic() + _TRAFFIC_S  # of the next record of traffic
        log = setup.run.path / EVENTS_FILE
        known = read_events(log) if log.exists() else ()
        self._stopping = StoppingRule(setup.experiment.train, known, is_strict=False)
        self._stops = self._is_interrupted = False
        self._shown = ""  # what is awaited

    def run(self) -> Summary:
        """Poll the averager to the end of the run; write model and summary."""
        try:
            return self._run()
        except KeyboardInterrupt:
            self._averagers.end("it was stopped at once")
            raise

    def _run(self) -> Summary:
        setup, reporting = self._setup, self._setup.reporting
        run, experiment = setup.run, setup.experiment
        folder = run.path / JOIN_FOLDER
        served_at = ", ".join([self._averagers.address, *self._averagers.holder_addresses])
        reporting.status(f"serving at {served_at}; credentials: {folder}/REGION.pem")
        joins = len(experiment.groups) < len(experiment.regions)
        if joins and (note := reach_note(self._averagers.address)):
            reporting.status(note)
        found = self._await_regions()
        startup_s = time.time() - reporting.began_unix_s
        summing = Summing(experiment.train.target)
        path = run.path / EVENTS_FILE
        if path.exists():
            for event in read_events(path):
                summing.feed(event)
            self._before_s = last_time_s(path)
        self._origin_unix_s = time.time() - found["now_s"] - self._before_s
        order = ExportOrder(run.path, run.base_dir, self._origin_unix_s)
        with (
            EventLog(path) as log,
            exporting(experiment.observe.export, order) as export,
        ):
            sinks = [reporting.observer.on_event, RayMetrics().feed, export.feed]
            recorder = Recorder(log, sinks, setup.lease.check)
            address = self._averagers.address
            about: dict[str, object] = {"startup_s": startup_s, "address": address}
            about["pid"] = self._averagers.pid
            if self._averagers.holder_addresses:
                about["holders"] = list(self._averagers.holder_addresses)
            if experiment.groups:
                about["ranks"] = {
                    region.name: region.group.world_size
                    for region in experiment.groups
                    if region.group is not None
                }
            if self._task is not None and experiment.knows_task:
                about |= RowWork.of(self._task).fields()
            if self._resumed_step is not None:
                about["resumed_step"] = self._resumed_step
            began_s = found["now_s"] + self._before_s
            started = recorder.started(experiment, run.path.name, began_s, simulated=False, **about)
            summing.feed(started)
            self._record(recorder, summing, found)
            while found["stage"] not in _ENDS:
                time.sleep(_POLL_S if found["save"] is None else _SAVING_S)
                found = self._poll()
                self._record(recorder, summing, found)
                if time.monotonic() >= self._traffic_s:
                    self._note_traffic(recorder, summing)
            if found["stage"] == Stage.STOPPED.value:
                self._note_traffic(recorder, summing)
                self._groups.finish()
                self._averagers.finish()
                raise self._stopped()
            self._save_last(recorder, summing)
            return self._finish(recorder, summing, startup_s)

    def _note_traffic(self, recorder: Recorder, summing: Summing) -> None:
        """Record the bytes between regions and server so far."""
        self._traffic_s = time.monotonic() + _TRAFFIC_S
        now_s = time.time() - self._origin_unix_s
        for region, counts in self._averagers.links().items():
            for src, dst, count in ((region, SERVER, "received"), (SERVER, region, "sent")):
                event = recorder.emit(
                    "wan", now_s, src=src, dst=dst, bytes_by_class={"update": counts[count]}
                )
                summing.feed(event)

    def _stopped(self) -> GeoRayError:
        """Return the error of a run that was stopped, with the outcome of its checkpoint."""
        why, cause = self._setup.reporting.interruption.why, self._checkpoints.outcome
        if cause:
            return type(why)(f"{why.message}; no new checkpoint was made: {cause}")
        experiment = self._setup.experiment
        is_joined = len(experiment.groups) < len(experiment.regions)
        rest = " Then start the loops of the regions again." if is_joined else ""
        return type(why)(f"{why.message}; its state is saved", fix=f"{why.fix}{rest}")

    def _save_last(self, recorder: Recorder, summing: Summing) -> None:
        """Save a last checkpoint, so that training can continue from the very end."""
        if not self._setup.experiment.checkpoint.is_periodic:
            return
        self._await_checkpoint(recorder, summing)  # of an earlier step, if one is being made
        if self._checkpoints.begin_last():
            self._setup.reporting.status("saving the last checkpoint")
            self._await_checkpoint(recorder, summing)
        self._averagers.ask("end_save", None)  # lets the ranks leave

    def _await_checkpoint(self, recorder: Recorder, summing: Summing) -> None:
        """Wait until no checkpoint is being made, or the run is interrupted."""
        while self._checkpoints.is_open and not self._setup.reporting.interruption.is_set():
            time.sleep(_POLL_S)
            self._record(recorder, summing, self._poll())

    def _await_regions(self) -> dict[str, Any]:
        """Wait until all regions are there."""
        reporting, shown, since = self._setup.reporting, "", time.strftime("%H:%M:%S")
        experiment = self._setup.experiment
        all_started = len(experiment.groups) == len(experiment.regions)
        remedy = (
            "" if all_started else f": start loops with this address and {JOIN_FOLDER}/REGION.pem"
        )
        while True:
            found = self._poll()
            if found["stage"] not in (Stage.GATHERING.value, Stage.STARTING.value):
                reporting.status("")
                return found
            if reporting.interruption.is_set():
                self._averagers.end("it was stopped before it began")
                raise reporting.interruption.why
            absent = self._groups.starting
            missing = ", ".join(
                f"{name} ({absent.get(name, why) if why == ABSENT else why})"
                for name, why in found["missing"].items()
            )
            text = f"{self._averagers.address}: waiting for the initial parameters"
            if missing:
                text = f"{self._averagers.address}: waiting for {missing} since {since}{remedy}"
            if text != shown:
                reporting.status(text)
                shown = text
            time.sleep(_POLL_S)

    def _poll(self) -> dict[str, Any]:
        """Ask the averager for news.

        Raises:
            RegionLostError: the averager is lost, or all regions are.
            KeyboardInterrupt: the run must end at once.
        """
        self._setup.reporting.observer.check()
        found: dict[str, Any] = self._averagers.ask("poll", self._setup.lease.token, self._seen)
        self._seen = found["seen"]
        self._averagers.watch(found["stalled_s"])
        if isinstance(failure := found["failure"], GeoRayError):
            ends = not isinstance(failure, RegionLostError) or not _is_served_again(
                self._setup.reporting, self._store, self._restarts
            )
            if ends:  # otherwise the regions find the run again
                self._averagers.finish()
            raise failure
        if found["stage"] not in _ENDS:
            self._groups.watch(Stage(found["stage"]))
        interruption = self._setup.reporting.interruption
        if take_stop_request(self._setup.run.path):
            interruption.set()
        if self._stops and found["stage"] == Stage.TRAINING.value:
            self._averagers.actor.request_stop.remote()  # again: the server may be lost
        return found

    def _record(self, recorder: Recorder, summing: Summing, found: Mapping[str, Any]) -> None:
        trains = found["stage"] == Stage.TRAINING.value
        experiment = self._setup.experiment
        groups = [region.name for region in experiment.groups]
        awaited = awaited_text(
            found["awaited"], found["now_s"], time.time(), experiment.members.wait_s, groups
        )
        if awaited != self._shown:
            self._shown = awaited
            self._setup.reporting.status(awaited)
        halts = trains and self._setup.reporting.interruption.is_set()
        if halts and not self._is_interrupted:
            self._note_interruption(recorder, found)
        saved = self._checkpoints.poll(found["save"], found["rounds"], trains=trains, halts=halts)
        self._groups.note(found["events"])
        served = self._averagers.news()
        if any(each["kind"] == "server_replaced" for each in served):
            self._plans.server_replaced()
        if trains and not self._stops and not halts:
            self._plans.tick(found, time.monotonic())
        own = [*served, *self._groups.news(), *saved, *self._plans.news()]
        for each in [*({**each, "t_s": found["now_s"]} for each in own), *found["events"]]:
            values = dict(each)
            if values["kind"] == "eval":
                self._rate(values)
            values |= {name: values[name] + self._before_s for name in TIMES if name in values}
            event = recorder.emit(values.pop("kind"), values.pop("t_s"), **values)
            summing.feed(event)
            stop = self._stopping.after(event)
            if stop is not None and not self._stops:
                self._stops = True
                recorder.emit("stop_requested", event.t_s, **stop.model_dump())

    def _note_interruption(self, recorder: Recorder, found: Mapping[str, Any]) -> None:
        """Record the request to stop; a run without checkpoints ends with its present model."""
        self._is_interrupted, reporting = True, self._setup.reporting
        why = reporting.interruption.why
        recorder.emit("stop_requested", found["now_s"] + self._before_s, cause=why.message)
        if found["saves"]:
            what = "saving a checkpoint at the next exchange of all regions, then stopping"
        else:
            self._stops = True  # the next `_poll` says so
            what = "no region saves checkpoints: finishing with the next exchange"
        reporting.status(f"{what} (Ctrl-C again: stop at once)")

    def _rate(self, evaluation: dict[str, Any]) -> None:
        """Replace the means of an evaluation by the metrics of the task, if its regions have it."""
        sums, experiment = evaluation.pop("sums"), self._setup.experiment
        own = {region.name for region in experiment.task_regions}
        region = evaluation["region"]
        if self._task is not None and own >= ({region} if region else {*experiment.region_names}):
            stats = {name: np.array(total) for name, total in sums.items()}
            evaluation["metrics"] = checked_metrics(self._task, stats)

    def _finish(self, recorder: Recorder, summing: Summing, startup_s: float) -> Summary:
        self._groups.finish()
        run, experiment = self._setup.run, self._setup.experiment
        self._note_traffic(recorder, summing)
        now_s = time.time() - self._origin_unix_s
        layout, params_P = self._averagers.fetch_model()
        found = digest(params_P)
        entries, values = self._averagers.ask("buffers")
        self._averagers.finish()
        buffers_B = torch.frombuffer(bytearray(values), dtype=torch.uint8) if entries else None
        summary = summing.summary(startup_s=startup_s, digest=found)
        if self._task is not None:
            about = about_model(experiment, summary.steps, summary.eval)
            save_trained(self._task, experiment.seed, params_P, run.model, about, buffers_B)
        else:
            root = module_of(layout, params_P)
            if buffers_B is not None:
                add_buffers(root, BufferLayout(entries), buffers_B)
            save_module(root, run.model, {"run": run.path.name})
        save_summary(summary, run.path)
        recorder.emit("run_finished", now_s, summary=summary.model_dump(), digests={SERVER: found})
        return summary


def module_of(layout: Layout, params_P: Tensor) -> nn.Module:
    """Return a module that has the parameters of a vector under their names, in their dtypes."""
    root = nn.Module()
    for index, each in enumerate(layout.parameters):
        owner, name = _owner(root, each.name)
        start = layout.start(index)
        part_N = params_P[start : start + each.size].view(each.shape)
        value = part_N.to(getattr(torch, each.dtype), copy=True)
        owner.register_parameter(name, nn.Parameter(value))
    return root


def add_buffers(root: nn.Module, layout: BufferLayout, buffers_B: Tensor) -> None:
    """Add model buffers to the result of `module_of`, as buffers with their names.

    Args:
        root: the module.
        layout: the model buffers.
        buffers_B: their values, uint8 (B,).
    """
    for each in layout.entries:
        owner, name = _owner(root, each.name)
        owner.register_buffer(name, torch.empty(each.shape, dtype=each.torch_dtype))
    layout.write(buffers_B, root)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that has a name, which is made if it is missing; and its last part."""
    *path, last = name.split(".")
    for part in path:
        child = root._modules.get(part)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    return root, last
