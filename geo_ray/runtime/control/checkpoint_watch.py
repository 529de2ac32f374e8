"""Has checkpoints made: tells the averager and the regions, and takes note of what becomes of them.

`RunPolicy` decides when, and `Saver` commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray

from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError, RegionLostError
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import collect
from geo_ray.runtime.control.policy import RunPolicy
from geo_ray.runtime.control.saver import Saver
from geo_ray.runtime.control.store_traffic import StoreTraffic

log = logging.getLogger(__name__)

_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that the averager was asked to begin.

    Attributes:
        id: its id.
        answer: whether it has begun, once the averager answers; None where there is no averager.
        tells: whether the regions are told, too.
        halt: whether they stand still afterwards.
    """

    id: int
    answer: Any
    tells: bool
    halt: bool


@dataclass(slots=True)
class CheckpointWatch:
    """See the module's docstring.

    Attributes:
        experiment: the run.
        actors: its actors.
        policy: decides.
        saver: commits.
        emit: takes events of now: a kind, and its fields by name.
        now_s: of the run's clock.
        phases: what the regions told last, by name; it is kept up to date.
        traffic: counts what crosses regions.
    """

    experiment: Experiment
    actors: ActorGroup
    policy: RunPolicy
    saver: Saver
    emit: Callable[..., None]
    now_s: Callable[[], float]
    phases: Mapping[str, str]
    traffic: StoreTraffic
    _begun: _Begun | None = None
    _began_s: float = 0.0

    def keep_time(self, *, may_begin: bool) -> None:
        """Give up the open one if its parts do not come, and begin one that is due.

        Raises:
            GeoRayError: the regions were to stand still, and did not in time.
        """
        now_s, saver = time.monotonic(), self.saver
        awaits_parts = saver.open_id is not None and not saver.is_committing
        late = self.policy.overdue(now_s, awaits_parts=awaits_parts)
        if late is not None:
            self.give_up(f"checkpoint {saver.open_id} is given up: {late}")
        save = self.policy.due(now_s, is_open=saver.open_id is not None)
        if save is not None and may_begin:
            self.begin(halt=save.halt)

    def begin(self, *, halt: bool, is_over: bool = False) -> None:
        """Let the averager copy its state, then tell the regions, which may hear it later, too.

        The averager's next answer says it, too, so a region that is not told here, or late, copies
        its state in time.

        Args:
            halt: whether the regions stand still afterwards.
            is_over: whether they have nothing more to do.
        """
        try:
            checkpoint = self.saver.begin()
        except GeoRayError as error:
            self.failed(error)
            return
        self._began_s = self.now_s()
        answer = None
        if self.actors.bridges:
            bridge = self.actors.bridges[self.actors.home.region]
            answer = bridge.request_checkpoint.remote(checkpoint, halt)
        self._begun = _Begun(checkpoint, answer, is_over or self._may_tell(), halt)
        self._tell()

    def tick(self) -> None:
        """Tell the regions of one that has begun, and take note of one that counts by now."""
        self._tell()
        self._note_commit()

    def add(self, event: Mapping[str, Any]) -> None:
        """Parts of a checkpoint are written."""
        self.saver.add(event["id"], event["parts"], event["step"])
        if event["id"] == self.saver.open_id:
            self.policy.on_part(time.monotonic())

    def give_up(self, cause: str) -> None:
        """Nothing will come of the open one."""
        log.warning("%s", cause)
        self.emit("checkpoint_failed", cause=cause)
        self.saver.abandon()

    def failed(self, error: GeoRayError) -> None:
        """One was not written.

        Raises:
            GeoRayError: the run must end.
        """
        pause_s = self.policy.save_failed(error, time.monotonic())
        log.error("checkpoint %s failed: %s", self.saver.open_id, error)
        again = f"; the run goes on, and saves again in {pause_s:g} s or later"
        self.emit("checkpoint_failed", cause=error.message + again)
        self.saver.abandon()

    def _tell(self) -> None:
        """Once the averager has begun the checkpoint, tell the regions."""
        begun = self._begun
        if begun is None:
            return
        if begun.answer is not None and not ray.wait([begun.answer], timeout=0)[0]:
            return
        self._begun = None
        if begun.id != self.saver.open_id:
            return
        if begun.answer is not None and not _has_begun(begun.answer):
            # The averager is new, and does not know yet what each region has; or it is lost.
            self.saver.abandon()
            return
        for region, primary in self.actors.primaries.items():
            # Who stands still gets no answer any more that would say it.
            if begun.tells or self.phases.get(region) == "halted":
                primary.cut.remote(begun.id, begun.halt)

    def _may_tell(self) -> bool:
        """Whether regions may hear of a checkpoint before their next answer.

        Not where answers go from region to region, or where an averager before the present one has
        given some: one that is on its way still must be merged first.
        """
        return self.experiment.overlay.kind == "star" and self.actors.home.epoch == 1

    def _note_commit(self) -> None:
        """Take note of the open checkpoint if it has come to count."""
        checkpoint = self.saver.open_id
        try:
            size_bytes = self.saver.committed()
        except GeoRayError as error:
            self.failed(error)
            return
        if checkpoint is not None and size_bytes is not None:
            self.policy.saved(checkpoint)
            step, began_s = self.saver.step, self._began_s
            self.emit("checkpoint", id=checkpoint, step=step, bytes=size_bytes, start_s=began_s)
            self.traffic.saved(self.saver.parts, self.actors.home.region)


def _has_begun(answer: Any) -> bool:
    try:
        return bool(collect({0: answer}, _ANSWER_S)[0])
    except RegionLostError:  # the next poll finds out whether the run can go on
        return False
