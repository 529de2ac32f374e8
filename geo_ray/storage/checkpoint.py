"""The checkpoints of one run: parts first, the manifest last, the last good one always kept.

    checkpoints/ckpt-00000012/eu-west-ps0.safetensors ... manifest.json

`storage/manifest.py` defines the manifest, `training/checkpoint_parts.py` the content of a part. A
folder without ``manifest.json`` is an unfinished save; it is never read, and removed later. The
rules are the same in a directory and in a bucket.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from geo_ray.base.canonical import JSONObject
from geo_ray.base.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    ConfigError,
    GeoRayError,
)
from geo_ray.base.files import Failpoint, no_failpoint
from geo_ray.storage.folders import Folder, LocalFolder, LocalRoot, PartSource, Root
from geo_ray.storage.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    PartInfo,
    decode_manifest,
    encode_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor

MIN_KEEP = 2
_MOST_SHOWN: Final = 10
_BLOCK_BYTES: Final = 1 << 20
_VERIFIED_BYTES: Final = 1 << 22
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose parts were complete and correct when it was opened.

    Attributes:
        folder: folder of its files.
        manifest: its manifest.
        problems: defects of newer checkpoints that were skipped; usually empty.
    """

    folder: Folder
    manifest: CheckpointManifest
    problems: tuple[str, ...] = field(default=())

    def read(self, name: str) -> tuple[dict[str, Tensor], JSONObject]:
        """Read and verify one part: its tensors on the CPU and its JSON.

        Raises:
            CheckpointError: there is no such part.
            CheckpointCorruptError: its file has changed since.
            StoreError: a store does not answer or refuses.
        """
        # PyTorch takes seconds to import, and most readers need only the manifest.
        from geo_ray.storage.parts import read_part

        return read_part(self.folder, self.manifest.part(name))

    def meta(self, name: str) -> JSONObject:
        """Read only the JSON of one part.

        Raises:
            CheckpointError, CheckpointCorruptError, StoreError: as for `read`.
        """
        from geo_ray.storage.parts import read_meta

        return read_meta(self.folder, self.manifest.part(name))


class CheckpointStore:
    """Saves and finds the checkpoints of one run. One process saves at a time.

    Every method raises `StoreError` if a bucket does not answer or refuses.

    Args:
        root: location of the checkpoints; a path is a directory, created by the first `begin`.
        keep: number of retained checkpoints; at least 2, because the newest may be damaged.
        failpoint: for tests.
        writing: entered for every change; raises if this process may not write.

    Raises:
        ConfigError: ``keep`` is less than 2.
    """

    def __init__(
        self,
        root: Path | Root,
        keep: int = 3,
        failpoint: Failpoint = no_failpoint,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if keep < MIN_KEEP:
            raise ConfigError(
                f"keep is {keep}; at least {MIN_KEEP} checkpoints must be retained",
                fix=f"Set checkpoint.keep to {MIN_KEEP} or more.",
            )
        self._root: Root = LocalRoot(root) if isinstance(root, Path) else root
        self._keep = keep
        self._failpoint = failpoint
        self._writing = writing
        self._open: set[int] = set()  # saves in progress
        self._known_bad: set[int] = set()  # found corrupt by `latest`

    def __str__(self) -> str:
        return str(self._root)

    @property
    def is_remote(self) -> bool:
        """See `Root.is_remote`."""
        return self._root.is_remote

    # -------------------------------------------------------------- saving

    def begin(self, id: int) -> Folder:
        """Start a save: remove unfinished saves, and create the folder for parts.

        Args:
            id: larger than that of every checkpoint; see `next_id`.

        Raises:
            CheckpointError: ``id`` is not larger.
            CheckpointConflictError: another writer has begun it.
            RunDirectoryError: the directory cannot be created.
        """
        found = self._root.ids()
        next_id = max((each for each, is_whole in found.items() if is_whole), default=-1) + 1
        if id in self._open or id < next_id:
            # A directory has one writer; in a store another writer may have saved it.
            kind = CheckpointConflictError if self.is_remote and id < next_id else CheckpointError
            raise kind(f"checkpoint {id} cannot be begun; the next is {next_id}")
        if self.is_remote:  # parts may be in transit already; an id is never reused
            with self._writing():
                self._root.claim(id)
            self._open.add(id)
            self._sweep(found, lambda each: each < id and each not in self._open)
        else:
            with self._writing():
                self._sweep(found, lambda each: each not in self._open)
                self._failpoint("begin.swept")
                self._root.claim(id)
                self._failpoint("begin.made")
            self._open.add(id)
        return self._root.folder(id)

    def commit(self, id: int, manifest: CheckpointManifest, *, is_last: bool = False) -> Checkpoint:
        """Commit a save: verify every part, write the manifest last, remove old checkpoints.

        Args:
            id: the save.
            manifest: its manifest.
            is_last: whether it has the whole state at the end of a run. It then replaces earlier
                checkpoints of the same step, unless it is not healthy.

        Raises:
            CheckpointError: the save was not begun, or the manifest belongs to another save.
            CheckpointConflictError: another writer has committed it, or begun to save since.
            CheckpointCorruptError: a part is missing or differs from the manifest; the save can
                still be completed or abandoned.
            RunDirectoryError: the manifest cannot be written; earlier checkpoints stay.
        """
        folder = self._root.folder(id)
        if manifest.id != id:
            raise CheckpointError(f"the manifest of checkpoint {manifest.id} was given for {id}")
        owner = self._root.owner(id)
        not_saved = f"checkpoint {id} is not being saved, so it cannot be committed"
        if owner == "other" or (owner is None and id in self._open):
            raise CheckpointConflictError(f"{not_saved}: another writer has begun to save")
        if owner is None:
            raise CheckpointError(not_saved)
        if folder.has(MANIFEST_FILE):
            raise CheckpointConflictError(f"{not_saved}: its manifest exists already")
        self._verify(folder, manifest)
        self._failpoint("commit.verified")
        parts = {part.file for part in manifest.parts}
        data = encode_manifest(manifest)
        half = len(data) // 2
        step = lambda name: self._failpoint(f"manifest.{name}")  # noqa: E731
        with self._writing():
            folder.remove(folder.sizes().keys() - parts)  # of dead writers
            folder.write(MANIFEST_FILE, [data[:half], data[half:]], len(data), step)
        self._open.discard(id)
        self._retain(manifest if is_last and manifest.healthy else None)
        return Checkpoint(folder, manifest)

    def abandon(self, id: int) -> None:
        """Abandon an unfinished save and remove its files.

        Does nothing without such a save, or if it belongs to another writer.

        Raises:
            CheckpointError: the checkpoint is committed.
            RunDirectoryError: the files cannot be removed.
        """
        if self.is_committed(id):
            raise CheckpointError(f"checkpoint {id} is committed, so it cannot be abandoned")
        self._open.discard(id)
        if self._root.owner(id) != "other":
            with (
                nullcontext() if self.is_remote else self._writing()
            ):  # a remote save belongs to this process
                self._root.folder(id).clear()

    # -------------------------------------------------------------- finding

    def ids(self) -> list[int]:
        """Return the ids of all committed checkpoints, oldest first, including damaged ones."""
        return sorted(id for id, is_committed in self._root.ids().items() if is_committed)

    def is_committed(self, id: int) -> bool:
        """Return whether a checkpoint has its manifest, and is therefore committed."""
        return self._root.folder(id).has(MANIFEST_FILE)

    def next_id(self) -> int:
        """Return the id for the next save: one more than any committed checkpoint's.

        In a store it also exceeds the ids of unfinished saves, whose parts may still arrive.
        """
        found = self._root.ids()
        return (
            max((id for id, is_whole in found.items() if is_whole or self.is_remote), default=-1)
            + 1
        )

    def newest_id(self) -> int:
        """Return the newest id of all saves, unfinished ones included; -1 if there is none."""
        return max(self._root.ids(), default=-1)

    def open(self, id: int) -> Checkpoint:
        """Open one checkpoint and verify all of it, which reads every byte.

        Raises:
            CheckpointMissingError: it does not exist.
            CheckpointCorruptError: a file differs from the manifest; names the file.
            CheckpointError: it has another version of the format.
        """
        folder, manifest = self._root.folder(id), self.manifest(id)
        for part in manifest.parts:
            verify_part(folder, part)
        return Checkpoint(folder, manifest)

    def peek(self, id: int) -> Checkpoint:
        """Open one checkpoint and verify its manifest, and the sizes of its parts.

        Raises:
            CheckpointMissingError, CheckpointCorruptError, CheckpointError: as for `open`.
        """
        folder, manifest = self._root.folder(id), self.manifest(id)
        _check_sizes(folder, manifest)
        return Checkpoint(folder, manifest)

    def manifest(self, id: int) -> CheckpointManifest:
        """Read the manifest of a checkpoint, without checking its parts.

        Raises:
            CheckpointMissingError, CheckpointCorruptError, CheckpointError: as for `open`.
        """
        folder = self._root.folder(id)
        name = folder.name_of(MANIFEST_FILE)
        if not folder.has(MANIFEST_FILE):
            raise CheckpointMissingError(f"{name}: no such checkpoint", fix=self._others())
        data = b""
        try:
            with folder.open(MANIFEST_FILE) as stream:
                while len(data) <= MAX_MANIFEST_BYTES and (more := stream.read(_BLOCK_BYTES)):
                    data += more
        except OSError as error:
            raise CheckpointCorruptError(f"{name}: cannot be read: {error.strerror}") from error
        try:
            manifest = decode_manifest(data)
        except CheckpointError as error:
            raise type(error)(f"{name}: {error.message}", fix=error.fix) from error
        if manifest.id != id:
            raise CheckpointCorruptError(f"{name}: it is the manifest of {manifest.id}")
        return manifest

    def latest(self) -> Checkpoint:
        """Open the newest complete and healthy checkpoint.

        Newer ones that are damaged, or of a diverging run, are skipped with a warning and listed in
        `Checkpoint.problems`. If none is healthy, the newest complete one is used.

        Raises:
            CheckpointMissingError: there is no checkpoint.
            CheckpointCorruptError: there are checkpoints, but none is complete.
            CheckpointError: the newest has another version of the format.
        """
        problems: list[str] = []
        unhealthy: Checkpoint | None = None
        for id in reversed(self.ids()):
            try:
                found = self.open(id)
            except CheckpointCorruptError as error:
                self._known_bad.add(id)
                problems.append(f"checkpoint {id}: {error.message}")
                _log.warning("checkpoint %d is damaged and skipped: %s", id, error.message)
                continue
            if found.manifest.healthy:
                return Checkpoint(found.folder, found.manifest, tuple(problems))
            unhealthy = unhealthy or found
            problems.append(f"checkpoint {id}: the run was diverging when it was taken")
            _log.warning("checkpoint %d of a diverging run is skipped", id)
        if unhealthy is not None:
            return Checkpoint(unhealthy.folder, unhealthy.manifest, tuple(problems))
        if problems:
            raise CheckpointCorruptError(
                f"{self._root}: no checkpoint is complete: " + "; ".join(problems),
                fix="Restore its files from a backup, or start again without --resume.",
            )
        raise CheckpointMissingError(f"{self._root}: no finished checkpoint")

    # -------------------------------------------------------------- inside

    def _others(self) -> str:
        """Return the fix for a missing checkpoint."""
        ids = self.ids()
        if not ids:
            return "This run has saved no checkpoint: omit the number, or use another run."
        shown = ", ".join(str(id) for id in ids[-_MOST_SHOWN:])
        return f"Use an existing one: {'..., ' if len(ids) > _MOST_SHOWN else ''}{shown}."

    def _verify(self, folder: Folder, manifest: CheckpointManifest) -> None:
        if self._root.is_remote:
            _check_sizes(folder, manifest)
            return
        for part in manifest.parts:
            verify_part(folder, part)

    def _sweep(self, found: Mapping[int, bool], is_left: Callable[[int], bool]) -> None:
        """Remove unfinished saves for which ``is_left`` is true."""
        for id, is_committed in found.items():
            if not is_committed and is_left(id):
                _log.info("removing the unfinished checkpoint %d", id)
                try:
                    self._root.folder(id).clear()
                except GeoRayError as error:
                    _log.warning("checkpoint %d could not be removed: %s", id, error.message)
        try:
            self._root.sweep(is_left)
        except GeoRayError as error:
            _log.warning("files of unfinished saves were not removed: %s", error.message)

    def _retain(self, last: CheckpointManifest | None) -> None:
        """Remove everything older than the `keep` newest checkpoints that look complete.

        The newest healthy one is always retained. Earlier ones of the step of ``last`` are not.

        A failure is only logged, because the save itself has succeeded.
        """
        retained, has_healthy = 0, False
        for id in reversed(self.ids()):
            found = None if id in self._known_bad else self._seen(id)
            is_first_healthy = found is not None and not has_healthy and found.manifest.healthy
            has_healthy |= is_first_healthy
            is_replaced = (
                last is not None
                and found is not None
                and found.manifest.step == last.step
                and id < last.id
            )
            if is_first_healthy or (retained < self._keep and not is_replaced):
                retained += found is not None
                continue
            folder = self._root.folder(id)
            try:
                # Without its manifest it is an unfinished save, even after a crash.
                folder.remove([MANIFEST_FILE])
                self._failpoint("retention.uncommitted")
                folder.clear()
                self._failpoint("retention.removed")
            except (OSError, GeoRayError) as error:
                _log.warning("the old checkpoint %d could not be removed: %s", id, error)

    def _seen(self, id: int) -> Checkpoint | None:
        """Return a checkpoint that looks complete; hashing old ones at each save is expensive."""
        try:
            return self.peek(id)
        except CheckpointError:
            return None


def verify_part(place: Path | PartSource, info: PartInfo) -> None:
    """Check size and SHA-256 of a part's file without keeping it in memory.

    Raises:
        CheckpointCorruptError: the file is missing or differs from ``info``.
        StoreError: a store does not answer or refuses.
    """
    folder: PartSource = LocalFolder(place) if isinstance(place, Path) else place
    name = folder.name_of(info.file)
    digest = hashlib.sha256()
    try:
        with folder.open(info.file, info.bytes) as file:
            block = memoryview(bytearray(min(_VERIFIED_BYTES, info.bytes)))
            while size := file.readinto(block):
                digest.update(block[:size])
    except OSError as error:
        raise CheckpointCorruptError(f"{name}: cannot be read: {error.strerror}") from error
    if digest.hexdigest() != info.sha256:
        raise CheckpointCorruptError(f"{name}: its SHA-256 differs from the manifest")


def _check_sizes(folder: Folder, manifest: CheckpointManifest) -> None:
    sizes = folder.sizes()
    for part in manifest.parts:
        if sizes.get(part.file) != part.bytes:
            found = f"{sizes[part.file]} bytes long" if part.file in sizes else "missing"
            raise CheckpointCorruptError(
                f"{folder.name_of(part.file)}: {found}; the manifest says {part.bytes}"
            )
