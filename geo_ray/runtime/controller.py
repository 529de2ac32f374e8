"""Watches over a run: writes its events, replaces lost workers, saves, stops.

It decides nothing about training. Everything that it waits for has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from geo_ray.config.experiment import Experiment
from geo_ray.errors import (
    GeoRayError,
    InterruptedRunError,
    NonFiniteError,
    RegionLostError,
    WorkerLostError,
)
from geo_ray.job.evals import EvalBoard
from geo_ray.job.recorder import Recorder
from geo_ray.runtime.crew import Crew, CrewWorker, reason_of
from geo_ray.runtime.saver import Saver

log = logging.getLogger(__name__)

_TICK_S = 0.2
_POLL_TIMEOUT_S = 60.0
_WAN_EVERY_S = 1.0
_HALT_DEADLINE_S = 120.0


@dataclass(slots=True)
class Controller:
    """See the module's docstring.

    Attributes:
        experiment: the run.
        crew: its actors.
        recorder: takes events.
        evals: combines evaluations.
        saver: commits checkpoints.
        origin_unix_s: time of day at which the run's clock was 0.
        interrupted: set from outside (a signal) to save and stop.
        restarts: workers replaced so far.
    """

    experiment: Experiment
    crew: Crew
    recorder: Recorder
    evals: EvalBoard
    saver: Saver
    origin_unix_s: float
    interrupted: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0
    _stopping: str | None = None
    _halting: GeoRayError | None = None
    _halt_began_s: float = 0.0
    _halt_asked: bool = False
    _saved_s: float = field(default_factory=time.monotonic)
    _wan_s: float = 0.0

    def run(self) -> None:
        """Watch until all workers are home.

        Raises:
            InterruptedRunError: after a checkpoint, if `interrupted` was set.
            NonFiniteError: after a checkpoint, if too many steps in a row were refused.
            WorkerLostError: if workers die more often than allowed.
            RegionLostError: if a server or bridge died.
            GeoRayError: what a worker found wrong with task or data.
        """
        while any(worker.steps is None for worker in self.crew.workers.values()):
            self._collect(_TICK_S)
            self._poll()
            self._keep_time()
        for _ in range(50):  # what is still being written, and the last evaluations
            if not self._poll() and self.saver.open_id is None:
                break
            time.sleep(0.05)
        self._note_wan(force=True)
        self.saver.abandon()
        if self._halting is not None:
            raise self._halting

    # -------------------------------------------------------------- workers

    def _collect(self, timeout_s: float) -> None:
        busy = {w.ref: w for w in self.crew.workers.values() if w.steps is None}
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=timeout_s)
        for ref in ready:
            worker = busy[ref]
            try:
                worker.steps = int(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                self._poll()  # the events that led to it
                raise reason_of(error) from error
            except ray.exceptions.RayActorError as error:
                self._replace(worker, error)

    def _replace(self, worker: CrewWorker, error: Exception) -> None:
        cause = str(error).splitlines()[0]
        name = f"{worker.region}/{worker.rank}"
        self._emit("worker_lost", region=worker.region, worker=worker.rank, cause=cause)
        if self.restarts >= self.experiment.train.max_worker_restarts:
            raise WorkerLostError(
                f"worker {name} died ({cause}); train.max_worker_restarts = "
                f"{self.experiment.train.max_worker_restarts} is used up"
            )
        self.restarts += 1
        fresh = self.crew.replace_worker(worker)
        self._emit("worker_replaced", region=worker.region, worker=worker.rank, epoch=fresh.epoch)

    # -------------------------------------------------------------- servers and bridges

    def _poll(self) -> int:
        """Fetch and handle what happened; gives the number of events."""
        crew = self.crew
        handles = {**{("ps", r): h for r, h in crew.leads.items()}}
        handles |= {("bridge", r): h for r, h in crew.bridges.items()}
        refs = {key: handle.poll.remote() for key, handle in handles.items()}
        answers: dict[tuple[str, str], dict[str, Any]] = {}
        for (role, region), ref in refs.items():
            try:
                answers[role, region] = ray.get(ref, timeout=_POLL_TIMEOUT_S)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                raise RegionLostError(
                    f"the {role} of region '{region}' is lost: {str(error).splitlines()[0]}"
                ) from error
        events = [event for answer in answers.values() for event in answer["events"]]
        for event in sorted(events, key=lambda e: float(e["t_s"])):
            self._handle(dict(event))
        exhausted = [r for (_, r), a in answers.items() if a["status"].get("exhausted")]
        if exhausted and self._halting is None:
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
            size_bytes = self.saver.add(event["id"], event["parts"], event["step"])
            if size_bytes is not None:
                step = self.saver.step
                self.recorder.emit("checkpoint", t_s, id=event["id"], step=step, bytes=size_bytes)
        elif kind == "part_failed":
            log.error("checkpoint %s abandoned: %s", event["id"], event["error"])
            self.saver.abandon()
        else:
            self.recorder.emit(kind, t_s, region=region, **event)

    def _evaluate(self, region: str, t_s: float, event: dict[str, Any]) -> None:
        stats = {name: _array(values) for name, values in event["stats"].items()}
        target = self.experiment.train.target
        for done in self.evals.add(
            region, event["step"], stats, event["rows"], final=event["final"]
        ):
            written = self.recorder.emit(
                "eval",
                t_s,
                step=done.step,
                region=done.region,
                metrics=done.metrics,
                samples=done.samples,
                final=done.final,
            )
            if target is not None and not done.final and target.reached(written):
                self._stop(f"{target.metric} reached {target.value:g}")

    # -------------------------------------------------------------- saving and stopping

    def _keep_time(self) -> None:
        if self.interrupted.is_set() and self._halting is None:
            self._halt(InterruptedRunError("the run was interrupted; its state is saved"))
        every_s = self.experiment.checkpoint.every_s
        now_s = time.monotonic()
        if self._halting is not None:
            if now_s - self._halt_began_s > _HALT_DEADLINE_S:
                raise self._halting
            if self.saver.open_id is None and not self._halt_asked:
                self._halt_asked = self._begin_checkpoint(halt=True)
        elif every_s is not None and now_s - self._saved_s >= every_s:
            self._begin_checkpoint(halt=False)

    def _begin_checkpoint(self, *, halt: bool) -> bool:
        """Open a checkpoint, unless one is open or the run is about to end by itself."""
        if self.saver.open_id is not None:
            return False
        self._saved_s = time.monotonic()
        checkpoint = self.saver.begin()
        if not self.crew.bridges:
            lead = next(iter(self.crew.leads.values()))
            ray.get(lead.checkpoint_now.remote(checkpoint, halt), timeout=_POLL_TIMEOUT_S)
            return True
        hub = self.crew.bridges[self.experiment.averager_region]
        began = ray.get(hub.request_checkpoint.remote(checkpoint, halt), timeout=_POLL_TIMEOUT_S)
        if not began:
            self.saver.abandon()
        return bool(began)

    def _halt(self, why: GeoRayError) -> None:
        self._halting = why
        self._halt_began_s = time.monotonic()
        self._emit("stop_requested", cause=why.message)

    def _stop(self, cause: str) -> None:
        if self._stopping is not None:
            return
        self._stopping = cause
        self._emit("stop_requested", cause=cause)
        if self.crew.bridges:
            hub = self.crew.bridges[self.experiment.averager_region]
            ray.get(hub.request_stop.remote(), timeout=_POLL_TIMEOUT_S)
        else:
            lead = next(iter(self.crew.leads.values()))
            ray.get(lead.stop.remote(), timeout=_POLL_TIMEOUT_S)

    # -------------------------------------------------------------- small things

    def _note_wan(
        self, answers: dict[tuple[str, str], dict[str, Any]] | None = None, *, force: bool = False
    ) -> None:
        now_s = time.monotonic()
        if not force and now_s - self._wan_s < _WAN_EVERY_S:
            return
        self._wan_s = now_s
        if answers is None:
            answers = {
                ("bridge", r): ray.get(h.poll.remote(), timeout=_POLL_TIMEOUT_S)
                for r, h in self.crew.bridges.items()
            }
        for (role, region), answer in answers.items():
            links = answer["status"].get("links", {}) if role == "bridge" else {}
            for peer, link in links.items():
                by_class = {k: int(v) for k, v in link["bytes_out"].items()}
                self._emit("wan", src=region, dst=peer, bytes_by_class=by_class)

    def _emit(self, kind: str, **fields: Any) -> None:
        self.recorder.emit(kind, time.time() - self.origin_unix_s, **fields)


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.float64)
