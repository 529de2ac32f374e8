"""The checkpoints of one run: parts first, the manifest last, the last good one always kept.

    checkpoints/ckpt-00000012/server-eu-0.safetensors ... manifest.json

A directory without ``manifest.json`` is an unfinished save; it is never read, and swept later.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from geo_ray.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    decode_manifest,
    encode_manifest,
)
from geo_ray.checkpoint.parts import read_part, verify_part
from geo_ray.config.canonical import JSONObject
from geo_ray.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    ConfigError,
    RunDirectoryError,
)
from geo_ray.util.atomic_file import (
    Failpoint,
    no_failpoint,
    save_chunks,
    sync_directory,
    unwritable,
)

MIN_KEEP = 2
_DIRECTORY = re.compile(r"^ckpt-([0-9]{8,18})$")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose parts were all there with the right bytes when it was opened.

    Attributes:
        path: its directory.
        manifest: what it consists of.
        problems: what was wrong with newer ones that were passed over; empty as a rule.
    """

    path: Path
    manifest: CheckpointManifest
    problems: tuple[str, ...] = field(default=())

    def read(self, name: str) -> tuple[dict[str, Tensor], JSONObject]:
        """Read one part: its tensors on the CPU and its JSON, verified again.

        Raises:
            CheckpointError: if there is no part of that name.
            CheckpointCorruptError: if its file changed since.
        """
        return read_part(self.path, self.manifest.part(name))


def directory_of(root: Path, id: int) -> Path:
    """Return where the parts of checkpoint ``id`` lie below a store's root."""
    return root / f"ckpt-{id:08d}"


class CheckpointStore:
    """Saves and finds the checkpoints below one directory. One process saves at a time.

    Args:
        root: the directory; made by the first `begin`.
        keep: how many checkpoints stay; at least 2, for the newest may be damaged by the disk.
        failpoint: for tests.

    Raises:
        ConfigError: if ``keep`` is less than 2.
    """

    def __init__(self, root: Path, keep: int = 3, failpoint: Failpoint = no_failpoint) -> None:
        if keep < MIN_KEEP:
            raise ConfigError(
                f"keep is {keep}; at least {MIN_KEEP} checkpoints must be kept",
                fix=f"Set checkpoint.keep to {MIN_KEEP} or more.",
            )
        self._root = root
        self._keep = keep
        self._failpoint = failpoint
        self._open: set[int] = set()  # begun here, neither committed nor abandoned
        self._known_bad: set[int] = set()  # seen to be corrupt by `latest`

    # -------------------------------------------------------------- saving

    def begin(self, id: int) -> Path:
        """Start a save: sweep what earlier saves left unfinished, make the directory for parts.

        Args:
            id: larger than that of every checkpoint there is; see `next_id`.

        Raises:
            CheckpointError: if ``id`` is not larger.
            RunDirectoryError: if the directory cannot be made.
        """
        if id in self._open or id < self.next_id():
            raise CheckpointError(f"checkpoint {id} cannot be begun; the next is {self.next_id()}")
        path = self._path(id)
        try:
            self._sweep()
            self._failpoint("begin.swept")
            path.mkdir(parents=True)
            sync_directory(self._root)
            self._failpoint("begin.made")
        except OSError as error:
            raise unwritable(path, error) from error
        self._open.add(id)
        return path

    def commit(self, id: int, manifest: CheckpointManifest) -> Checkpoint:
        """Make a save count: verify every part, write the manifest last, remove old checkpoints.

        Raises:
            CheckpointError: if the save was not begun or the manifest is of another.
            CheckpointCorruptError: if a part is missing or not what the manifest says; the save
                can still be mended or abandoned.
            RunDirectoryError: if the manifest cannot be written; the checkpoints before stay.
        """
        path = self._path(id)
        if manifest.id != id:
            raise CheckpointError(f"the manifest of checkpoint {manifest.id} was given for {id}")
        if not path.is_dir() or (path / MANIFEST_FILE).exists():
            raise CheckpointError(f"checkpoint {id} is not being saved, so it cannot be committed")
        for part in manifest.parts:
            verify_part(path, part)
        self._failpoint("commit.verified")
        try:
            _remove_others(path, manifest)
        except OSError as error:
            raise unwritable(path, error) from error
        data = encode_manifest(manifest)
        half = len(data) // 2
        chunks = [data[:half], data[half:]]
        save_chunks(path / MANIFEST_FILE, chunks, lambda step: self._failpoint(f"manifest.{step}"))
        self._open.discard(id)
        self._retain()
        return Checkpoint(path, manifest)

    def abandon(self, id: int) -> None:
        """Give an unfinished save up and remove its files; nothing happens if there is none.

        Raises:
            CheckpointError: if the checkpoint is committed.
            RunDirectoryError: if the files cannot be removed.
        """
        path = self._path(id)
        if self.is_committed(id):
            raise CheckpointError(f"checkpoint {id} is committed, so it cannot be abandoned")
        self._open.discard(id)
        try:
            _remove_tree(path)
        except OSError as error:
            raise unwritable(path, error) from error

    # -------------------------------------------------------------- finding

    def ids(self) -> list[int]:
        """Return the ids of all committed checkpoints, oldest first, whole or not."""
        return [id for id in self._directories() if self.is_committed(id)]

    def is_committed(self, id: int) -> bool:
        """Whether a checkpoint has its manifest, and so counts."""
        return (self._path(id) / MANIFEST_FILE).exists()

    def next_id(self) -> int:
        """Return the id for the next save: one more than any committed checkpoint's."""
        return max(self.ids(), default=-1) + 1

    def open(self, id: int) -> Checkpoint:
        """Open one checkpoint and verify all of it.

        Raises:
            CheckpointMissingError: if it is not there.
            CheckpointCorruptError: if any file is not what it should be; the message says which.
            CheckpointError: if it was written in another version of the format.
        """
        path = self._path(id)
        manifest = self.manifest(id)
        for part in manifest.parts:
            verify_part(path, part)
        return Checkpoint(path, manifest)

    def manifest(self, id: int) -> CheckpointManifest:
        """Read what one checkpoint consists of; its parts are not looked at.

        Raises:
            CheckpointMissingError, CheckpointCorruptError, CheckpointError: as for `open`.
        """
        file = self._path(id) / MANIFEST_FILE
        try:
            with file.open("rb") as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError as error:
            raise CheckpointMissingError(f"{file}: there is no such checkpoint") from error
        except OSError as error:
            raise CheckpointCorruptError(f"{file}: cannot be read: {error.strerror}") from error
        try:
            manifest = decode_manifest(data)
        except CheckpointError as error:
            raise type(error)(f"{file}: {error.message}", fix=error.fix) from error
        if manifest.id != id:
            raise CheckpointCorruptError(f"{file}: it is the manifest of {manifest.id}")
        return manifest

    def latest(self) -> Checkpoint:
        """Open the newest checkpoint that is whole and healthy.

        Newer ones that are damaged, or of a run that was diverging, are passed over with a warning
        and listed in `Checkpoint.problems`. If none is healthy, it is the newest whole one.

        Raises:
            CheckpointMissingError: if there is none.
            CheckpointCorruptError: if there are some, none of them whole.
            CheckpointError: if the newest was written in another version of the format.
        """
        problems: list[str] = []
        unhealthy: Checkpoint | None = None
        for id in reversed(self.ids()):
            try:
                found = self.open(id)
            except CheckpointCorruptError as error:
                self._known_bad.add(id)
                problems.append(f"checkpoint {id}: {error.message}")
                _log.warning("checkpoint %d is damaged and passed over: %s", id, error.message)
                continue
            if found.manifest.healthy:
                return Checkpoint(found.path, found.manifest, tuple(problems))
            unhealthy = unhealthy or found
            problems.append(f"checkpoint {id}: the run was diverging when it was taken")
            _log.warning("checkpoint %d is of a run that was diverging and passed over", id)
        if unhealthy is not None:
            return Checkpoint(unhealthy.path, unhealthy.manifest, tuple(problems))
        if problems:
            raise CheckpointCorruptError(
                f"{self._root}: no checkpoint is whole: " + "; ".join(problems),
                fix="Restore the directory from a backup, or start anew without --resume.",
            )
        raise CheckpointMissingError(f"{self._root}: there is no finished checkpoint")

    # -------------------------------------------------------------- inside

    def _path(self, id: int) -> Path:
        return directory_of(self._root, id)

    def _directories(self) -> list[int]:
        try:
            names = [path.name for path in self._root.iterdir()] if self._root.is_dir() else []
        except OSError as error:
            raise RunDirectoryError(
                f"{self._root}: cannot be read: {error.strerror}",
                fix="Check the permissions of the directory.",
            ) from error
        found = [int(match[1]) for name in names if (match := _DIRECTORY.match(name))]
        return sorted(id for id in found if self._path(id).is_dir())

    def _sweep(self) -> None:
        """Remove what saves that never ended have left, this process's open ones excepted."""
        for id in self._directories():
            path = self._path(id)
            if id not in self._open and not (path / MANIFEST_FILE).exists():
                _log.info("removing the unfinished checkpoint %d", id)
                try:
                    _remove_tree(path)
                except OSError as error:
                    _log.warning("%s could not be removed: %s", path, error)

    def _retain(self) -> None:
        """Remove everything older than the `keep` newest checkpoints that look whole.

        The newest healthy one stays, however old it is.

        A failure here is logged only: the save itself has succeeded.
        """
        kept, has_healthy = 0, False
        for id in reversed(self.ids()):
            is_whole = id not in self._known_bad and self._looks_whole(id)
            is_first_healthy = is_whole and not has_healthy and self.manifest(id).healthy
            has_healthy |= is_first_healthy
            if kept < self._keep or is_first_healthy:
                kept += is_whole
                continue
            try:
                # Without its manifest it is an unfinished save, whatever happens next.
                (self._path(id) / MANIFEST_FILE).unlink()
                sync_directory(self._path(id))
                self._failpoint("retention.uncommitted")
                _remove_tree(self._path(id))
                self._failpoint("retention.removed")
            except OSError as error:
                _log.warning("the old checkpoint %d could not be removed: %s", id, error)

    def _looks_whole(self, id: int) -> bool:
        """Check manifest and file sizes only; hashing old checkpoints at each save costs much."""
        try:
            parts = self.manifest(id).parts
            return all((self._path(id) / part.file).stat().st_size == part.bytes for part in parts)
        except (CheckpointError, OSError):
            return False


def _remove_others(path: Path, manifest: CheckpointManifest) -> None:
    """Remove files that writers which died have left beside the parts."""
    for name in {file.name for file in path.iterdir()} - {part.file for part in manifest.parts}:
        (path / name).unlink()


def _remove_tree(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
