"""A whole run on the virtual clock, with the events of a real run.

Regions, links, overlay, averager, checkpoints in memory, and scheduled worker losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import Tensor

from geo_ray.base.errors import InvariantError, RegionLostError
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Stats, Task
from geo_ray.data.tasks.checked_calls import checked_model
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import build_averager, build_evals, check_start, model_start, with_shapes
from geo_ray.runs.data import data_rows
from geo_ray.runs.evaluation import BestKeeper, Emit, EvalNotes, Evaluation, StoppingRule
from geo_ray.simulator.clock import Scheduler
from geo_ray.simulator.exchange import build_paths
from geo_ray.simulator.network import Network
from geo_ray.simulator.region import MANY, Gradients, SimContext, SimRegion
from geo_ray.telemetry.summary import EarlyStop
from geo_ray.training.averager import (
    Averager,
    AveragerFactory,
    open_requests,
    stalled_error,
    stalled_regions,
)
from geo_ray.training.checkpoint_parts import AveragerSnapshot
from geo_ray.training.command_log import install_snapshot, resume_averager, snapshot_of
from geo_ray.training.effects import ActiveWorkersChanged, SendUpdate, Snapshot, StepDone
from geo_ray.training.failover import next_standby
from geo_ray.training.membership import MemberChange, ShardState, donor_of, rows_of
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.state_guard import StateChange
from geo_ray.training.worker import StatisticsCollector


@dataclass(slots=True)
class SimCheckpoint:
    """One checkpoint.

    Attributes:
        regions: the primary shard's part and the shards' parts by region.
        averager: the averager's part.
        is_whole: whether every part is here that was to come.
    """

    regions: dict[str, tuple[Snapshot, list[ShardState]]] = field(default_factory=dict)
    averager: AveragerSnapshot | None = None
    is_whole: bool = False

    @property
    def step(self) -> int:
        """The most steps that a region had applied."""
        return max(int(str(primary.control["version"])) for primary, _ in self.regions.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [] if self.averager is None else list(self.averager.tensors.values())
        for primary, shards in self.regions.values():
            tensors += primary.tensors.values()
            tensors += [tensor for state, _ in shards for tensor in state.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def check_whole(self) -> None:
        """Refuse one of which parts are missing.

        Raises:
            InvariantError: they are.
        """
        if not self.is_whole:
            raise InvariantError(f"a checkpoint with the parts of {sorted(self.regions)}")

    def rows_of_others(self, present: Collection[str]) -> dict[str, dict[str, object]]:
        """Sample ledgers of the regions that have left."""
        others = {name: parts for name, parts in self.regions.items() if name not in present}
        return {name: rows_of(primary.control) for name, (primary, _) in others.items()}

    def close(self, members: Collection[str], *, has_averager: bool) -> bool:
        """Note whether it is whole by now; True once, when it has become so."""
        if self.is_whole or has_averager != (self.averager is not None):
            return False
        self.is_whole = set(self.regions) == set(members)
        return self.is_whole


@dataclass(slots=True)
class SimCheckpoints:
    """Checkpoints of a simulated run.

    Attributes:
        by_id: complete and pending checkpoints.
        has_averager: whether each has an averager's part.
        next_id: id of the next periodic checkpoint.
    """

    has_averager: bool
    by_id: dict[int, SimCheckpoint] = field(default_factory=dict)
    next_id: int = 0
    _given_up: set[int] = field(default_factory=set)

    def begin_next(self) -> int | None:
        """Begin the next checkpoint and return its id; None while one is pending."""
        known = self.by_id.get(self.next_id - 1)
        if known is not None and not known.is_whole:
            return None
        for old in [number for number in self.by_id if number < self.next_id]:
            del self.by_id[old]
        self.next_id += 1
        return self.next_id - 1

    def add_averager(self, part: AveragerSnapshot) -> None:
        """Add the averager's part."""
        if part.id not in self._given_up:
            self.by_id.setdefault(part.id, SimCheckpoint()).averager = part

    def add_region(
        self, name: str, primary: Snapshot, shards: list[ShardState], members: Collection[str]
    ) -> SimCheckpoint | None:
        """Add a region's parts; returns the checkpoint if it is complete."""
        if primary.id in self._given_up:
            return None
        checkpoint = self.by_id.setdefault(primary.id, SimCheckpoint())
        checkpoint.regions[name] = (primary, shards)
        return checkpoint if checkpoint.close(members, has_averager=self.has_averager) else None

    def abandon(self) -> None:
        """Drop incomplete checkpoints, because a region is lost."""
        open_ones = {number for number, saved in self.by_id.items() if not saved.is_whole}
        self._given_up |= open_ones
        for number in open_ones:
            del self.by_id[number]


@dataclass(slots=True)
class SimLeader:
    """Averager and its region.

    Attributes:
        experiment: experiment.
        make: builds a new averager.
        averager: present averager.
        region: leader.
        term: 1; grows by 1 with each failover.
        is_down: whether its region is lost and no standby has taken over yet.
    """

    experiment: Experiment
    make: AveragerFactory
    averager: Averager = field(init=False)
    region: str = field(init=False)
    term: int = 1
    is_down: bool = False

    def __post_init__(self) -> None:
        self.averager, self.region = self.make(), self.experiment.averager_region

    def hears(self, term: int) -> bool:
        """Tell whether a message to the leader of ``term`` reaches the averager."""
        return term == self.term and not self.is_down

    def heir(self, alive: Collection[str]) -> str | None:
        """Return the region that takes over next; None if there is none."""
        view = self.averager.view
        able = {name for name in view.members if name in alive and name not in view.joining}
        return next_standby(self.experiment.averager.named_standbys, able - {self.region}, {})

    def move(self, region: str) -> None:
        """Continue in another region."""
        averager = self.make()
        install_snapshot(averager, snapshot_of(self.averager))
        averager.on_failover(region)
        self.averager, self.region, self.is_down = averager, region, False
        self.term += 1


@dataclass(slots=True)
class SimNotes:
    """Emits the events of a simulation.

    Attributes:
        emit: receives the events.
        scheduler: virtual time.
        network: network with traffic counters.
    """

    emit: Emit
    scheduler: Scheduler
    network: Network
    _applied_s: dict[str, float] = field(default_factory=dict)

    def sent(self) -> dict[tuple[str, str], dict[str, int]]:
        """Return the bytes so far by (source, destination) and class."""
        sent = {pair: dict(classes) for pair, classes in self.network.sent_bytes.items()}
        for (src, dst), classes in sorted(sent.items()):
            self.emit("wan", self.scheduler.now_s, src=src, dst=dst, bytes_by_class=classes)
        return sent

    def exchange(
        self, send: SendUpdate, reply: ReplyMessage, began_s: float, wire: RegionWire
    ) -> None:
        """Record the answer to a request sent at ``began_s``."""
        before = 4 * wire.num_of(send.update.fragment)
        event = send.event(send.update, reply, began_s, before)
        self.emit("exchange", self.scheduler.now_s, region=reply.to, **event)

    def step(self, name: str, done: StepDone, began_s: float, ago_s: float) -> None:
        """A region has made a step, which ended ``ago_s`` before its report."""
        now_s = self.scheduler.now_s
        ended_s = now_s - ago_s
        event = done.event(began_s, self._applied_s.get(name, 0.0), ended_s)
        self._applied_s[name] = ended_s
        self.emit("step", now_s, region=name, **event)
        for cause in done.refused:
            self.emit("step_refused", now_s, region=name, step=done.step, cause=cause)
        if done.noise is not None:
            self.emit("noise", now_s, region=name, **done.noise.fields())

    def changed(self, name: str, step: int, change: StateChange) -> None:
        """Record an undeclared state change in a region's step."""
        about = {"region": name, "step": step, "how": change.how, "names": change.names}
        self.emit("state_changed", self.scheduler.now_s, **about)

    def active_workers(self, name: str, changed: ActiveWorkersChanged) -> None:
        """A region's workers have changed."""
        self.emit("active_workers", self.scheduler.now_s, region=name, **changed.event())


WorkerEvent = Literal["lost", "drained", "replaced"]


class SimWorkers:
    """Schedules losses, drains and replacements of workers.

    Args:
        regions: regions; may change.
        scheduler: virtual time.
        emit: receives the events.
    """

    def __init__(self, regions: Mapping[str, SimRegion], scheduler: Scheduler, emit: Emit) -> None:
        self._regions = regions
        self._scheduler = scheduler
        self._emit = emit
        self._coming: Counter[str] = Counter()  # replacements that have not happened yet

    def at(self, when_s: float, region: str, rank: int, what: WorkerEvent) -> None:
        """Schedule an event of a worker at ``when_s``, unless the run is over by then.

        Args:
            when_s: time of the event.
            region: worker's region.
            rank: worker's rank.
            what: loss of its process, a termination notice, or a replacement.
        """
        self._coming[region] += what == "replaced"
        self._scheduler.idly_at(when_s, partial(self._happen, region, rank, what))

    def _happen(self, name: str, rank: int, what: WorkerEvent) -> None:
        self._coming[name] -= what == "replaced"
        region, now_s = self._regions.get(name), self._scheduler.now_s
        if region is not None:
            about = {"region": name, "worker": rank}
            if what == "lost":
                self._emit("worker_lost", now_s, cause="its process ended", **about)
                region.lose_worker(rank)
            elif what == "drained":
                self._emit("worker_left", now_s, cause="its machine will be gone", **about)
                region.drain_worker(rank)
            else:
                attempt = region.replace_worker(rank)
                self._emit("worker_replaced", now_s, attempt=attempt, **about)

    def are_awaited(self) -> bool:
        """Tell whether a region is paused until a replacement that is scheduled."""
        return any(
            self._coming[name] > 0 and region.lacks_workers
            for name, region in self._regions.items()
        )


LAN_S = 0.0012
"""Seconds of one message between a worker and its parameter server on one machine."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """Result of a simulated run.

    Attributes:
        seconds: predicted duration of the training.
        params_P: final parameters by region.
        sent_bytes: bytes by (source, destination) and class.
        rounds: commits of the averager.
        buffers_B: final model buffers by region, uint8 (B,); None without any.
    """

    seconds: float
    params_P: dict[str, Tensor]
    sent_bytes: dict[tuple[str, str], dict[str, int]]
    rounds: int
    buffers_B: dict[str, Tensor | None]


class World:
    """One simulated run.

    Args:
        experiment: experiment.
        task: task.
        manifest: data.
        emit: receives the events.
        lan_s: seconds of one message inside a region.
        keeper: saves the best evaluated model; None without one.
    """

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        manifest: Manifest,
        emit: Emit,
        lan_s: float = LAN_S,
        keeper: BestKeeper | None = None,
    ) -> None:
        experiment = with_shapes(experiment, task)
        start = model_start(task, experiment.seed)
        check_start(experiment, start)
        params_P = start.params_P
        self._experiment = experiment
        self._num_params = params_P.numel()
        self._emit = emit
        self._scheduler = Scheduler()
        self._network = Network(experiment)
        self._notes = SimNotes(emit, self._scheduler, self._network)
        rows = data_rows(experiment, manifest)
        self._leader = SimLeader(
            experiment, partial(build_averager, experiment, params_P.numel(), rows, start.layout)
        )
        self._lossy, self._turns, self._overlay = build_paths(
            experiment,
            self._num_params,
            self._network,
            self._scheduler,
            self,
        )
        collector = build_evals(experiment, task)
        self._evals = EvalNotes(collector, emit, StoppingRule(experiment.train), keeper)
        self._open: dict[str, tuple[float, SendUpdate]] = {}
        self._arrived_s: dict[str, float] = {}
        self._wake_s: float | None = None
        self._saved = SimCheckpoints(len(experiment.regions) > 1)
        gradients = None if start.layout.entries else _batched(experiment, task)
        candidates = None if keeper is None else keeper.candidates
        around = SimContext(self._scheduler, lan_s, gradients, candidates)
        self._statistics = StatisticsCollector(start.layout, rows)
        self._go_on: dict[str, Callable[[Tensor], None]] = {}
        self._regions = {
            region.name: partial(SimRegion, experiment, region, task, manifest, start, around, self)
            for region in experiment.regions
        }
        self._rows: dict[str, dict[str, object]] = {}  # sample ledgers of earlier members
        self._transferring: set[str] = set()  # joining regions with a state transfer in flight
        self.regions = {name: self._regions[name]() for name in experiment.present_names}
        self.workers = SimWorkers(self.regions, self._scheduler, emit)

    @property
    def averager(self) -> Averager:
        """The averager at work."""
        return self._leader.averager

    @property
    def checkpoints(self) -> dict[int, SimCheckpoint]:
        """Saved checkpoints by id."""
        return self._saved.by_id

    def run(self) -> SimResult:
        """Train to the end.

        Raises:
            NonFiniteError: a region refused too many steps in a row, or sent values that are not
                finite.
            StalledError: the averager leaves regions without an answer.
            GeoRayError: failure of the averager.
            InvariantError: a region waits for an event that never comes.
        """
        every_s = self._experiment.checkpoint.every_s
        if every_s is not None:
            self._scheduler.idly_at(every_s, partial(self._save_regularly, every_s))
        self.averager.at(self._scheduler.now_s)
        for region in self.regions.values():
            region.start()
        self._answered([])  # a restored averager may have to be woken
        self._scheduler.run(self.workers.are_awaited)
        stuck = {n: r.server.phase for n, r in self.regions.items() if r.server.phase != "done"}
        if stuck:
            still = {name: self.regions[name].server.blocked_on for name in stuck}
            waits = stalled_regions(still, open_requests(self.averager))
            if waits:
                raise stalled_error(waits)
            raise InvariantError(f"nothing is left to happen, but regions wait: {stuck}")
        return SimResult(
            self._scheduler.now_s,
            {name: region.params_P for name, region in self.regions.items()},
            self._notes.sent(),
            self.averager.state.version,
            {name: region.buffers_B for name, region in self.regions.items()},
        )

    def checkpoint_at(self, when_s: float, checkpoint: int) -> None:
        """Begin a checkpoint at ``when_s``; it is in `checkpoints` once complete."""
        self._scheduler.at(when_s, partial(self._save, checkpoint))

    def lose_at(self, when_s: float, region: str | None, noticed_s: float = 0.0) -> None:
        """End all processes of a region at ``when_s``.

        The other regions continue without it ``noticed_s`` later; if it hosts the averager, the
        standby takes over then. Without a standby, nothing happens: a run would end there.

        Args:
            when_s: virtual time.
            region: region; None for the leader of that time.
            noticed_s: seconds until the others notice.

        Raises:
            InvariantError: the region hosts the averager, and there is no standby.
        """
        leader = self._leader
        if region in {None, leader.region} and self._experiment.averager.standby is None:
            raise InvariantError(f"the averager is in '{leader.region}' and has no standby")
        self._scheduler.at(when_s, partial(self._die, region, noticed_s))

    def _die(self, region: str | None, noticed_s: float) -> None:
        leader, name = self._leader, region or self._leader.region
        takes_over = name == leader.region
        if takes_over and (leader.is_down or leader.heir(self._alive) is None):
            return
        leader.is_down |= takes_over
        if name in self.regions:
            self.regions[name].die()
        then = self._fail_over if takes_over else partial(self._lose, name)
        self._scheduler.at(self._scheduler.now_s + noticed_s, then)

    def cut_at(self, when_s: float, a: str, b: str, for_s: float) -> None:
        """Partition two regions for a time; neither is given up."""
        self._network.cut(a, b, when_s, when_s + for_s)

    @property
    def _alive(self) -> set[str]:
        return {name for name, region in self.regions.items() if not region.is_dead}

    def _fail_over(self) -> None:
        """Continue without the leader, as the remaining regions do."""
        former, heir = self._leader.region, self._leader.heir(self._alive)
        if heir is None:
            raise RegionLostError(
                f"the averager is lost with '{former}', and no standby can take over"
            )
        self._leader.move(heir)
        now_s = self._scheduler.now_s
        self._emit("averager_moved", now_s, region=heir, term=self._leader.term)
        self._saved.abandon()
        self._lose(former)
        for name, (_, send) in self._open.items():
            notice_s = now_s + self._network.delay_s(heir, name)
            self._scheduler.at(notice_s, partial(self._again, name, send.update, self._leader.term))

    def _again(self, name: str, update: UpdateMessage, term: int) -> None:
        """Repeat a region's open request to a new leader."""
        opened = self._open.get(name)
        if opened is not None and opened[1].update is update and term == self._leader.term:
            self.ship(name, update)

    def change_at(
        self, when_s: float, joins: Sequence[str] = (), leaves: Sequence[str] = ()
    ) -> None:
        """Request a membership change at ``when_s``, which happens at the next barrier."""
        self._scheduler.at(when_s, partial(self._change, tuple(joins), tuple(leaves)))

    def _change(self, joins: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        members = self.averager.view.members
        joins = tuple(name for name in joins if name not in members)
        leaves = tuple(name for name in leaves if name in members)
        if not (joins or leaves) or self._leader.is_down or self._leader.region in leaves:
            return
        steps = {name: region.server.version for name, region in self.regions.items()}
        self.averager.at(self._scheduler.now_s)
        self._answered(
            self.averager.change(MemberChange(joins, leaves, donor_of(steps, self._leader.region)))
        )

    def on_state_transfer(
        self, donor: str, on_state_transfer: Snapshot, shards: list[ShardState]
    ) -> None:
        """Send the state of a donor to all joining regions."""
        self._transferring.update(self.averager.view.joining)
        sizes = [t.nbytes for state, _ in shards for t in state.values()]
        sizes += [tensor.nbytes for tensor in on_state_transfer.tensors.values()]
        for name in self.averager.view.joining:
            arrival_s = self._network.arrival_s(
                self._scheduler.now_s, donor, name, sum(sizes), "join"
            )
            begin = partial(
                self._begin, name, on_state_transfer, shards, self._scheduler.now_s, sum(sizes)
            )
            self._scheduler.at(arrival_s, begin)

    def _begin(
        self,
        name: str,
        on_state_transfer: Snapshot,
        shards: list[ShardState],
        asked_s: float,
        size: int,
    ) -> None:
        now_s = self._scheduler.now_s
        self._transferring.discard(name)
        if name not in self.averager.view.joining:  # it was lost during the transfer
            return
        region = self.regions[name] = self._regions[name]()
        region.begin_as(on_state_transfer, shards, self._rows.get(name))
        self._evals.collector.admit(name, region.server.version)
        about = {
            "view": self.averager.view.generation,
            "round": on_state_transfer.round,
            "step": on_state_transfer.step,
        }
        about |= {"bytes": size}
        self._emit("region_joined", now_s, region=name, **about, took_s=now_s - asked_s)
        self.averager.begun(name)
        region.start()

    def _lose(self, region: str) -> None:
        """Continue without a region, as the controller does."""
        now_s = self._scheduler.now_s
        if region not in self.averager.view.members:
            return
        self._forget(region)
        self._emit("region_lost", now_s, region=region, cause="its processes ended")
        before = self.averager.view
        self.averager.at(now_s)
        self._answered(self.averager.leave(region))
        waiting = set(before.joining) - self._transferring if region == before.donor else set[str]()
        for joining in sorted(waiting):
            self._emit("join_failed", now_s, region=joining, cause="no state arrived")
            self._answered(self.averager.leave(joining))

    def _on_left(self, region: str) -> None:
        """A region was asked to leave, and has merged its last answer."""
        self._emit("region_drained", self._scheduler.now_s, region=region, cause="asked")
        self._forget(region)

    def _forget(self, name: str) -> None:
        region = self.regions.pop(name, None)
        if region is None:
            return  # it was joining
        region.die()
        self._rows[name] = region.server.work.ledger.export()
        self._open.pop(name, None)
        self._saved.abandon()
        self._note_evals(self._evals.collector.forget(name))
        self._exchange_statistics()

    def restore(self, checkpoint: SimCheckpoint) -> None:
        """Begin where a whole checkpoint was taken, at 0 s, without regions that are absent now.

        Raises:
            InvariantError: if a part is missing.
        """
        checkpoint.check_whole()
        if checkpoint.averager is not None:
            resume_averager(self.averager, checkpoint.averager.tensors, checkpoint.averager.control)
            if self._lossy is not None:
                self._lossy.restore(checkpoint.averager.control["attachments"])
        for name, region in self.regions.items():
            region.restore(*checkpoint.regions[name])
        self._rows |= checkpoint.rows_of_others(self.regions)

    def _save_regularly(self, every_s: float) -> None:
        """Begin the next checkpoint, as the controller does: none while one is being made."""
        number = self._saved.begin_next()
        if number is not None:
            self._save(number)
        self._scheduler.idly_at(
            self._scheduler.now_s + every_s, partial(self._save_regularly, every_s)
        )

    def _save(self, checkpoint: int) -> None:
        """Begin a checkpoint: first the averager, then each region once it is notified."""
        now_s = self._scheduler.now_s
        if len(self._regions) > 1:
            self.averager.at(now_s)
            if set(self.regions) != set(self.averager.view.members) or self._leader.is_down:
                return  # a region that has left is not notified
            if not self.averager.begin_checkpoint(checkpoint, halt=False):
                return
            self._answered([])
        if self._overlay is not None:
            return  # they are notified by their answers only
        for name, region in self.regions.items():
            notice_s = now_s + self._network.delay_s(self._leader.region, name)
            self._scheduler.idly_at(notice_s, partial(region.snapshot, checkpoint))

    def saved(self, name: str, primary: Snapshot, shards: list[ShardState]) -> None:
        """See `RegionHost`."""
        checkpoint = self._saved.add_region(name, primary, shards, self.regions)
        if checkpoint is not None:
            now_s, step = self._scheduler.now_s, checkpoint.step
            self._emit("checkpoint", now_s, id=primary.id, step=step, bytes=checkpoint.size_bytes)

    def send(self, name: str, send: SendUpdate) -> None:
        """See `RegionHost`."""
        now_s = self._scheduler.now_s
        wire = self.regions[name].server.wire
        if self._lossy is not None:
            self._lossy.recall(name, wire)
        update = wire.encode(send.update)
        self._open[name] = (now_s, replace(send, update=update))
        if self._overlay is not None:
            self._overlay.send(name, update)
        elif self._turns is not None:
            self._turns.send(name, update)
        elif self._lossy is None:
            self.ship(name, update)
        else:
            self._lossy.depart(name, update)

    def skip(self, region: str, attempt: int, seq: int) -> None:
        """See `ExchangeHost`."""
        self._answered(self.averager.on_skip(region, attempt, seq))

    def version(self) -> int:
        """See `ExchangeHost`."""
        return self.averager.state.version

    def is_done(self, name: str) -> bool:
        """See `ExchangeHost`."""
        return self.regions[name].server.phase == "done"

    def changed(self, name: str, step: int, change: StateChange) -> None:
        """See `RegionHost`."""
        self._notes.changed(name, step, change)

    def active_workers(self, name: str, changed: ActiveWorkersChanged) -> None:
        """See `RegionHost`."""
        self._notes.active_workers(name, changed)

    def ship(self, name: str, update: UpdateMessage) -> float:
        """Send an update; returns its arrival time."""
        now_s, size_bytes = self._scheduler.now_s, update.size_bytes
        arrival_s = self._network.arrival_s(now_s, name, self._leader.region, size_bytes, "update")
        lossy, turns = self._lossy, self._turns
        if turns is not None:
            self._scheduler.at(arrival_s, partial(turns.arrived, update))
        elif lossy is None:
            self._scheduler.at(arrival_s, partial(self.take_in, update, self._leader.term))
        else:
            self._scheduler.at(arrival_s, partial(lossy.arrive, update))
        return arrival_s

    def take_in(self, update: UpdateMessage, term: int = 1) -> None:
        """See `ExchangeHost`."""
        view = self.averager.view  # a region that has left may not know it
        if update.region not in (*view.members, *view.left) or not self._leader.hears(term):
            return  # it is refused, or lost, and no region would receive the refusal
        self._arrived_s[update.region] = self._scheduler.now_s
        self.averager.at(self._scheduler.now_s)
        self._answered(self.averager.on_update(update))

    def _on_wake(self) -> None:
        wake_s, now_s = self.averager.wakes_s, self._scheduler.now_s
        if wake_s is not None and wake_s <= now_s and not self._leader.is_down:
            self.averager.at(now_s)
            self._answered(self.averager.on_wake())

    def _answered(self, replies: list[ReplyMessage]) -> None:
        wake_s = self.averager.wakes_s
        if wake_s is not None and wake_s != self._wake_s:
            self._wake_s = wake_s
            self._scheduler.at(wake_s, self._on_wake)
        for snapshot in self.averager.snapshots:
            attachments = {} if self._lossy is None else self._lossy.export(self.averager.last)
            snapshot.control["attachments"] = attachments
            self._saved.add_averager(snapshot)
        self.averager.snapshots.clear()
        for reading in self.averager.noise.news():
            self._emit("noise", self._scheduler.now_s, region=None, **reading.fields())
        for reply in replies:
            self._return(reply)

    def _return(self, reply: ReplyMessage) -> None:
        if self._overlay is not None:
            self._overlay.answered(reply)
            return
        if self._lossy is not None:
            reply = self._lossy.attach(reply)
        now_s = self._scheduler.now_s
        reply = replace(reply, held_s=now_s - self._arrived_s.get(reply.to, now_s))
        size_bytes = reply.size_bytes
        arrival_s = self._network.arrival_s(
            now_s, self._leader.region, reply.to, size_bytes, "reply"
        )
        self.averager.settle(reply.to)
        self._scheduler.at(arrival_s, partial(self.deliver, reply, self._leader.term))

    def deliver(self, reply: ReplyMessage, term: int = 1) -> None:
        """See `ExchangeHost`."""
        opened = self._open.get(reply.to)
        if opened is None or opened[1].update.seq != reply.seq or term < self._leader.term:
            return  # after a resume a request is repeated, and may be answered twice
        (began_s, send), now_s = self._open.pop(reply.to), self._scheduler.now_s
        if reply.dropped:
            self._emit("update_dropped", now_s, region=reply.to, seq=reply.seq, bytes_sent=0)
        else:
            self._notes.exchange(send, reply, began_s, self.regions[reply.to].server.wire)
        self.regions[reply.to].on_reply(reply, now_s - began_s)
        if reply.barrier is not None and reply.barrier.leaves:
            self._on_left(reply.to)

    def stepped(self, name: str, done: StepDone, began_s: float, ago_s: float) -> None:
        """See `RegionHost`."""
        self._notes.step(name, done, began_s, ago_s)
        self.regions[name].check_progress()

    def evaluated(
        self, name: str, step: int, stats: Stats, rows: int, final: bool, model: str | None
    ) -> None:
        """See `RegionHost`."""
        self._note_evals(
            self._evals.collector.add(name, step, stats, rows, final=final, model=model)
        )

    def _note_evals(self, finished: list[Evaluation]) -> None:
        stop = self._evals.take(finished, self._scheduler.now_s, self._leader.region)
        if any(done.region is None for done in finished):
            self._notes.sent()  # a run is priced at the time of an evaluation
        if stop is not None:
            self._stop(stop)

    def precise(self, name: str, buffers_B: Tensor, go_on: Callable[[Tensor], None]) -> None:
        """See `RegionHost`."""
        self._statistics.add(name, buffers_B)
        self._go_on[name] = go_on
        self._exchange_statistics()

    def _exchange_statistics(self) -> None:
        for region, over_all_B in self._statistics.take(self.regions).items():
            self._go_on[region](over_all_B)

    def _stop(self, stop: EarlyStop) -> None:
        if self.averager.stopping:
            return
        self._emit("stop_requested", self._scheduler.now_s, **stop.model_dump())
        self.averager.request_stop()
        if len(self.regions) == 1:
            next(iter(self.regions.values())).stop()


def _batched(experiment: Experiment, task: Task) -> Gradients | None:
    """Return batched gradients for many workers; None if they are few or coded."""
    workers = sum(region.workers for region in experiment.regions)
    train = experiment.train
    is_plain = not experiment.worker_steps and train.stragglers is None and train.accumulate == 1
    if workers < MANY or not is_plain:
        return None
    model = checked_model(task, experiment.seed).to(experiment.device)
    return Gradients(task, model, train.clip_norm)
