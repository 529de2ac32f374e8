"""The controller of a run: records its events and executes the decisions of `RunPolicy`.

It makes no training decisions, and every wait has a deadline. `Skews` maps times of other machines
to the run actor's clock if they differ by more than `TOLERATED_S`. It uses the smallest observed
delay, as NTP does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch

from geo_ray.base.errors import GeoRayError, InvariantError, RegionLostError
from geo_ray.base.restarts import Restarts
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Polls, collect
from geo_ray.runs.evaluation import EvalNotes, Evaluation
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.requests import Interruption
from geo_ray.runtime.actor_group import ActorGroup, notices_of
from geo_ray.runtime.checkpoints import CheckpointWatch, Saver, StoreTraffic, traffic_source_of
from geo_ray.runtime.members import Members
from geo_ray.runtime.policies import HALT_DEADLINE_S, Hangs, Quorum, RunLimits, RunPolicy
from geo_ray.runtime.process_watch import BridgeWatch, HangWatch, WorkerWatch
from geo_ray.runtime.regions import MemberPolicy
from geo_ray.runtime.replanning import CurrentLeader, LinkNotes, PlanFor, PlanWatch, ReplanPolicy
from geo_ray.runtime.reporting import MemberRequests, StatusLine, no_requests, show_nothing
from geo_ray.storage.manifest import shard_part_name
from geo_ray.telemetry.events import TIMES
from geo_ray.telemetry.summary import EarlyStop
from geo_ray.training.worker import StatisticsCollector

log = logging.getLogger(__name__)

TOLERATED_S: Final = 90.0  # larger than the delay of any answer


@dataclass(slots=True)
class Skews:
    """Maps times reported by processes to the run actor's clock. Pure.

    Idea: each process counts from its machine's wall-clock time. Nothing is ordered by these times,
    but the timeline of a run consists of them.

    Rule: a report of the current time arrives later by the message's delay, so the largest observed
    difference is the best estimate. Differences below `TOLERATED_S` are ignored: synchronized
    clocks agree better than this method can measure.

    Source: ours; the smallest delay is the most accurate measurement, as in NTP.
    """

    _ahead_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def events(
        self, answers: Mapping[tuple[str, str], Mapping[str, Any]], now_s: float
    ) -> list[dict[str, Any]]:
        """Return all events of some answers, with times of the run actor's clock.

        Args:
            answers: by (role, region); ``now_s`` is the current time of the answering process.
            now_s: the current time.
        """
        found = []
        for key, answer in answers.items():
            ahead_s = self._skew(key, answer.get("now_s"), now_s)
            for event in answer["events"]:
                moved = {t: event[t] - ahead_s for t in TIMES if ahead_s and t in event}
                found.append({**event, **moved})
        return found

    def _skew(self, key: tuple[str, str], reported_s: float | None, now_s: float) -> float:
        """Return how many seconds a process is ahead; 0 if within the tolerance."""
        if reported_s is None:
            return 0.0
        before_s, ahead_s = self._ahead_s.get(key), reported_s - now_s
        if before_s is not None and ahead_s < before_s - TOLERATED_S:
            before_s = None  # another process, on another machine
        self._ahead_s[key] = ahead_s = ahead_s if before_s is None else max(before_s, ahead_s)
        if abs(ahead_s) < TOLERATED_S:
            return 0.0
        if before_s is None:
            side = "ahead of" if ahead_s > 0 else "behind"
            log.warning(
                "the clock of the machine of region '%s' (%s) is %.0f s %s the run actor's: times "
                "of its events are corrected; set it, since certificates depend on it",
                key[1], key[0], abs(ahead_s), side,
            )  # fmt: skip
        return ahead_s


_TICK_S = 0.2
_POLL_TIMEOUT_S = 60.0
_ANSWER_S = 0.5  # longest wait for a slow answer
_PROGRESS = frozenset({"step", "exchange", "stats", "update_dropped"})

Answers = Mapping[tuple[str, str], dict[str, Any]]
"""Answers of servers and bridges in one round of polling, by (role, region)."""


@dataclass(slots=True)
class Controller:
    """Controls a run: records its events, and executes the decisions of `RunPolicy`.

    It makes no decisions about training. Every wait has a deadline.

    Attributes:
        experiment: the run.
        actors: its actors.
        recorder: records events.
        evals: combines evaluations, and stores the best model.
        saver: commits checkpoints.
        origin_unix_s: wall-clock time at which the run's clock was 0.
        links: records link measurements.
        users: returns the membership requests since the last call.
        status: shows a phase to the user.
        interrupted: set externally (by a signal) to save and stop.
        plan_for: plans for changed members; None: the run follows no plan.
        policy: decides on failures.
        checkpoints: starts checkpoints.
        workers: watches the workers.
        hang_watch: detects hung processes.
        bridges: replaces failed bridges.
        members: changes which regions take part.
        quorum: decides when the run pauses.
        plans: replans when members change.
    """

    experiment: Experiment
    actors: ActorGroup
    recorder: Recorder
    evals: EvalNotes
    saver: Saver
    origin_unix_s: float
    links: LinkNotes
    users: MemberRequests = no_requests
    status: StatusLine = show_nothing
    interrupted: Interruption = field(default_factory=Interruption)
    plan_for: PlanFor | None = None
    policy: RunPolicy = field(init=False)
    checkpoints: CheckpointWatch = field(init=False)
    workers: WorkerWatch = field(init=False)
    bridges: BridgeWatch = field(init=False)
    members: Members = field(init=False)
    quorum: Quorum = field(init=False)
    plans: PlanWatch = field(init=False)
    _polls: Polls = field(default_factory=partial(Polls, _POLL_TIMEOUT_S))
    _statistics: StatisticsCollector = field(init=False)
    _skews: Skews = field(default_factory=Skews)
    hang_watch: HangWatch = field(init=False)
    _phases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        train, checkpoint = self.experiment.train, self.experiment.checkpoint
        members = MemberPolicy(self.experiment)
        self.quorum = Quorum(members.least, self.experiment.members.wait_s)
        limits = RunLimits(
            train.max_worker_restarts,
            train.max_refused_steps,
            checkpoint.every_s,
            1 if members.brings_back else self.experiment.members.min or 1,
            train.restart_window_s,
            checkpoint.part_timeout_s,
            checkpoint.retry_s,
        )
        self.policy = RunPolicy(limits, time.monotonic())
        self.checkpoints = CheckpointWatch(
            self.experiment,
            self.actors,
            self.policy,
            self.saver,
            self,
            self._phases,
            StoreTraffic(traffic_source_of(self.actors), self),
        )
        notices = notices_of(self.actors)
        self.members = Members(self.actors, members, self.users, self, self.origin_unix_s, notices)
        self.workers = WorkerWatch(self.actors, self.policy, self, notices, self.members)
        self.hang_watch = HangWatch(self.actors, Hangs(train.step_timeout_s), self)
        restarts = Restarts(train.max_worker_restarts, train.restart_window_s)
        self.bridges = BridgeWatch(self.actors, restarts, self.origin_unix_s, self)
        self.plans = PlanWatch(ReplanPolicy(), self.plan_for, self)
        spec = self.actors.spec
        self._statistics = StatisticsCollector(spec.layout, spec.data_rows)
        self._polls.token = self.actors.token

    def run(self) -> None:
        """Poll until all workers are done and all their events are recorded.

        Raises:
            InterruptedRunError: after a checkpoint, if `interrupted` was set in time.
            NonFiniteError: after a checkpoint, if too many consecutive steps were refused.
            WorkerLostError: workers die more often than allowed.
            RegionLostError: a server or bridge of a required region died.
            RunDirectoryError: nothing can be saved.
            LeaseLostError: another process has taken the run over.
            GeoRayError: a worker reported an error of the task or the data.
        """
        resumed = self.actors.spec.resume
        if resumed is not None:
            parts = resumed.parts.values()
            self.checkpoints.traffic.resumed(parts, self.actors.leader.region)
        while self.workers.are_out:
            self.workers.collect(_TICK_S)
            answers = self._poll()
            self._handle_all(answers)
            self._replace_hung(answers)
            self._keep_time()
        answers = self._drain()
        if not self.policy.is_halting and self.experiment.checkpoint.every_s is not None:
            answers = self._save_end()
        self._note_wan(answers, force=True)
        self.policy.check_end(_phases(answers))

    def _replace_hung(self, answers: Answers) -> None:
        """Report processes without progress; replace workers among them after a while."""
        if self.quorum.is_paused:
            return
        statuses = {r: a["status"] for (role, r), a in answers.items() if role == "ps"}
        unresponsive_s = {
            (_named(role), r): s for (role, r), s in self._polls.unresponsive_s().items()
        }
        for worker, cause in self.hang_watch.look(statuses, unresponsive_s):
            self.workers.replace_hung(worker, cause)

    def close(self) -> None:
        """End everything this has started; afterwards no other thread of this process calls Ray."""
        self.bridges.close()
        self.members.close()
        self.plans.close()
        self.actors.end_calls()

    def _drain(self) -> Answers:
        """Process the last events; wait for the remaining parts of an open checkpoint."""
        longest_s = max(HALT_DEADLINE_S, self.experiment.checkpoint.retry_s)
        deadline_s = time.monotonic() + longest_s
        while True:
            answers = self._poll(_POLL_TIMEOUT_S)
            more = self._handle_all(answers)
            if "halted" in _phases(answers) and not self.policy.is_halt_saved:
                self._keep_time()  # repeats a checkpoint that failed
            halted = self.saver.open_id is not None and "halted" in _phases(answers)
            awaited = halted or self.saver.is_committing
            if not more and not awaited:
                break
            if time.monotonic() > deadline_s:
                raise self.policy.not_saved(f"its parts had not arrived after {longest_s:g} s")
            if not more:
                time.sleep(0.05)
        self.saver.abandon()
        return answers

    def _save_end(self) -> Answers:
        """Save a last checkpoint, so that training can continue from the very end."""
        self.status("saving the last checkpoint")
        before, began_s = self.policy.newest_saved, time.monotonic()
        is_failing = False
        while True:
            now_s, is_open = time.monotonic(), self.saver.open_id is not None
            if not is_open and not self.members.is_leaving and self.policy.may_retry(now_s):
                self.checkpoints.begin(halt=False, is_over=True)
            answers = self._poll(_POLL_TIMEOUT_S)
            self._handle_all(answers)
            if self.policy.newest_saved != before:
                return answers
            if self.policy.is_failing and not is_failing:
                is_failing = True
                self.status("retrying the last checkpoint (Ctrl-C: end without it)")
            least_s = 0.0 if is_failing and self.interrupted.is_set() else HALT_DEADLINE_S
            until_s = self.policy.saves_until_s(began_s) if least_s else 0.0
            if time.monotonic() > max(began_s + least_s, until_s):
                self.checkpoints.give_up("the last checkpoint could not be saved in time")
                return answers
            time.sleep(0.02 if self.saver.open_id is not None else 0.3)

    # -------------------------------------------------------------- servers and bridges

    def process_news(self) -> None:
        """Process events that were in flight at the last poll, and later ones."""
        for _ in range(2):
            self._handle_all(self._poll(_POLL_TIMEOUT_S))

    def _poll(self, wait_s: float = _ANSWER_S) -> Answers:
        """Ask all servers and bridges for news; late answers are processed by a later poll.

        Raises:
            RegionLostError: a required server or bridge is lost.
            GeoRayError: the reason why a region cannot continue.
        """
        self.recorder.check()  # lost actors may belong to another run actor by now
        servers = self.actors.servers()
        answers, unresponsive = self._polls.ask(servers, wait_s)
        if unresponsive and not self.actors.launcher.is_ours():
            raise RegionLostError(
                "the process that owned the run's processes has ended, and they ended with it"
            )
        lost: dict[str, str] = {}
        replaced = (
            set() if self.policy.is_halting else {*self.bridges.replaced(unresponsive, answers)}
        )
        for (role, region), cause in unresponsive.items():
            if region in replaced:
                continue
            lost.setdefault(region, f"the {_named(role)} of region '{region}' is lost: {cause}")
        failures = {
            region: failure
            for (_, region), answer in answers.items()
            if isinstance(failure := answer["status"].get("failure"), GeoRayError)
        }
        present = {region: self.actors.can_lose(region) for _, region in servers}
        gone = self.policy.regions_lost(lost, failures, present, self.actors.former_leaders)
        # The averager first: other losses are reported to its new region.
        for region in sorted(gone, key=lambda name: name != self.actors.leader.region):
            if not self.actors.can_lose(region):  # the designated standby is lost as well
                raise RegionLostError(gone[region])
            self.lose_region(region, gone[region])
        return {key: answer for key, answer in answers.items() if key[1] not in gone}

    def lose_region(self, region: str, cause: str) -> None:
        """Continue without a region; if it hosted the averager, the standby takes over."""
        log.warning("%s; continuing without the data of region '%s'", cause, region)
        self.emit("region_lost", region=region, cause=cause)
        self._drop(region, keep_workers=self.members.keeps_workers(region))
        self.members.report_lost(region)

    def drop_region(self, region: str) -> None:
        """See `RunServices.drop_region`."""
        self._drop(region, keep_workers=False)

    def _drop(self, region: str, *, keep_workers: bool) -> None:
        """Stop waiting for a region."""
        shards = self.actors.spec.region(region).ps_shards
        self.saver.forget({shard_part_name(region, index) for index in range(shards)})
        self.actors.lose(region, keep_workers=keep_workers)
        for bridge in self.actors.bridges.values():
            bridge.forget.remote(region)
        self._phases.pop(region, None)
        self._note_evals(self.evals.collector.forget(region), self.now_s())
        self._exchange_statistics()

    def admit_region(self, region: str, step: int, attempt: int) -> None:
        """See `RunServices.admit_region`."""
        shards = self.actors.spec.region(region).ps_shards
        self.saver.expect({shard_part_name(region, index) for index in range(shards)}, attempt)
        self.evals.collector.admit(region, step)

    def _follow_averager(self, answers: Answers) -> None:
        """Follow the averager, which may have moved by itself; repeat pending requests."""
        bridges = {r: a["status"] for (role, r), a in answers.items() if role == "bridge"}
        for region, status in bridges.items():
            is_standby = bool(status.get("is_standby"))
            self.actors.note_standby(region, status["leader"], is_standby=is_standby)
            if not self.actors.follow(status["leader"]):
                continue
            self.saver.abandon()  # the old averager's part of it will not arrive
            self.members.leader_moved()
            self.plans.leader_moved()
            if self.policy.stopping is not None:
                self.ask_averager("request_stop")

    def _handle_all(self, answers: Answers) -> int:
        """Process the answers; return the number of events."""
        self.saver.note_lost(self.members.regions.lost, self.members.gone.rows)
        events = self._skews.events(answers, self.now_s())
        if any(event["kind"] in _PROGRESS for event in events):
            self.policy.on_progress(time.monotonic())
        for event in sorted(events, key=itemgetter("t_s")):
            self._handle(dict(event))
        for (_, region), answer in answers.items():
            request_pem = answer["status"].get("certificate_request")
            if request_pem is not None:
                self.actors.renew_certificate(region, request_pem)
        self._phases |= {
            r: str(a["status"]["phase"]) for (role, r), a in answers.items() if role == "ps"
        }
        for (role, region), answer in answers.items():
            if role == "ps":
                self.workers.note(region, answer["status"])
        self._follow_averager(answers)
        self.bridges.tick()
        self.members.tick({key: answer["status"] for key, answer in answers.items()})
        self._keep_quorum()
        gone, is_changing = self.members.gone, self.members.are_changing
        self.actors.note(self.origin_unix_s, gone, is_changing=is_changing)
        region = self.actors.leader.region
        leader = answers.get(("bridge", region))
        interval_steps = None if leader is None else leader["status"].get("interval")
        interval = (
            None
            if interval_steps is None
            else interval_steps * max(1, self.experiment.worker_steps)
        )
        lives = CurrentLeader(region, self.actors.standby)
        self.plans.tick(self.actors.primaries, lives, time.monotonic(), interval)
        self.checkpoints.tick()
        if answers.keys() >= self.actors.servers().keys():  # a missing one may be busy
            self._check_progress(answers)
        exhausted = [r for (_, r), a in answers.items() if a["status"].get("exhausted")]
        why = self.policy.exhausted(exhausted[0], time.monotonic()) if exhausted else None
        if why is not None:
            self.emit("stop_requested", cause=why.message)
        self._note_wan(answers)
        return len(events)

    def _keep_quorum(self) -> None:
        """Pause while too few regions are present."""
        quorum, now_s, was_paused = self.quorum, time.monotonic(), self.quorum.is_paused
        missing = quorum.see(
            self.actors.primaries,
            self.members.regions.waited_for,
            is_joining=self.members.is_joining,
            is_ending=self.is_ending,
            now_s=now_s,
        )
        if quorum.is_paused != was_paused:
            for primary in self.actors.primaries.values():
                primary.pause.remote(quorum.is_paused)
            if quorum.is_paused:
                self.emit("run_paused", cause=missing)
                self.status(f"paused: {missing}")
            else:
                self.status("")
                self.emit("run_resumed")
        why = None if missing is None else quorum.overdue(missing, now_s)
        if why is not None and self.policy.halt(why, now_s):
            self._exchange_statistics()
            self.emit("stop_requested", cause=why.message)

    def _check_progress(self, answers: Answers) -> None:
        if self.quorum.is_paused:
            return
        leader = answers.get(("bridge", self.actors.leader.region))
        still = {
            region: answer["status"].get("blocked_on")
            for (role, region), answer in answers.items()
            if role == "ps" and answer["status"]["phase"] != "done"
        }
        unanswered = None if leader is None else leader["status"].get("open")
        self.policy.check_progress(time.monotonic(), still, unanswered)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        t_s = event.pop("t_s")
        region = event.pop("region")
        if kind == "stats":
            self._evaluate(region, t_s, event)
        elif kind == "parts":
            self.checkpoints.add(event)
        elif kind == "precise":
            reports = bytearray(event["model_buffers"])
            self._statistics.add(region, torch.frombuffer(reports, dtype=torch.uint8))
            self._exchange_statistics()
        elif kind == "state_transferred":
            self.members.on_state_transferred(region, event)
        elif kind == "state_transfer_failed":
            self.members.on_hand_over_failed(event["error"])
        elif kind == "part_failed":
            if event["id"] == self.saver.open_id:
                self.checkpoints.failed(event["error"])
        else:
            if kind == "step":
                self.saver.health.on_step(event["loss"])
            self.recorder.emit(kind, t_s, region=region, **event)

    def _evaluate(self, region: str, t_s: float, event: dict[str, Any]) -> None:
        stats = {name: _array(values) for name, values in event["stats"].items()}
        finished = self.evals.collector.add(
            region,
            event["step"],
            stats,
            event["rows"],
            final=event["final"],
            model=event["model"],
        )
        self._note_evals(finished, t_s)

    def _exchange_statistics(self) -> None:
        """Send the statistics over all regions to every region, once they are complete.

        Regions paused for a checkpoint compute no statistics; each then uses its local ones.
        """
        collector = self._statistics
        found = (
            collector.give_up() if self.policy.is_halting else collector.take(self.actors.primaries)
        )
        for region, buffers_B in found.items():
            self.actors.primaries[region].use_statistics.remote(buffers_B.numpy().tobytes())

    def _note_evals(self, finished: list[Evaluation], t_s: float) -> None:
        stop = self.evals.take(finished, t_s, self.actors.leader.region)
        if stop is not None:
            self._stop(stop)

    # -------------------------------------------------------------- saving and stopping

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        self.recorder.check()
        self.evals.settle(time.time() - self.origin_unix_s)
        if self.interrupted.is_set() and not self.policy.is_halting:
            self.status("saving a checkpoint, then stopping (Ctrl-C again: stop at once)")
            why = self.interrupted.why
            self.policy.halt(why, now_s)
            self._exchange_statistics()
            self.emit("stop_requested", cause=why.message)
        still_s = self.policy.stalled(now_s)
        if still_s is not None:
            what = ", ".join(f"{region} is {phase}" for region, phase in self._phases.items())
            self.status(f"no step and no exchange for {still_s:.0f} s: {what}")
        self.checkpoints.keep_time(may_begin=not self.members.is_leaving)

    def _stop(self, stop: EarlyStop) -> None:
        if not self.policy.stop(stop.cause):
            return
        self.emit("stop_requested", **stop.model_dump())
        if self.actors.bridges:
            self.ask_averager("request_stop")
        else:
            self._ask(next(iter(self.actors.primaries.values())).stop.remote())

    # ------------------------------------------------------------ what its parts ask, `RunServices`

    @property
    def is_ending(self) -> bool:
        """See `RunServices.is_ending`."""
        return self.policy.is_halting or self.policy.stopping is not None

    def now_s(self) -> float:
        """See `RunServices.now_s`."""
        return time.time() - self.origin_unix_s

    def emit(self, kind: str, **fields: Any) -> None:
        """See `RunServices.emit`."""
        self.recorder.emit(kind, self.now_s(), **fields)

    def show(self, text: str) -> None:
        """See `RunServices.show`."""
        self.status(text)

    def set_interval(self, interval: int) -> None:
        """See `RunServices.set_interval`."""
        self.ask_averager("set_interval", max(1, interval // max(1, self.experiment.worker_steps)))

    def move_averager(self) -> None:
        """See `RunServices.move_averager`."""
        self.members.move_averager()

    def ask_averager(self, method: str, *arguments: Any) -> Any:
        """See `RunServices.ask_averager`."""
        bridge = self.actors.bridges[self.actors.leader.region]
        try:
            return self._ask(getattr(bridge, method).remote(*arguments))
        except InvariantError as error:
            # A barrier has passed, or the averager has moved, since the request was made.
            log.warning("a request to the averager is outdated: %s", error.message)
            return None
        except RegionLostError:
            if not self.actors.can_lose(self.actors.leader.region):
                raise
            return None  # the next poll detects it, too

    def _ask(self, call: Any) -> Any:
        return collect({0: call}, _POLL_TIMEOUT_S)[0]

    def _note_wan(self, answers: Answers, *, force: bool = False) -> None:
        reports = {r: a["status"]["links"] for (role, r), a in answers.items() if role == "bridge"}
        for link in self.links.record(reports, force=force):
            self.emit("wan", src=link.src, dst=link.dst, bytes_by_class=link.bytes_by_class)


def _phases(answers: Answers) -> set[str]:
    return {str(a["status"]["phase"]) for (role, _), a in answers.items() if role == "ps"}


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.float64)


def _named(role: str) -> str:
    """Return the user-facing name of a role."""
    return "parameter server" if role == "ps" else role.replace("ps", "shard server")
