"""A whole run on the virtual clock: regions, links, overlay and averager; events as of a real run.

The simulator is deterministic: the same experiment gives the same events and parameters, and, for
strategies whose order of updates does not depend on time (`bsp`, `sma`), the parameters of the real
run to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.errors import InvariantError, RegionLostError
from geo_ray.job.best import BestKeeper
from geo_ray.job.build import build_averager, build_evals, check_start, model_start
from geo_ray.job.codec_shapes import with_shapes
from geo_ray.job.data import data_rows
from geo_ray.job.eval_notes import Emit, EvalNotes
from geo_ray.job.evals import Evaluation
from geo_ray.sim.checkpoints import SimCheckpoint, SimCheckpoints
from geo_ray.sim.gradients import MANY, Gradients
from geo_ray.sim.home import SimHome
from geo_ray.sim.network import Network
from geo_ray.sim.notes import SimNotes
from geo_ray.sim.paths import PathHooks, build_paths
from geo_ray.sim.region import RegionHooks, SimRegion, Surroundings
from geo_ray.sim.scheduler import Scheduler
from geo_ray.sim.workers import SimWorkers
from geo_ray.strategies.base import Reply, Update
from geo_ray.tasks.base import Stats, Task
from geo_ray.tasks.guard import checked_model
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.resume import resume
from geo_ray.training.averager.stalled import open_requests, stalled_error, stalled_regions
from geo_ray.training.compute.precise import StatisticsBoard
from geo_ray.training.membership.border import MemberChange, giver_of
from geo_ray.training.membership.newcomer import ShardState
from geo_ray.training.server.effects import SendUpdate, Snapshot, StepDone

LAN_S = 0.0012
"""One way between a worker and its parameter server on one machine, queueing in Python included."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a simulated run ends with.

    Attributes:
        seconds: predicted duration of the training.
        params_P: every region's final parameters by name.
        sent_bytes: bytes by (source, destination) and class.
        rounds: commits of the averager.
        carried_B: what each region's final model carries, uint8 (B,); None if nothing.
    """

    seconds: float
    params_P: dict[str, Tensor]
    sent_bytes: dict[tuple[str, str], dict[str, int]]
    rounds: int
    carried_B: dict[str, Tensor | None]


class World:
    """Everything of one simulated run.

    Args:
        experiment: the run.
        task: its task.
        manifest: its data.
        emit: takes the events.
        lan_s: time of one message inside a region.
        keeper: keeps the best evaluated model; None if nobody wants it.
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
        self._home = SimHome(
            experiment, lambda: build_averager(experiment, params_P.numel(), rows, start.layout)
        )
        self._lossy, self._turns, self._overlay = build_paths(
            experiment,
            self._num_params,
            self._network,
            self._scheduler,
            PathHooks(
                self._ship,
                self._on_update,
                self._on_reply,
                lambda *name: self._answered(self.averager.on_skip(*name)),
                lambda: self.averager.state.version,
                lambda name: self.regions[name].server.phase == "done",
            ),
        )
        board = build_evals(experiment, task)
        self._evals = EvalNotes(board, emit, experiment.train.target, keeper)
        self._open: dict[str, tuple[float, SendUpdate]] = {}
        self._arrived_s: dict[str, float] = {}
        self._wake_s: float | None = None
        self._saved = SimCheckpoints(len(experiment.regions) > 1)
        gradients = None if start.layout.entries else _together(experiment, task)
        candidates = None if keeper is None else keeper.candidates
        around = Surroundings(self._scheduler, lan_s, gradients, candidates)
        self._statistics = StatisticsBoard(start.layout, rows)
        self._go_on: dict[str, Callable[[Tensor], None]] = {}
        hooks = RegionHooks(
            self._on_send,
            self._on_step,
            self._on_evaluated,
            self._on_saved,
            self._on_handed,
            self._on_precise,
            self._notes.changed,
            self._notes.team,
        )
        self._regions = {
            region.name: partial(
                SimRegion, experiment, region, task, manifest, start, around, hooks
            )
            for region in experiment.regions
        }
        self._rows: dict[str, dict[str, object]] = {}  # books of those that were here
        self._handed: set[str] = set()  # newcomers that a copy is on its way to
        self.regions = {name: self._regions[name]() for name in experiment.present_names}
        self.workers = SimWorkers(self.regions, self._scheduler, emit)

    @property
    def averager(self) -> Averager:
        """The averager at work."""
        return self._home.averager

    @property
    def checkpoints(self) -> dict[int, SimCheckpoint]:
        """Those that are kept, by number."""
        return self._saved.by_id

    def run(self) -> SimResult:
        """Train to the end.

        Raises:
            NonFiniteError: if a region refused too many steps in a row, or sent what is not finite.
            StalledError: if the averager leaves regions without an answer.
            GeoRayError: what the averager failed with.
            InvariantError: if a region waits for what will never come.
        """
        every_s = self._experiment.checkpoint.every_s
        if every_s is not None:
            self._scheduler.idly_at(every_s, partial(self._save_regularly, every_s))
        self.averager.at(self._scheduler.now_s)
        for region in self.regions.values():
            region.start()
        self._answered([])  # a restored averager may have to be woken
        self._scheduler.run()
        stuck = {n: r.server.phase for n, r in self.regions.items() if r.server.phase != "done"}
        if stuck:
            still = {name: self.regions[name].server.stands_still_for for name in stuck}
            waits = stalled_regions(still, open_requests(self.averager))
            if waits:
                raise stalled_error(waits)
            raise InvariantError(f"nothing is left to happen, but regions wait: {stuck}")
        return SimResult(
            self._scheduler.now_s,
            {name: region.params_P for name, region in self.regions.items()},
            self._notes.sent(),
            self.averager.state.version,
            {name: region.carried_B for name, region in self.regions.items()},
        )

    def checkpoint_at(self, when_s: float, checkpoint: int) -> None:
        """Let a checkpoint begin at ``when_s``; it is found in `checkpoints` once it is whole."""
        self._scheduler.at(when_s, partial(self._save, checkpoint))

    def lose_at(self, when_s: float, region: str | None, noticed_s: float = 0.0) -> None:
        """Let all processes of a region end at ``when_s``.

        The others go on without it ``noticed_s`` later; if the averager lives there, another region
        takes over then. Nothing happens if none can: a run would end there.

        Args:
            when_s: on the virtual clock.
            region: None for that in which the averager lives then.
            noticed_s: until the others know.

        Raises:
            InvariantError: the averager lives there, and nobody stands by.
        """
        home = self._home
        if region in {None, home.region} and self._experiment.averager.standby is None:
            raise InvariantError(f"the averager lives in '{home.region}', and nobody stands by")
        self._scheduler.at(when_s, partial(self._die, region, noticed_s))

    def _die(self, region: str | None, noticed_s: float) -> None:
        home, name = self._home, region or self._home.region
        takes_over = name == home.region
        if takes_over and (home.is_down or home.heir(self._alive) is None):
            return
        home.is_down |= takes_over
        if name in self.regions:
            self.regions[name].die()
        then = self._take_over if takes_over else partial(self._lose, name)
        self._scheduler.at(self._scheduler.now_s + noticed_s, then)

    def cut_at(self, when_s: float, a: str, b: str, for_s: float) -> None:
        """Let nothing pass between two regions for a while; neither is given up."""
        self._network.cut(a, b, when_s, when_s + for_s)

    @property
    def _alive(self) -> set[str]:
        return {name for name, region in self.regions.items() if not region.is_dead}

    def _take_over(self) -> None:
        """Go on without the averager's region, as those that are left do."""
        former, heir = self._home.region, self._home.heir(self._alive)
        if heir is None:
            raise RegionLostError(f"the averager is lost with '{former}': nobody can take over")
        self._home.move(heir)
        now_s = self._scheduler.now_s
        self._emit("hub_moved", now_s, region=heir, epoch=self._home.epoch)
        self._saved.abandon()
        self._lose(former)
        for name, (_, send) in self._open.items():
            told_s = now_s + self._network.delay_s(heir, name)
            self._scheduler.at(told_s, partial(self._again, name, send.update, self._home.epoch))

    def _again(self, name: str, update: Update, epoch: int) -> None:
        """A region that has heard of a new home says its open request there."""
        opened = self._open.get(name)
        if opened is not None and opened[1].update is update and epoch == self._home.epoch:
            self._ship(name, update)

    def change_at(
        self, when_s: float, joins: Sequence[str] = (), leaves: Sequence[str] = ()
    ) -> None:
        """Ask for a change of members at ``when_s``, which comes with the next border."""
        self._scheduler.at(when_s, partial(self._change, tuple(joins), tuple(leaves)))

    def _change(self, joins: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        members = self.averager.view.members
        joins = tuple(name for name in joins if name not in members)
        leaves = tuple(name for name in leaves if name in members)
        if not (joins or leaves) or self._home.is_down or self._home.region in leaves:
            return
        steps = {name: region.server.version for name, region in self.regions.items()}
        self.averager.at(self._scheduler.now_s)
        self._answered(
            self.averager.change(MemberChange(joins, leaves, giver_of(steps, self._home.region)))
        )

    def _on_handed(self, giver: str, handed: Snapshot, shards: list[ShardState]) -> None:
        """The state of a region is on its way to all newcomers."""
        self._handed.update(self.averager.view.joining)
        sizes = [t.nbytes for state, _ in shards for t in state.values()]
        sizes += [tensor.nbytes for tensor in handed.tensors.values()]
        for name in self.averager.view.joining:
            arrival_s = self._network.arrival_s(
                self._scheduler.now_s, giver, name, sum(sizes), "join"
            )
            begin = partial(self._begin, name, handed, shards, self._scheduler.now_s, sum(sizes))
            self._scheduler.at(arrival_s, begin)

    def _begin(
        self, name: str, handed: Snapshot, shards: list[ShardState], asked_s: float, size: int
    ) -> None:
        now_s = self._scheduler.now_s
        self._handed.discard(name)
        if name not in self.averager.view.joining:  # it was lost on the way
            return
        region = self.regions[name] = self._regions[name]()
        region.begin_as(handed, shards, self._rows.get(name))
        self._evals.board.admit(name, region.server.version)
        about = {"view": self.averager.view.epoch, "round": handed.round, "step": handed.step}
        about |= {"bytes": size}
        self._emit("region_joined", now_s, region=name, **about, took_s=now_s - asked_s)
        self.averager.begun(name)
        region.start()

    def _lose(self, region: str) -> None:
        """Go on without a region, as the controller does."""
        now_s = self._scheduler.now_s
        if region not in self.averager.view.members:
            return
        self._forget(region)
        self._emit("region_lost", now_s, region=region, cause="its processes ended")
        before = self.averager.view
        self.averager.at(now_s)
        self._answered(self.averager.leave(region))
        waiting = set(before.joining) - self._handed if region == before.giver else set[str]()
        for newcomer in sorted(waiting):
            self._emit("join_failed", now_s, region=newcomer, cause="nobody's state came")
            self._answered(self.averager.leave(newcomer))

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
        self._note_evals(self._evals.board.forget(name))
        self._share_statistics()

    def restore(self, checkpoint: SimCheckpoint) -> None:
        """Begin where a whole checkpoint was taken, at 0 s, without regions that are absent now.

        Raises:
            InvariantError: if a part is missing.
        """
        checkpoint.check_whole()
        if checkpoint.averager is not None:
            resume(self.averager, checkpoint.averager.tensors, checkpoint.averager.control)
            if self._lossy is not None:
                self._lossy.restore(checkpoint.averager.control["beside"])
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
        """Begin a checkpoint: the averager first, then each region once it has heard of it."""
        now_s = self._scheduler.now_s
        if len(self._regions) > 1:
            self.averager.at(now_s)
            if set(self.regions) != set(self.averager.view.members) or self._home.is_down:
                return  # somebody who has left has not heard of it
            if not self.averager.begin_checkpoint(checkpoint, halt=False):
                return
            self._answered([])
        if self._overlay is not None:
            return  # they hear of it by their answers only
        for name, region in self.regions.items():
            told_s = now_s + self._network.delay_s(self._home.region, name)
            self._scheduler.idly_at(told_s, partial(region.cut, checkpoint))

    def _on_saved(self, name: str, primary: Snapshot, shards: list[ShardState]) -> None:
        checkpoint = self._saved.add_region(name, primary, shards, self.regions)
        if checkpoint is not None:
            now_s, step = self._scheduler.now_s, checkpoint.step
            self._emit("checkpoint", now_s, id=primary.id, step=step, bytes=checkpoint.size_bytes)

    def _on_send(self, name: str, send: SendUpdate) -> None:
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
            self._ship(name, update)
        else:
            self._lossy.depart(name, update, lambda part: self._ship(name, part))

    def _ship(self, name: str, update: Update) -> float:
        """Put an update on its way; when it arrives."""
        now_s, size_bytes = self._scheduler.now_s, update.size_bytes
        arrival_s = self._network.arrival_s(now_s, name, self._home.region, size_bytes, "update")
        lossy, turns = self._lossy, self._turns
        if turns is not None:
            self._scheduler.at(arrival_s, lambda: turns.arrived(update))
        elif lossy is None:
            self._scheduler.at(arrival_s, partial(self._on_update, update, self._home.epoch))
        else:
            self._scheduler.at(arrival_s, lambda: lossy.arrive(update, self._on_update))
        return arrival_s

    def _on_update(self, update: Update, epoch: int = 1) -> None:
        view = self.averager.view  # who has left may not have heard that it has
        if update.region not in (*view.members, *view.left) or not self._home.hears(epoch):
            return  # it is refused, or lost, and nobody is there to hear of it
        self._arrived_s[update.region] = self._scheduler.now_s
        self.averager.at(self._scheduler.now_s)
        self._answered(self.averager.on_update(update))

    def _on_wake(self) -> None:
        wake_s, now_s = self.averager.wakes_s, self._scheduler.now_s
        if wake_s is not None and wake_s <= now_s and not self._home.is_down:
            self.averager.at(now_s)
            self._answered(self.averager.on_wake())

    def _answered(self, replies: list[Reply]) -> None:
        wake_s = self.averager.wakes_s
        if wake_s is not None and wake_s != self._wake_s:
            self._wake_s = wake_s
            self._scheduler.at(wake_s, self._on_wake)
        for snapshot in self.averager.snapshots:
            beside = {} if self._lossy is None else self._lossy.export(self.averager.last)
            snapshot.control["beside"] = beside
            self._saved.add_averager(snapshot)
        self.averager.snapshots.clear()
        for reading in self.averager.noise.news():
            self._emit("noise", self._scheduler.now_s, region=None, **reading.fields())
        for reply in replies:
            self._return(reply)

    def _return(self, reply: Reply) -> None:
        if self._overlay is not None:
            self._overlay.answered(reply)
            return
        if self._lossy is not None:
            reply = self._lossy.beside(reply)
        now_s = self._scheduler.now_s
        reply = replace(reply, held_s=now_s - self._arrived_s.get(reply.to, now_s))
        size_bytes = reply.size_bytes
        arrival_s = self._network.arrival_s(now_s, self._home.region, reply.to, size_bytes, "reply")
        self.averager.settle(reply.to)
        self._scheduler.at(arrival_s, partial(self._on_reply, reply, self._home.epoch))

    def _on_reply(self, reply: Reply, epoch: int = 1) -> None:
        opened = self._open.get(reply.to)
        if opened is None or opened[1].update.seq != reply.seq or epoch < self._home.epoch:
            return  # after a resume a request is said again, and may be answered twice
        (began_s, send), now_s = self._open.pop(reply.to), self._scheduler.now_s
        if reply.dropped:
            self._emit("update_dropped", now_s, region=reply.to, seq=reply.seq, bytes_out=0)
        else:
            self._notes.exchange(send, reply, began_s, self.regions[reply.to].server.wire)
        self.regions[reply.to].on_reply(reply, now_s - began_s)
        if reply.border is not None and reply.border.leaves:
            self._on_left(reply.to)

    def _on_step(self, name: str, done: StepDone, began_s: float) -> None:
        self._notes.step(name, done, began_s)
        self.regions[name].check_goes_on()

    def _on_evaluated(
        self, name: str, step: int, stats: Stats, rows: int, final: bool, model: str | None
    ) -> None:
        self._note_evals(self._evals.board.add(name, step, stats, rows, final=final, model=model))

    def _note_evals(self, finished: list[Evaluation]) -> None:
        cause = self._evals.take(finished, self._scheduler.now_s, self._home.region)
        if any(done.region is None for done in finished):
            self._notes.sent()  # a run is priced at the time of an evaluation
        if cause is not None:
            self._stop(cause)

    def _on_precise(self, name: str, carried_B: Tensor, go_on: Callable[[Tensor], None]) -> None:
        self._statistics.add(name, carried_B)
        self._go_on[name] = go_on
        self._share_statistics()

    def _share_statistics(self) -> None:
        for region, over_all_B in self._statistics.take(self.regions).items():
            self._go_on[region](over_all_B)

    def _stop(self, cause: str) -> None:
        if self.averager.stopping:
            return
        self._emit("stop_requested", self._scheduler.now_s, cause=cause)
        self.averager.request_stop()
        if len(self.regions) == 1:
            next(iter(self.regions.values())).server.stop()


def _together(experiment: Experiment, task: Task) -> Gradients | None:
    """What computes the gradients of many workers together; None if they are few or coded."""
    workers = sum(region.workers for region in experiment.regions)
    if workers < MANY or experiment.worker_steps or experiment.train.stragglers is not None:
        return None
    model = checked_model(task, experiment.seed).to(experiment.device)
    return Gradients(task, model, experiment.train.clip_norm)
