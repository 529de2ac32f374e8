"""This machine's copies of a run whose directory is in a bucket.

Who drives a run has a copy to write to, who looks at one another, so that a look never changes
what is being written: ``~/.cache/geo_ray/runs/{driven,seen}/ADDRESS/NAME``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from geo_ray.errors import RunDirectoryError
from geo_ray.job.far.objects import FileVersion, RunObjects
from geo_ray.job.far.segments import Segment, chain, first_bytes, length_of
from geo_ray.observe.events.log import EVENTS_FILE
from geo_ray.stores.bucket import endpoint_of
from geo_ray.stores.uri import parse_s3
from geo_ray.util.atomic_file import save_text, unwritable

Use = Literal["driven", "seen"]
REQUESTS: Final = "requests"
_INDEX: Final = ".copied.json"
_LOCK: Final = ".copying.lock"
_MODELS: Final = ".safetensors"
_TRIES: Final = 5


def copy_path(uri: str, use: Use) -> Path:
    """Where the copy of a run is, or will be; its last part is the run's name."""
    address = parse_s3(uri)
    where = f"{endpoint_of(address)}/{address.bucket}/{address.prefix}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(where.encode()).hexdigest()[:12]
    return cache / "geo_ray" / "runs" / use / digest / address.prefix.rpartition("/")[2]


@dataclass(slots=True)
class Copy:
    """A copy, and what is in it.

    Attributes:
        objects: what it is of.
        path: where it is.
    """

    objects: RunObjects
    path: Path
    _epochs: list[int] = field(default_factory=list)
    _files: dict[str, str] = field(default_factory=dict)

    def pull(self, *, models: bool) -> bool:
        """Fetch what is new.

        Args:
            models: fetch models, too.

        Returns:
            Whether lines of the log are gone that were there: another driver went on before them.

        Raises:
            StoreError: the bucket does not answer, refuses, or has damaged objects.
            RunDirectoryError: there is no such run, or the copy cannot be written.
        """
        with self._locked():
            self._load()
            try:
                is_cut = self._pull_events()
                self._pull_files(models=models)
            finally:
                self._save()
        if not self.objects.is_there():  # or not any more
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunDirectoryError(
                f"there is no run {self.objects.name}",
                fix="Name one that `geo-ray train` has made: `run.dir` with its name behind it.",
            )
        return is_cut

    def _pull_events(self) -> bool:
        is_cut = False
        log = self.path / EVENTS_FILE
        _touch(log)
        for _ in range(_TRIES):
            segments = self.objects.segments()
            pieces, firsts = chain(segments), first_bytes(segments)
            has = log.stat().st_size
            keep = min([has, *(first for e, first in firsts.items() if e not in self._epochs)])
            if not pieces:
                return is_cut
            is_cut = is_cut or keep < has
            try:
                with log.open("ab") as file:
                    file.truncate(keep)
                    for segment, stop in pieces:
                        if stop > keep:
                            file.write(self._part_of(segment, keep, stop))
                            file.flush()
                            keep = stop
            except FileNotFoundError:
                continue  # it was put together with others meanwhile
            except OSError as error:
                raise unwritable(log, error) from error
            self._epochs = sorted(firsts)
            return is_cut
        raise RunDirectoryError(
            f"the log of {self.objects.name} changes faster than it can be read"
        )

    def _part_of(self, segment: Segment, keep: int, stop: int) -> bytes:
        data = self.objects.read_segment(segment)
        return data[max(0, keep - segment.start) : stop - segment.start]

    def _pull_files(self, *, models: bool) -> None:
        for _ in range(_TRIES):
            try:
                for name, version in self.objects.files().items():
                    if models or not name.endswith(_MODELS):
                        self._pull_file(version)
                return
            except FileNotFoundError:
                continue  # there is a newer version

    def _pull_file(self, version: FileVersion) -> None:
        path = self.path / version.name
        if self._files.get(version.name) != version.key or not path.exists():
            self.objects.get_file(version, path)
            self._files[version.name] = version.key

    def note_origin(self) -> None:
        """Note in the copy of which run it is."""
        self._load()
        self._save()

    def _save(self) -> None:
        index = {"uri": self.objects.uri, "epochs": self._epochs, "files": self._files}
        save_text(self.path / _INDEX, json.dumps(index))

    def _load(self) -> None:
        try:
            index = json.loads((self.path / _INDEX).read_text())
            self._epochs = [int(epoch) for epoch in index["epochs"]]
            self._files = {str(name): str(key) for name, key in index["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._epochs, self._files = [], {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / _LOCK).open("w")
        except OSError as error:
            raise unwritable(self.path, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _touch(log: Path) -> None:
    try:
        log.touch()
    except OSError as error:
        raise unwritable(log, error) from error


def seen_copy(uri: str, *, models: bool = False) -> Path:
    """The copy of a run to look at, as it is now.

    A run exists from the moment its name is taken, before it has written anything. Its copy always
    has an events file, which is empty until the first event has reached the bucket.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    copy = Copy(RunObjects(uri), copy_path(uri, "seen"))
    copy.pull(models=models)
    return copy.path


def copied_from(path: Path) -> str | None:
    """The address of the run that a directory is a copy of, as it was named last; None: it is none.

    The run itself does not know its address: a bucket can be copied to another one.
    """
    try:
        return str(json.loads((path / _INDEX).read_text())["uri"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch_models(uri: str | None, path: Path) -> None:
    """Complete a copy that is looked at; any other directory has its models.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    if uri is not None and path == copy_path(uri, "seen"):
        Copy(RunObjects(uri), path).pull(models=True)


def pass_on(uri: str | None, path: Path) -> None:
    """Say what was left in a copy for the run's driver in the bucket, where that looks.

    Raises:
        StoreError: the bucket does not answer or refuses.
    """
    for request in [] if uri is None else sorted((path / REQUESTS).iterdir()):
        if not request.name.startswith("."):
            RunObjects(str(uri)).ask(request.name, request.read_bytes())
            request.unlink(missing_ok=True)


def empty_copy(uri: str) -> Path:
    """The copy of a new run.

    Raises:
        RunDirectoryError: it cannot be made.
    """
    path = copy_path(uri, "driven")
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    except OSError as error:
        raise unwritable(path, error) from error
    Copy(RunObjects(uri), path).note_origin()
    return path


def driven_copy(uri: str) -> Path:
    """The copy of a run to go on with: made anew, unless this machine knows as much or more.

    It does if what drove the run here could not reach the bucket in the end: the copy then has the
    only end of the log, or the only model.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    objects, path = RunObjects(uri), copy_path(uri, "driven")
    if is_ahead(objects, path):
        for name, version in objects.files().items():  # an earlier copy may have ended early
            if not (path / name).exists():
                objects.get_file(version, path / name)
        Copy(objects, path).note_origin()
        return path
    shutil.rmtree(path, ignore_errors=True)
    Copy(objects, path).pull(models=True)
    return path


def is_ahead(objects: RunObjects, path: Path) -> bool:
    """Whether the log of a copy has all that the bucket has, or more."""
    log = path / EVENTS_FILE
    has = log.stat().st_size if log.exists() else 0
    if not has:
        return False
    pieces = chain(objects.segments())
    return has >= length_of(pieces) and objects.is_beginning(pieces, log)
