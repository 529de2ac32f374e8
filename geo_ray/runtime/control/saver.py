"""Collects the parts of a checkpoint from all processes and commits it when all are there.

To commit is to read and to hash all of it once more, on a thread: whoever watches the run has no
time for that. The thread gives way to those that train. An object store is asked on threads only,
one request after the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Final, cast

from pydantic import JsonValue

from geo_ray.checkpoint.manifest import CheckpointManifest, PartInfo
from geo_ray.checkpoint.names import AVERAGER_PART, shard_part_name
from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.config.experiment import Experiment
from geo_ray.errors import CheckpointConflictError, GeoRayError
from geo_ray.job.resumption import codecs_of
from geo_ray.job.start.members import LOST, ROWS
from geo_ray.runtime.actors.parts import typed
from geo_ray.runtime.control.health import LossHealth
from geo_ray.util.threads import give_way

log = logging.getLogger(__name__)
_CLOSE_S: Final = 10.0
"""For a store to be told that a save is given up."""


class Saver:
    """One open checkpoint at a time.

    Args:
        store: where checkpoints go.
        experiment: names the parts that belong to a checkpoint.
        config_digest: of the configuration.
        epoch: incarnation of the run, kept so that a resume takes the next.
        health: follows the loss; it is judged when a checkpoint begins.
        lease_epoch: the how manieth holder of the run's lease saves; kept for people.

    Raises:
        StoreError: the store does not answer or refuses.
    """

    def __init__(
        self,
        store: CheckpointStore,
        experiment: Experiment,
        config_digest: str,
        epoch: int,
        health: LossHealth,
        lease_epoch: int = 1,
    ) -> None:
        self._store = store
        self._expected = part_names(experiment)
        self._config_digest = config_digest
        self._extra: dict[str, JsonValue] = {
            "epoch": epoch,
            "lease_epoch": lease_epoch,
            "codecs": codecs_of(experiment),
        }
        self.health = health
        self._is_healthy = True
        self._id: int | None = None
        self._newest = store.next_id() - 1 if store.far else -1
        self._refused: dict[int, GeoRayError] = {}  # saves that the store did not begin
        self._asking: threading.Thread | None = None  # what asks a far store last
        self._parts: dict[str, PartInfo] = {}
        self._step = 0
        self._commit: Future[int] | None = None

    @property
    def open_id(self) -> int | None:
        """The checkpoint whose parts or commit are awaited, or None."""
        return self._id

    @property
    def is_committing(self) -> bool:
        """Whether all parts of the open checkpoint are there."""
        return self._commit is not None

    def go_on(self, parts: set[str], newest: int) -> None:
        """Go on where another driver has saved until now.

        Args:
            parts: names of those that regions write.
            newest: id of the newest checkpoint that it has begun.
        """
        self._expected = parts | (self._expected & {AVERAGER_PART})
        self._newest = max(self._newest, newest)

    def expect(self, parts: set[str], epoch: int) -> None:
        """A region has joined, which writes ``parts`` of every checkpoint from now on.

        Args:
            parts: their names.
            epoch: of the newcomer; a resume takes a later one than that of any.
        """
        self._expected = self._expected | parts
        self._extra["epoch"] = max(int(str(self._extra["epoch"])), epoch)

    def note_lost(self, regions: Sequence[str], rows: Mapping[str, Mapping[str, object]]) -> None:
        """What a resume must know of regions that take no part.

        Args:
            regions: those that are lost, and were not asked to leave; a resume brings them back.
            rows: the books of rows of all that were there before.
        """
        self._extra[LOST] = list(regions)
        self._extra[ROWS] = cast(JsonValue, {name: dict(each) for name, each in rows.items()})

    def forget(self, parts: set[str]) -> None:
        """Go on without the process that would have written ``parts``; abandons the open one."""
        self.abandon()
        self._expected = self._expected - parts

    def begin(self) -> int:
        """Open the next checkpoint.

        Raises:
            RunDirectoryError: if its directory cannot be made. What a far store says against it is
                told when it is committed.
        """
        # Never an id twice, or late parts of an abandoned checkpoint would pass for the next one's.
        checkpoint = self._newest + 1
        if self._store.far:
            self._ask(lambda: self._begin_far(checkpoint))
        else:
            checkpoint = max(self._store.next_id(), checkpoint)
            self._store.begin(checkpoint)
        self._newest = checkpoint
        self._id, self._parts, self._step = checkpoint, {}, 0
        self._is_healthy = self.health.judge()
        return checkpoint

    def add(self, checkpoint: int, parts: Sequence[PartInfo], step: int) -> None:
        """Take in parts; begins to commit when the last one is there, see `committed`."""
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
        told: Future[int] = Future()
        self._commit = told
        self._ask(lambda: self._commit_one(manifest, told))

    def committed(self, wait_s: float = 0.0) -> int | None:
        """Whether the open checkpoint counts by now.

        Args:
            wait_s: for its commit, if that has begun.

        Returns:
            Size of the checkpoint in bytes, once; None if there is none, or not yet.

        Raises:
            GeoRayError: if it cannot be committed.
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
        """Those of the checkpoint that was added to last."""
        return tuple(self._parts.values())

    @property
    def step(self) -> int:
        """Most steps of any region in the checkpoint that was added to last."""
        return self._step

    def abandon(self) -> None:
        """Give the open checkpoint up and remove its files, unless it has all its parts.

        Files that cannot be removed do no harm: without a manifest nobody reads them.
        """
        if self._id is None or self._commit is not None:
            return
        given_up, self._id = self._id, None
        if self._store.far:
            self._ask(lambda: self._abandon_one(given_up))
        else:
            self._abandon_one(given_up)

    def close(self) -> None:
        """Wait for a commit that has begun."""
        if self._commit is not None:
            self._commit.exception()
        if self._asking is not None:
            self._asking.join(_CLOSE_S)

    # -------------------------------------------------------------- on threads

    def _ask(self, work: Callable[[], None]) -> None:
        """Do ``work`` on a thread, after all that was asked before."""
        before = self._asking

        def in_turn() -> None:
            if before is not None:
                before.join()
            give_way()
            work()

        self._asking = threading.Thread(target=in_turn, name="saver", daemon=True)
        self._asking.start()

    def _begin_far(self, checkpoint: int) -> None:
        try:
            self._store.begin(checkpoint)
        except Exception as error:  # whatever it is: who commits gets it
            log.warning("checkpoint %d was not begun: %s", checkpoint, error)
            self._refused[checkpoint] = typed(error)

    def _abandon_one(self, checkpoint: int) -> None:
        try:
            self._store.abandon(checkpoint)
        except GeoRayError as error:
            log.warning("files of checkpoint %d stay: %s", checkpoint, error.message)

    def _commit_one(self, manifest: CheckpointManifest, told: Future[int]) -> None:
        try:
            if manifest.id in self._refused:
                raise self._refused[manifest.id]
            self._store.commit(manifest.id, manifest)
        except Exception as error:  # whatever it is: who asked must get it
            if isinstance(error, CheckpointConflictError) or not self._counts(manifest):
                told.set_exception(typed(error))
                return
            log.warning("checkpoint %d counts, but: %s", manifest.id, error)
        told.set_result(sum(part.bytes for part in manifest.parts))

    def _counts(self, manifest: CheckpointManifest) -> bool:
        """Whether a commit that failed has come so far that its checkpoint counts."""
        try:
            return self._store.manifest(manifest.id) == manifest
        except GeoRayError:
            return False


def part_names(experiment: Experiment) -> set[str]:
    """Names of all parts of a checkpoint of ``experiment``."""
    names = {shard_part_name(r.name, i) for r in experiment.present for i in range(r.ps_shards)}
    return names | ({AVERAGER_PART} if len(experiment.regions) > 1 else set())
