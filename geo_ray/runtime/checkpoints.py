"""Checkpoints of a run: starts them, collects all parts, commits them and counts bytes.

`RunPolicy` decides when. A commit reads and hashes every part again, on a low priority thread.
Bytes that cross regions are reported as `wan` events of the class ``checkpoint``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol, cast

import ray
from pydantic import JsonValue

from geo_ray.base.errors import CheckpointConflictError, GeoRayError, RegionLostError
from geo_ray.base.threads import give_way
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import collect
from geo_ray.runs.resume import LOST, ROWS, codecs_of
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.policies import LossHealth, RunPolicy
from geo_ray.runtime.reporting import RunServices
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import AVERAGER_PART, CheckpointManifest, PartInfo, shard_part_name
from geo_ray.storage.places import Crossed, StoreRegions
from geo_ray.training.checkpoint_parts import typed

log = logging.getLogger(__name__)
_CLOSE_S: Final = 10.0
"""Limit for notifying a store that a save was given up."""


class Saver:
    """Saves one checkpoint at a time.

    Args:
        store: where checkpoints are written.
        experiment: determines the parts of a checkpoint.
        config_digest: digest of the configuration.
        attempt: attempt of the run; stored so that a resume uses the next one.
        health: tracks the loss; evaluated when a checkpoint begins.
        lease_token: fencing token of the run actor's lease; stored for information.

    Raises:
        StoreError: the store does not answer or refuses.
    """

    def __init__(
        self,
        store: CheckpointStore,
        experiment: Experiment,
        config_digest: str,
        attempt: int,
        health: LossHealth,
        lease_token: int = 1,
    ) -> None:
        self._store = store
        self._expected = part_names(experiment)
        self._config_digest = config_digest
        self._extra: dict[str, JsonValue] = {
            "attempt": attempt,
            "lease_token": lease_token,
            "codecs": codecs_of(experiment),
        }
        self.health = health
        self._is_healthy = True
        self._is_last = False  # see `CheckpointStore.commit`
        self._id: int | None = None
        self._newest = store.next_id() - 1 if store.is_remote else -1
        self._refused: dict[int, GeoRayError] = {}  # saves that the store did not begin
        self._asking: threading.Thread | None = None  # what asks a far store last
        self._parts: dict[str, PartInfo] = {}
        self._step = 0
        self._commit: Future[int] | None = None

    @property
    def open_id(self) -> int | None:
        """Id of the checkpoint whose parts or commit are awaited, or None."""
        return self._id

    @property
    def is_committing(self) -> bool:
        """Whether all parts of the open checkpoint have arrived."""
        return self._commit is not None

    def resume(self, parts: set[str], newest: int) -> None:
        """Continue after another run actor's checkpoints.

        Args:
            parts: names of the parts that regions write.
            newest: id of the newest checkpoint that was begun.
        """
        self._expected = parts | (self._expected & {AVERAGER_PART})
        self._newest = max(self._newest, newest)

    def expect(self, parts: set[str], attempt: int) -> None:
        """Record that a region has joined, which writes ``parts`` of later checkpoints.

        Args:
            parts: their names.
            attempt: attempt of the region; a resume uses a later one than any region's.
        """
        self._expected = self._expected | parts
        self._extra["attempt"] = max(int(str(self._extra["attempt"])), attempt)

    def note_lost(self, regions: Sequence[str], rows: Mapping[str, Mapping[str, object]]) -> None:
        """Record what a resume must know of regions that do not take part.

        Args:
            regions: lost regions that were not asked to leave; a resume brings them back.
            rows: row accounting of all regions that took part before.
        """
        self._extra[LOST] = list(regions)
        self._extra[ROWS] = cast(JsonValue, {name: dict(each) for name, each in rows.items()})

    def forget(self, parts: set[str]) -> None:
        """Continue without the process that writes ``parts``; abandons the open checkpoint."""
        self.abandon()
        self._expected = self._expected - parts

    def begin(self, *, is_last: bool = False) -> int:
        """Open the next checkpoint.

        Args:
            is_last: see `CheckpointStore.commit`.

        Raises:
            RunDirectoryError: its directory cannot be created. A remote store's refusal is reported
                at the commit.
        """
        # Ids are not reused: late parts of an abandoned checkpoint would be mistaken for the next
        # one's.
        checkpoint = self._newest + 1
        if self._store.is_remote:
            self._ask(partial(self._begin_remote, checkpoint))
        else:
            checkpoint = max(self._store.next_id(), checkpoint)
            self._store.begin(checkpoint)
        self._newest = checkpoint
        self._id, self._parts, self._step = checkpoint, {}, 0
        self._is_last = is_last
        self._is_healthy = self.health.judge()
        return checkpoint

    def add(self, checkpoint: int, parts: Sequence[PartInfo], step: int) -> None:
        """Record parts; the last one starts the commit, see `committed`."""
        if checkpoint != self._id or self._commit is not None:
            return
        self._parts.update({part.name: part for part in parts})
        self._step = max(self._step, step)
        if set(self._parts) != self._expected:
            return
        manifest = CheckpointManifest(
            id=checkpoint,
            step=self._step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config_digest=self._config_digest,
            parts=tuple(self._parts[name] for name in sorted(self._parts)),
            healthy=self._is_healthy and all(part.finite for part in self._parts.values()),
            extra=self._extra | {"loss": dict(self.health.export())},
        )
        done: Future[int] = Future()
        self._commit = done
        self._ask(partial(self._commit_one, manifest, done, is_last=self._is_last))

    def committed(self, wait_s: float = 0.0) -> int | None:
        """Return the size of the open checkpoint once it is committed.

        Args:
            wait_s: longest wait for a commit in progress.

        Returns:
            Size in bytes, once; None if there is none, or it is not committed yet.

        Raises:
            GeoRayError: it cannot be committed.
        """
        commit = self._commit
        if commit is None:
            return None
        try:
            error = commit.exception(wait_s)
        except TimeoutError:
            return None
        self._commit = None
        if error is not None:
            raise error
        self._id = None
        return commit.result()

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """Parts of the checkpoint that was last added to."""
        return tuple(self._parts.values())

    @property
    def step(self) -> int:
        """Largest step of any region in the checkpoint that was last added to."""
        return self._step

    def abandon(self) -> None:
        """Give the open checkpoint up and remove its files, unless all its parts are there.

        Files that cannot be removed are harmless: without a manifest they are not read.
        """
        if self._id is None or self._commit is not None:
            return
        given_up, self._id = self._id, None
        if self._store.is_remote:
            self._ask(partial(self._abandon_one, given_up))
        else:
            self._abandon_one(given_up)

    def close(self) -> None:
        """Wait for a commit in progress."""
        if self._commit is not None:
            self._commit.exception()
        if self._asking is not None:
            self._asking.join(_CLOSE_S)

    # -------------------------------------------------------------- on threads

    def _ask(self, work: Callable[[], None]) -> None:
        """Do ``work`` on a thread, after all earlier requests."""
        before = self._asking

        def in_turn() -> None:
            if before is not None:
                before.join()
            give_way()
            work()

        self._asking = threading.Thread(target=in_turn, name="saver", daemon=True)
        self._asking.start()

    def _begin_remote(self, checkpoint: int) -> None:
        try:
            self._store.begin(checkpoint)
        except Exception as error:  # of any class: reported at the commit
            log.warning("checkpoint %d was not begun: %s", checkpoint, error)
            self._refused[checkpoint] = typed(error)

    def _abandon_one(self, checkpoint: int) -> None:
        try:
            self._store.abandon(checkpoint)
        except GeoRayError as error:
            log.warning("files of checkpoint %d remain: %s", checkpoint, error.message)

    def _commit_one(
        self, manifest: CheckpointManifest, done: Future[int], *, is_last: bool
    ) -> None:
        try:
            if manifest.id in self._refused:
                raise self._refused[manifest.id]
            self._store.commit(manifest.id, manifest, is_last=is_last)
        except Exception as error:  # of any class: the caller must receive it
            if isinstance(error, CheckpointConflictError) or not self._counts(manifest):
                done.set_exception(typed(error))
                return
            log.warning("checkpoint %d is committed, but: %s", manifest.id, error)
        done.set_result(sum(part.bytes for part in manifest.parts))

    def _counts(self, manifest: CheckpointManifest) -> bool:
        """Return whether a failed commit went so far that its checkpoint is valid."""
        try:
            return self._store.manifest(manifest.id) == manifest
        except GeoRayError:
            return False


def part_names(experiment: Experiment) -> set[str]:
    """Names of all parts of a checkpoint of ``experiment``."""
    names = {shard_part_name(r.name, i) for r in experiment.present for i in range(r.ps_shards)}
    return names | ({AVERAGER_PART} if len(experiment.regions) > 1 else set())


_CLASS: Final = "checkpoint"


class TrafficSource(Protocol):
    """Counts bytes that checkpoints move between regions; see `StoreRegions`."""

    def saved(self, parts: Iterable[PartInfo], leader: str) -> Crossed:
        """Return the bytes of a written checkpoint."""

    def resumed(self, parts: Iterable[PartInfo], leader: str) -> Crossed:
        """Return the bytes of a checkpoint that was read."""


def traffic_source_of(actors: ActorGroup) -> TrafficSource | None:
    """Return the traffic source of a run, whose parts are in stores or in its directory."""
    spec = actors.spec
    if not spec.places.is_remote:
        return actors.upload_server
    checkpoint, leader = spec.experiment.checkpoint, spec.experiment.averager_region
    return StoreRegions(checkpoint.store_region or leader, checkpoint.region_stores)


@dataclass(slots=True)
class StoreTraffic:
    """Counts the bytes of checkpoints that cross regions, through stores or to the run actor.

    They are reported like the traffic of bridges, as `wan` events of the class ``checkpoint``, so
    that summary, report and bill include them.

    Attributes:
        stores: counts the traffic; None: there is none.
        loop: the run loop.
    """

    stores: TrafficSource | None
    loop: RunServices
    _total: Counter[tuple[str, str]] = field(default_factory=Counter)

    def resume(self, sums: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Continue the sums reported before, by link and class."""
        self._total = Counter({link: done.get(_CLASS, 0) for link, done in sums.items()})

    def saved(self, parts: Iterable[PartInfo], leader: str) -> None:
        """A checkpoint was written, with the averager in ``leader``."""
        if self.stores is not None:
            self._add(self.stores.saved(parts, leader))

    def resumed(self, parts: Iterable[PartInfo], leader: str) -> None:
        """Count a checkpoint that the run resumed from, with the averager in ``leader``."""
        if self.stores is not None:
            self._add(self.stores.resumed(parts, leader))

    def _add(self, crossed: Crossed) -> None:
        for (src, dst), count in sorted(crossed.items()):
            self._total[src, dst] += count
            # Events contain running sums; other events of the same link have other classes.
            self.loop.emit("wan", src=src, dst=dst, bytes_by_class={_CLASS: self._total[src, dst]})


_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that the averager was asked to begin.

    Attributes:
        id: its id.
        answer: whether it has begun, once the averager answers; None where there is no averager.
        tells: whether the regions are notified, too.
        halt: whether they pause afterwards.
    """

    id: int
    answer: Any
    tells: bool
    halt: bool


@dataclass(slots=True)
class CheckpointWatch:
    """Starts checkpoints: notifies the averager and the regions, and records the outcome.

    `RunPolicy` decides when, and `Saver` commits.

    Attributes:
        experiment: the run.
        actors: its actors.
        policy: decides.
        saver: commits.
        loop: the run loop.
        phases: last reported phases of the regions, by name; updated by the controller.
        traffic: counts bytes that cross regions.
    """

    experiment: Experiment
    actors: ActorGroup
    policy: RunPolicy
    saver: Saver
    loop: RunServices
    phases: Mapping[str, str]
    traffic: StoreTraffic
    _begun: _Begun | None = None
    _began_s: float = 0.0

    def keep_time(self, *, may_begin: bool) -> None:
        """Give up an open checkpoint whose parts do not arrive, and begin one that is due.

        Raises:
            GeoRayError: the regions did not pause in time.
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
        """Let the averager copy its state, then notify the regions.

        The averager's next answer contains the request, too, so a region that is not notified here,
        or late, still copies its state in time.

        Args:
            halt: whether the regions pause afterwards.
            is_over: whether they have nothing more to do.
        """
        try:
            checkpoint = self.saver.begin(is_last=is_over)
        except GeoRayError as error:
            self.failed(error)
            return
        self._began_s = self.loop.now_s()
        answer = None
        if self.actors.bridges:
            bridge = self.actors.bridges[self.actors.leader.region]
            answer = bridge.request_checkpoint.remote(checkpoint, halt)
        self._begun = _Begun(checkpoint, answer, is_over or self._may_tell(), halt)
        self._tell()

    def tick(self) -> None:
        """Notify the regions of a begun checkpoint, and record one that is committed."""
        self._tell()
        self._note_commit()

    def add(self, event: Mapping[str, Any]) -> None:
        """Record written parts of a checkpoint."""
        self.saver.add(event["id"], event["parts"], event["step"])
        if event["id"] == self.saver.open_id:
            self.policy.on_part(time.monotonic())

    def give_up(self, cause: str) -> None:
        """Give up the open checkpoint."""
        log.warning("%s", cause)
        self.loop.emit("checkpoint_failed", cause=cause)
        self.saver.abandon()

    def failed(self, error: GeoRayError) -> None:
        """Handle a checkpoint that was not written.

        Raises:
            GeoRayError: the run must end.
        """
        pause_s = self.policy.save_failed(error, time.monotonic())
        log.error("checkpoint %s failed: %s", self.saver.open_id, error)
        again = f"; the run continues, and saves again in {pause_s:g} s or later"
        self.loop.emit("checkpoint_failed", cause=error.message + again)
        self.saver.abandon()

    def _tell(self) -> None:
        """Notify the regions once the averager has begun the checkpoint."""
        begun = self._begun
        if begun is None:
            return
        if begun.answer is not None and not ray.wait([begun.answer], timeout=0)[0]:
            return
        self._begun = None
        if begun.id != self.saver.open_id:
            return
        if begun.answer is not None and not _has_begun(begun.answer):
            # The averager is new and does not know the state of each region yet; or it is lost.
            self.saver.abandon()
            return
        for region, primary in self.actors.primaries.items():
            # A paused region gets no answer that would contain the request.
            if begun.tells or self.phases.get(region) == "halted":
                primary.snapshot.remote(begun.id, begun.halt)

    def _may_tell(self) -> bool:
        """Return whether regions may be notified of a checkpoint before their next answer.

        False if answers go from region to region, or if an earlier averager has sent some: answers
        in flight must be merged first.
        """
        return self.experiment.overlay.kind == "star" and self.actors.leader.term == 1

    def _note_commit(self) -> None:
        """Record the open checkpoint once it is committed."""
        checkpoint = self.saver.open_id
        try:
            size_bytes = self.saver.committed()
        except GeoRayError as error:
            self.failed(error)
            return
        if checkpoint is not None and size_bytes is not None:
            self.policy.saved(checkpoint)
            step, began_s = self.saver.step, self._began_s
            self.loop.emit(
                "checkpoint", id=checkpoint, step=step, bytes=size_bytes, start_s=began_s
            )
            self.traffic.saved(self.saver.parts, self.actors.leader.region)


def _has_begun(answer: Any) -> bool:
    try:
        return bool(collect({0: answer}, _ANSWER_S)[0])
    except RegionLostError:  # the next poll decides whether the run can continue
        return False
