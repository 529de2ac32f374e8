"""Watches over a run: writes its events, replaces lost workers, saves, stops.

It decides nothing about training. Everything that it waits for has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from geo_ray.config.experiment import Experiment
from geo_ray.errors import (
    CheckpointError,
    GeoRayError,
    InterruptedRunError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    RunDirectoryError,
    WorkerLostError,
)
from geo_ray.job.evals import EvalBoard, Evaluation, hits
from geo_ray.job.recorder import Recorder
from geo_ray.runtime.actors.parts import shard_part_name
from geo_ray.runtime.control.actor_group import ActorGroup, GroupWorker, collect, reason_of
from geo_ray.runtime.control.link_notes import LinkNotes
from geo_ray.runtime.control.saver import Saver

log = logging.getLogger(__name__)

_TICK_S = 0.2
_POLL_TIMEOUT_S = 60.0
_WAN_EVERY_S = 1.0
_HALT_DEADLINE_S = 120.0
_MAX_FAILED_SAVES = 3

Answers = Mapping[tuple[str, str], dict[str, Any]]
"""What servers and bridges told in one round of polling, by (role, region)."""


@dataclass(slots=True)
class Controller:
    """See the module's docstring.

    Attributes:
        experiment: the run.
        actors: its actors.
        recorder: takes events.
        evals: combines evaluations.
        saver: commits checkpoints.
        origin_unix_s: time of day at which the run's clock was 0.
        links: what is learned about links.
        status: shows a phase to the user.
        interrupted: set from outside (a signal) to save and stop.
        restarts: workers replaced so far.
    """

    experiment: Experiment
    actors: ActorGroup
    recorder: Recorder
    evals: EvalBoard
    saver: Saver
    origin_unix_s: float
    links: LinkNotes
    status: Callable[[str], None] = lambda text: None
    interrupted: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0
    _stopping: str | None = None
    _halting: GeoRayError | None = None
    _halt_began_s: float = 0.0
    _halt_saved: bool = False
    _failed_saves: int = 0
    _saved_s: float = field(default_factory=time.monotonic)
    _wan_s: float = 0.0

    def run(self) -> None:
        """Watch until all workers are home and all they did is written down.

        Raises:
            InterruptedRunError: after a checkpoint, if `interrupted` was set in time.
            NonFiniteError: after a checkpoint, if too many steps in a row were refused.
            WorkerLostError: if workers die more often than allowed.
            RegionLostError: if a server or bridge died, and no standby replaces the averager there.
            RunDirectoryError: if nothing can be saved.
            GeoRayError: what a worker found wrong with task or data.
        """
        while any(worker.steps is None for worker in self.actors.workers.values()):
            self._collect(_TICK_S)
            self._handle_all(self._poll())
            self._keep_time()
        answers = self._drain()
        self._note_wan(answers, force=True)
        if self._halting is None or self._ended_by_itself(answers):
            return
        if self._halt_saved:
            raise type(self._halting)(f"{self._halting.message}; its state is saved")
        raise self._not_saved("the run was about to end")

    def _drain(self) -> Answers:
        """Take in the last events; wait for the parts of an open checkpoint that will come."""
        deadline_s = time.monotonic() + _HALT_DEADLINE_S
        while True:
            answers = self._poll()
            more = self._handle_all(answers)
            awaited = self.saver.open_id is not None and "halted" in _phases(answers)
            if not more and not awaited:
                break
            if time.monotonic() > deadline_s:
                raise self._not_saved(f"its parts were not there after {_HALT_DEADLINE_S:g} s")
            if not more:
                time.sleep(0.05)
        self.saver.abandon()
        return answers

    def _ended_by_itself(self, answers: Answers) -> bool:
        """Whether the run was at its end before the request to stop could have an effect."""
        if not isinstance(self._halting, InterruptedRunError):
            return False
        return _phases(answers) == {"done"}

    # -------------------------------------------------------------- workers

    def _collect(self, timeout_s: float) -> None:
        busy = {w.ref: w for w in self.actors.workers.values() if w.steps is None}
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=timeout_s)
        for ref in ready:
            worker = busy[ref]
            try:
                worker.steps = int(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                self._handle_all(self._poll())  # the events that led to it, or a better reason
                reason = reason_of(error)
                if not isinstance(reason, LinkDownError) and self._is_present(worker):
                    raise reason from error
                self._replace(worker, reason.message)
            except ray.exceptions.RayActorError as error:
                self._handle_all(self._poll())  # perhaps its region is lost altogether
                self._replace(worker, str(error).splitlines()[0])

    def _is_present(self, worker: GroupWorker) -> bool:
        return self.actors.workers.get((worker.region, worker.rank)) is worker

    def _replace(self, worker: GroupWorker, cause: str) -> None:
        if not self._is_present(worker):
            return  # the run goes on without its region
        name = f"{worker.region}/{worker.rank}"
        self._emit("worker_lost", region=worker.region, worker=worker.rank, cause=cause)
        if self.restarts >= self.experiment.train.max_worker_restarts:
            raise WorkerLostError(
                f"worker {name} died ({cause}); train.max_worker_restarts = "
                f"{self.experiment.train.max_worker_restarts} is used up"
            )
        self.restarts += 1
        fresh = self.actors.replace_worker(worker)
        self._emit("worker_replaced", region=worker.region, worker=worker.rank, epoch=fresh.epoch)

    # -------------------------------------------------------------- servers and bridges

    def _poll(self) -> Answers:
        """Ask all servers and bridges for news.

        Raises:
            RegionLostError: if one is lost.
            GeoRayError: the reason why a region cannot go on.
        """
        refs = {key: handle.poll.remote() for key, handle in self.actors.servers().items()}
        answers: dict[tuple[str, str], dict[str, Any]] = {}
        lost: dict[str, str] = {}
        for (role, region), ref in refs.items():
            try:
                answers[role, region] = ray.get(ref, timeout=_POLL_TIMEOUT_S)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                cause = f"the {role} of region '{region}' is lost: {str(error).splitlines()[0]}"
                lost.setdefault(region, cause)
        for (_, region), answer in answers.items():
            failure = answer["status"].get("failure")
            if not isinstance(failure, GeoRayError) or region in lost:
                continue
            # Its bridge is gone, or it was cut off for so long that the others went on without it.
            cut_off = isinstance(failure, LinkDownError) or self.actors.home.region != region
            if not (cut_off and self.actors.can_lose(region)):
                raise failure
            lost[region] = failure.message
        for region, cause in lost.items():
            self._go_on_without(region, cause)
        return {key: answer for key, answer in answers.items() if key[1] not in lost}

    def _go_on_without(self, region: str, cause: str) -> None:
        """The averager's region is gone and a standby is there; else the run is over."""
        if not self.actors.can_lose(region):
            raise RegionLostError(cause)
        log.warning("%s; the run goes on without the data of region '%s'", cause, region)
        self._emit("region_lost", region=region, cause=cause)
        shards = self.actors.spec.region(region).ps_shards
        self.saver.forget({shard_part_name(region, index) for index in range(shards)})
        self.actors.lose(region)
        for done in self.evals.forget(region):
            self._note_eval(done, time.time() - self.origin_unix_s)
        self._ask(self.actors.bridges[self.actors.home.region].report_dead.remote(region))

    def _follow_hub(self, answers: Answers) -> None:
        """The averager may have moved by itself; what was asked of it is asked again."""
        for (role, _), answer in answers.items():
            home = answer["status"]["home"] if role == "bridge" else self.actors.home
            if home.epoch <= self.actors.home.epoch or home.region not in self.actors.bridges:
                continue
            self.actors.home = home
            self.saver.abandon()  # the old averager's part of it will not come
            if self._stopping is not None:
                self._ask_hub(lambda hub: hub.request_stop.remote())

    def _handle_all(self, answers: Answers) -> int:
        """Take in what was told; gives the number of events."""
        events = [event for answer in answers.values() for event in answer["events"]]
        for event in sorted(events, key=lambda e: float(e["t_s"])):
            self._handle(dict(event))
        self._follow_hub(answers)
        exhausted = [r for (_, r), a in answers.items() if a["status"].get("exhausted")]
        if exhausted and not isinstance(self._halting, NonFiniteError):
            self._halt(
                NonFiniteError(
                    f"region '{exhausted[0]}' refused {self.experiment.train.max_refused_steps} "
                    "steps in a row: no finite loss and gradient"
                )
            )
        self._note_wan(answers)
        return len(events)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        t_s = event.pop("t_s")
        region = event.pop("region")
        if kind == "stats":
            self._evaluate(region, t_s, event)
        elif kind == "parts":
            self._add_parts(t_s, event)
        elif kind == "part_failed":
            if event["id"] == self.saver.open_id:
                self._save_failed(event["error"])
        else:
            self.recorder.emit(kind, t_s, region=region, **event)

    def _evaluate(self, region: str, t_s: float, event: dict[str, Any]) -> None:
        stats = {name: _array(values) for name, values in event["stats"].items()}
        for done in self.evals.add(
            region, event["step"], stats, event["rows"], final=event["final"]
        ):
            self._note_eval(done, t_s)

    def _note_eval(self, done: Evaluation, t_s: float) -> None:
        target = self.experiment.train.target
        written = self.recorder.emit(
            "eval",
            t_s,
            step=done.step,
            region=done.region,
            metrics=done.metrics,
            samples=done.samples,
            final=done.final,
        )
        if target is not None and hits(target, done, written):
            self._stop(f"{target.metric} reached {target.value:g}")

    # -------------------------------------------------------------- saving and stopping

    def _keep_time(self) -> None:
        if self.interrupted.is_set() and self._halting is None:
            self.status("saving a checkpoint, then stopping (Ctrl-C again: stop at once)")
            self._halt(InterruptedRunError("the run was interrupted"))
        every_s = self.experiment.checkpoint.every_s
        now_s = time.monotonic()
        if self._halting is not None:
            if now_s - self._halt_began_s > _HALT_DEADLINE_S:
                raise self._not_saved(f"the regions did not stand still in {_HALT_DEADLINE_S:g} s")
            if self.saver.open_id is None and not self._halt_saved:
                self._begin_checkpoint(halt=True)
        elif every_s is not None and now_s - self._saved_s >= every_s:
            self._begin_checkpoint(halt=False)

    def _begin_checkpoint(self, *, halt: bool) -> None:
        if self.saver.open_id is not None:
            return
        self._saved_s = time.monotonic()
        try:
            checkpoint = self.saver.begin()
        except RunDirectoryError as error:
            self._save_failed(error)
            return
        if self.actors.bridges:
            begun = self._ask_hub(lambda hub: hub.request_checkpoint.remote(checkpoint, halt))
        else:
            lead = next(iter(self.actors.leads.values()))
            begun = self._ask(lead.checkpoint_now.remote(checkpoint, halt))
        if not begun:  # another one is open there, or the run is about to end
            self.saver.abandon()

    def _add_parts(self, t_s: float, event: Mapping[str, Any]) -> None:
        try:
            size_bytes = self.saver.add(event["id"], event["parts"], event["step"])
        except (RunDirectoryError, CheckpointError) as error:
            self._save_failed(error)
            return
        if size_bytes is not None:
            self._failed_saves = 0
            self._halt_saved = self._halting is not None
            step = self.saver.step
            self.recorder.emit("checkpoint", t_s, id=event["id"], step=step, bytes=size_bytes)

    def _save_failed(self, error: GeoRayError) -> None:
        """Go on with the checkpoint before it; but not for ever, and not if the run must stop."""
        log.error("checkpoint %s failed: %s", self.saver.open_id, error)
        self._emit("checkpoint_failed", cause=error.message)
        self.saver.abandon()
        self._failed_saves += 1
        if self._halting is not None or self._failed_saves >= _MAX_FAILED_SAVES:
            raise error

    def _halt(self, why: GeoRayError) -> None:
        self._halting = why
        self._halt_began_s = time.monotonic()
        self._emit("stop_requested", cause=why.message)

    def _not_saved(self, cause: str) -> GeoRayError:
        """The reason to stop, with the truth about the checkpoint."""
        why = self._halting or InterruptedRunError("the run was interrupted")
        return type(why)(f"{why.message}; no new checkpoint was made: {cause}")

    def _stop(self, cause: str) -> None:
        if self._stopping is not None:
            return
        self._stopping = cause
        self._emit("stop_requested", cause=cause)
        if self.actors.bridges:
            self._ask_hub(lambda hub: hub.request_stop.remote())
        else:
            self._ask(next(iter(self.actors.leads.values())).stop.remote())

    # -------------------------------------------------------------- small things

    def _ask(self, call: Any) -> Any:
        return collect({0: call}, _POLL_TIMEOUT_S)[0]

    def _ask_hub(self, ask: Callable[[Any], Any]) -> Any:
        """Ask the averager; None if it is lost and will be replaced."""
        try:
            return self._ask(ask(self.actors.bridges[self.actors.home.region]))
        except RegionLostError:
            if not self.actors.can_lose(self.actors.home.region):
                raise
            return None  # the next poll finds out, too

    def _note_wan(self, answers: Answers, *, force: bool = False) -> None:
        now_s = time.monotonic()
        if not force and now_s - self._wan_s < _WAN_EVERY_S:
            return
        self._wan_s = now_s
        for (role, region), answer in answers.items():
            links = answer["status"].get("links", {}) if role == "bridge" else {}
            for peer, link in links.items():
                by_class = {k: int(v) for k, v in link["bytes_out"].items()}
                self._emit("wan", src=region, dst=peer, bytes_by_class=by_class)
            self.links.note(region, links)
        self.links.save()

    def _emit(self, kind: str, **fields: Any) -> None:
        self.recorder.emit(kind, time.time() - self.origin_unix_s, **fields)


def _phases(answers: Answers) -> set[str]:
    return {str(a["status"]["phase"]) for (role, _), a in answers.items() if role == "ps"}


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.float64)
