"""A disk without room: what a run writes all the time must not end it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from geo_ray.base.errors import RunDirectoryError
from geo_ray.storage import conditional_store
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.telemetry import event_log
from geo_ray.telemetry.event_log import EventLog, read_events


class Disk:
    """Lets writes of the event log fail, each after some bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self._write = event_log._write_all
        monkeypatch.setattr(event_log, "_write_all", self.write)

    def write(self, fd: int, line: bytes) -> None:
        if self.error is not None:
            os.write(fd, line[: len(line) // 2])
            raise OSError(self.error, os.strerror(self.error))
        self._write(fd, line)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def causes(path: Path) -> list[str]:
    return [event["cause"] for event in read_events(path)]


def test_events_wait_for_room_and_keep_their_order(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("stop_requested", 0.0, cause="before")
        disk.error = errno.ENOSPC
        assert log.write("stop_requested", 1.0, cause="first")["cause"] == "first"
        log.write("stop_requested", 2.0, cause="second")
        assert causes(path) == ["before"], "no torn line"
        assert "is full: 1 events wait in memory" in caplog.text
        disk.error = None
        log.write("stop_requested", 3.0, cause="after")
        assert causes(path) == ["before", "first", "second", "after"]
        disk.error = errno.EDQUOT
        log.write("stop_requested", 4.0, cause="at the end")
        disk.error = None
    assert causes(path)[-1] == "at the end"


def test_events_that_never_find_room_are_told_of(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        disk.error = errno.ENOSPC
        log.write("stop_requested", 0.0, cause="lost")
    assert "the last 1 events are missing" in caplog.text and causes(log.path) == []


def test_a_disk_that_fails_otherwise_or_for_too_long_ends_the_run(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        disk.error = errno.EIO
        with pytest.raises(RunDirectoryError, match="cannot write"):
            log.write("stop_requested", 0.0, cause="x")
        disk.error = errno.ENOSPC
        monkeypatch.setattr(event_log, "MOST_WAITING_BYTES", 200)
        with pytest.raises(RunDirectoryError, match="No space left"):
            for number in range(10):
                log.write("stop_requested", float(number), cause="x")


def test_a_lease_is_renewed_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalConditionalStore(tmp_path)
    tag = store.write("lease.json", b'{"renewal": 10}', None)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(conditional_store, "write_atomic", full)
    assert store.write("lease.json", b'{"renewal": 11}', "of another") is None
    for text in (b'{"renewal": 9}', b'{"renewal": 1234567}'):
        tag = store.write("lease.json", text, tag)
        found = store.read("lease.json")
        assert found is not None and found.tag == tag and found.data.rstrip() == text
    with pytest.raises(RunDirectoryError, match="No space left"):
        store.write("lease.json", b" " * 100_000, tag)
    with pytest.raises(RunDirectoryError, match="No space left"):
        store.write("other.json", b"{}", None)
    assert store.read("lease.json") == found
