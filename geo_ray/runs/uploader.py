"""Uploads the files of a run actor to the bucket of its run, every few seconds and at the end.

Each write requires that the lease was held just before; a write that is late nevertheless has an
outdated fencing token in its name (`geo_ray.runs.remote`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from geo_ray.base.errors import (
    GeoRayError,
    LeaseLostError,
    RunDirectoryError,
    RunHeldError,
    StoreError,
)
from geo_ray.base.files import save_chunks
from geo_ray.base.output import RateLimitedLog
from geo_ray.runs.directory import MODEL_FILE
from geo_ray.runs.remote import (
    REQUESTS,
    FileVersion,
    RunObjects,
    Segment,
    chain,
    digest_of_file,
    length_of,
)
from geo_ray.telemetry.event_log import EVENTS_FILE

_EVERY_S: Final = 2.0
_MOST_BYTES: Final = 8 << 20  # per segment of the log
_MERGE_AT: Final = 64
_MOST_PAUSE_S: Final = 30.0
_EXCLUDED: Final = ("checkpoints", "data", REQUESTS, EVENTS_FILE)
_log = logging.getLogger(__name__)


class Uploader:
    """Uploads a run to its bucket; see the module's docstring.

    Args:
        objects: objects of the run.
        path: the run's directory on this machine.
        token: fencing token of the lease.
        check: raises if the lease is not held.
    """

    def __init__(
        self, objects: RunObjects, path: Path, token: int, check: Callable[[], None]
    ) -> None:
        self._objects, self._path = objects, path
        self._token, self._check = token, check
        self._sent = 0
        self._version = 0
        self._stamps: dict[str, tuple[int, int]] = {}
        self._known: dict[str, FileVersion] = {}  # valid versions
        self._own: list[Segment] = []  # not merged yet
        self._failing_s: float | None = None  # start of the current failure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def start(self) -> None:
        """Start uploading.

        Raises:
            RunHeldError: another process has written to the run since it was copied.
            StoreError: the bucket does not answer or refuses.
        """
        pieces = chain(self._objects.segments())
        self._sent = length_of(pieces)
        if not self._objects.is_beginning(pieces, self._path / EVENTS_FILE):
            raise RunHeldError(
                f"{self._objects.name} was changed by another process just now",
                fix="Check it with `geo-ray status RUN`, and resume it again.",
            )
        self._known = self._objects.files()
        self._objects.take_requests()  # drop requests of the previous run segment
        self._check()
        self._send_files()  # before the first event: a reader of events also has the configuration
        self.tick()
        self._thread.start()

    def tick(self) -> None:
        """Upload new data, and fetch requests.

        Raises:
            LeaseLostError: another process holds the run.
            StoreError: the bucket does not answer or refuses.
        """
        self._check()
        for (
            name,
            data,
        ) in self._objects.take_requests().items():  # first, so that `stop` is received
            (self._path / REQUESTS).mkdir(exist_ok=True)
            save_chunks(self._path / REQUESTS / name, [data])
        self._send_events()
        self._send_files()

    def close(self, retry_s: float = 0.0, notify: Callable[[str], None] = _log.warning) -> None:
        """Upload the rest.

        Args:
            retry_s: time for which a rejecting bucket is retried, from its first failure.
            notify: called with each retry.

        Raises:
            LeaseLostError: another process holds the run.
            StoreError: the bucket does not answer or refuses; the rest is on this machine.
        """
        self._ended.set()
        self._thread.join()
        began_s, pause_s = self._failing_s or time.monotonic(), 1.0
        try:
            while not self._is_copied(began_s + retry_s, notify):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        except (StoreError, RunDirectoryError, KeyboardInterrupt) as error:
            why = error.message if isinstance(error, GeoRayError) else "interrupted"
            model = self._path / MODEL_FILE
            has_model = f", with its model {model}" if model.exists() else ""
            raise StoreError(
                f"{why}; the end of {self._objects.name} is only in {self._path}{has_model}",
                fix=f"Correct that, then `geo-ray train --resume '{self._objects.uri}'` on this "
                "machine, which uploads it.",
            ) from error

    def _is_copied(self, until_s: float, notify: Callable[[str], None]) -> bool:
        """Upload the rest; False: retry."""
        try:
            self.tick()
        except (StoreError, RunDirectoryError) as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            notify(f"retrying the upload of the run for {left_s:.0f} s: {error.message}")
            return False
        return True

    def _run(self) -> None:
        limited_log = RateLimitedLog(_log, 30.0)
        while not self._ended.wait(_EVERY_S):
            try:
                self.tick()
                self._failing_s = None
            except LeaseLostError:
                return  # the next write raises
            except (GeoRayError, OSError) as error:
                self._failing_s = self._failing_s or time.monotonic()
                limited_log.warning("uploader", f"{self._objects.name} is not up to date: {error}")

    def _send_events(self) -> None:
        log = self._path / EVENTS_FILE
        if not log.exists():
            return
        with log.open("rb") as file:
            file.seek(self._sent)
            while data := _whole_lines(file.read(_MOST_BYTES)):
                self._own.append(self._objects.put_segment(self._token, self._sent, data))
                self._sent += len(data)
                file.seek(self._sent)
        if len(self._own) >= _MERGE_AT:
            self._merge_segments()

    def _merge_segments(self) -> None:
        few = self._own
        with (self._path / EVENTS_FILE).open("rb") as file:
            file.seek(few[0].start)
            data = file.read(few[-1].end - few[0].start)
        self._objects.put_segment(self._token, few[0].start, data)
        self._own = []  # only now, so that a failure leaves them to be merged
        self._objects.drop_segments(few)

    def _send_files(self) -> None:
        for path in sorted(self._path.rglob("*")):
            name = path.relative_to(self._path)
            is_excluded = name.parts[0] in _EXCLUDED or any(
                part.startswith(".") for part in name.parts
            )
            if is_excluded or not path.is_file():
                continue
            with suppress(FileNotFoundError):  # removed or renamed in the meantime
                about = path.stat()
                stamp = (about.st_mtime_ns, about.st_size)
                if self._stamps.get(name.as_posix()) != stamp:
                    self._send_file(name.as_posix(), path)
                    self._stamps[name.as_posix()] = stamp

    def _send_file(self, name: str, path: Path) -> None:
        known = self._known.get(name)
        if known is not None and known.digest == digest_of_file(path):
            return
        self._version += 1
        self._known[name] = self._objects.put_file(self._token, self._version, name, path)
        if known is not None:
            self._objects.drop_file(known)


@contextmanager
def uploading(
    address: str | None,
    path: Path,
    token: int,
    check: Callable[[], None],
    *,
    retry_s: float = 0.0,
    notify: Callable[[str], None] = _log.warning,
) -> Iterator[None]:
    """Upload a run to its bucket while the block runs, and once more after it.

    Args:
        address: address of a run in a bucket; None: nothing is uploaded.
        path: the run's directory on this machine.
        token: fencing token of its lease.
        check: raises if the lease is not held.
        retry_s: as for `Uploader.close`, if the block succeeds.
        notify: as for `Uploader.close`.

    Raises:
        RunHeldError, StoreError: as for `Uploader`.
    """
    if address is None:
        yield
        return
    uploader = Uploader(RunObjects(address), path, token, check)
    uploader.start()
    try:
        yield
    except BaseException:
        try:
            uploader.close()
        except GeoRayError as error:  # the error that ended the run has priority
            _log.warning("%s", error.message)
        raise
    uploader.close(retry_s, notify)


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
