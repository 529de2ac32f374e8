"""The averager inside the bridge of its region: serializes its inputs and sends its outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from geo_ray.runtime.exchange.base import BridgeFailure, UpdateStage
from geo_ray.storage.places import PartPlaces
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager, open_requests, pace_of
from geo_ray.training.checkpoint_parts import AveragerSnapshot, typed, write_averager_part
from geo_ray.training.command_log import LogOutcome, Op, Wake, carry_out
from geo_ray.training.membership import View
from geo_ray.training.messages import ReplyMessage, UpdateMessage


class Alarm:
    """Set it again and again; only the last time counts.

    Args:
        ring: called in a thread of its own, never twice for one setting.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at ``at_s`` (`time.monotonic`), and at no other time; None: not at all."""
        with self._lock:
            if at_s == self._at_s:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._at_s, self._timer = at_s, None
            if at_s is not None:
                wait_s = max(0.0, at_s - time.monotonic())
                self._timer = threading.Timer(wait_s, self._rang, (at_s,))
                self._timer.daemon = True
                self._timer.start()

    def _rang(self, at_s: float) -> None:
        with self._lock:
            if at_s != self._at_s:
                return
            self._at_s = self._timer = None
        self._ring()


class Staged(Protocol):
    """A path with a stage, which adds plain values to the averager's part of a checkpoint."""

    @property
    def stage(self) -> UpdateStage:
        """The stage."""


class AveragerOutput:
    """Takes what an averager leaves beside its answers: parts of checkpoints, events, its failure.

    Args:
        event_buffer: takes events for the controller.
        places: where parts of checkpoints go.
        failure: of the bridge.
    """

    def __init__(
        self, event_buffer: EventBuffer, places: PartPlaces, failure: BridgeFailure
    ) -> None:
        self.failure = failure
        self._event_buffer = event_buffer
        self._places = places

    def collect(self, averager: Averager, path: Staged | None = None) -> None:
        """Take what ``averager`` has left; call under the lock that guards it."""
        snapshots, averager.snapshots = averager.snapshots, []
        for snapshot in snapshots:  # disks are slow, and this may be the link's receiving thread
            snapshot.control["beside"] = {} if path is None else path.stage.export(averager)
            threading.Thread(target=self._write, args=(snapshot,), daemon=True).start()
        for reading in averager.noise.news():  # of all regions together
            self._event_buffer.add("noise", **{**reading.fields(), "region": None})
        if averager.failure is not None:
            self.failure.note(averager.failure, "the averager")

    def _write(self, snapshot: AveragerSnapshot) -> None:
        try:
            part = write_averager_part(self._places, snapshot)
        except Exception as error:  # whatever it is: the controller waits for the part
            self._event_buffer.add("part_failed", id=snapshot.id, error=typed(error))
        else:
            self._event_buffer.add("parts", id=snapshot.id, step=0, parts=[part])


class LocalAverager:
    """An averager without a standby, for threads.

    Args:
        averager: the averager.
        output: takes what it leaves beside its answers.
        answer: takes answers that come when the strategy asked to be woken.
        path: its stage adds to checkpoints.
    """

    def __init__(
        self,
        averager: Averager,
        output: AveragerOutput,
        answer: Callable[[Sequence[ReplyMessage]], None],
        path: Staged | None = None,
    ) -> None:
        self._averager = averager
        self._output = output
        self._answer = answer
        self._path = path
        self._lock = threading.Lock()
        self._alarm = Alarm(self._on_wake)
        averager.at(time.monotonic())
        self._alarm.set(averager.wakes_s)  # it may have been restored

    @property
    def version(self) -> int:
        """Commits so far."""
        return self._averager.state.version

    @property
    def pace(self) -> int | None:
        """Steps between exchanges that it asks for; None: it asks for none."""
        return pace_of(self._averager.state)

    @property
    def view(self) -> View:
        """Who takes part."""
        return self._averager.view

    def open_requests(self) -> dict[str, int] | None:
        """See `open_requests`; None, too, while the averager is at work: nobody waits for that."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return open_requests(self._averager)
        finally:
            self._lock.release()

    def carry_out(self, op: Op) -> LogOutcome:
        """Do what ``op`` says."""
        with self._lock:
            self._averager.at(time.monotonic())
            outcome = carry_out(self._averager, op)
            self._alarm.set(self._averager.wakes_s)
            self._output.collect(self._averager, self._path)
        return outcome

    def take_in_round(self, updates: Sequence[UpdateMessage]) -> list[ReplyMessage]:
        """Take in all updates of a round.

        Raises:
            GeoRayError: it refuses them.
        """
        with self._lock:
            try:
                return [reply for update in updates for reply in self._averager.on_update(update)]
            finally:
                self._output.collect(self._averager)

    def request_stop(self) -> None:
        """Tell all regions, with their next answers, to finish."""
        with self._lock:
            self._averager.request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Begin a checkpoint; False if it cannot be now."""
        with self._lock:
            self._averager.at(time.monotonic())
            begun = self._averager.begin_checkpoint(checkpoint, halt=halt)
            self._output.collect(self._averager, self._path)
        return begun

    def close(self) -> None:
        """Be woken no more."""
        self._alarm.set(None)

    def _on_wake(self) -> None:
        try:
            self._answer(self.carry_out(Wake()).replies)
        except Exception as error:  # this is a thread of its own: nobody else would hear of it
            self._output.failure.note(error, "answers that were due")
