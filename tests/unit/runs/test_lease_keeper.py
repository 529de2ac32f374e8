"""The lease of a run in a directory: real files, real processes, the machine's clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from geo_ray.base.errors import LeaseLostError, RunDirectoryError, RunHeldError
from geo_ray.runs.lease import (
    LEASE_KEY,
    LeaseKeeper,
    LeaseRecord,
    LeaseSeeker,
    decode_record,
    driving,
    encode_record,
    has_ended,
    seeker_of,
    this_process,
)
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import EventLog, detach, read_events
from tests.support.s3_support import new_prefix, s3_server, set_credentials

SHORT_S = 1.0
DRIVER = """
import sys, time
from pathlib import Path
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.runs.lease import LeaseSeeker
store = LocalConditionalStore(Path(sys.argv[1]))
keeper = LeaseSeeker(store, "run", lambda text: None, lives_s=float(sys.argv[2])).take()
print(keeper.token, flush=True)
sys.stdin.readline()
keeper.close()
"""


def quiet(text: str) -> None:
    """Nobody reads it."""


def taken(root: Path, lives_s: float = 2.0) -> LeaseKeeper:
    return LeaseSeeker(LocalConditionalStore(root), "run", quiet, lives_s=lives_s).take()


def record_of(root: Path) -> LeaseRecord:
    return decode_record((root / LEASE_KEY).read_bytes())


def stranger(root: Path, **changes: object) -> LeaseRecord:
    """The lease of a process on another machine, which is not heard."""
    owner = this_process().model_copy(update={"host": "far", "machine": "another", "pid": 7})
    record = LeaseRecord(token=4, renewal=0, owner=owner, lives_s=SHORT_S)
    record = record.model_copy(update=changes)
    (root / LEASE_KEY).write_bytes(encode_record(record))
    return record


@contextmanager
def other_driver(root: Path, lives_s: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRIVER, str(root), str(lives_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------ one after the other


def test_every_holder_has_the_next_epoch(tmp_path: Path) -> None:
    for token in (1, 2, 3):
        with driving(seeker_of(tmp_path, quiet)) as keeper:
            assert keeper.token == token
            assert not keeper.from_unknown
        assert record_of(tmp_path).released


def test_a_lease_that_is_kept_is_refused_to_others(tmp_path: Path) -> None:
    """However often it was renewed in the meantime; the message says who has it."""
    keeper = taken(tmp_path)
    with pytest.raises(RunHeldError, match=rf"host .*, process {os.getpid()}, since 20"):
        taken(tmp_path)
    keeper.check()
    keeper.close()
    taken(tmp_path).close()


def test_what_is_being_done_is_in_the_lease(tmp_path: Path) -> None:
    keeper = taken(tmp_path)
    keeper.note("starting workers")
    keeper.renew()
    assert record_of(tmp_path).doing == "starting workers"
    keeper.close()


def test_a_lease_of_a_silent_machine_runs_out(tmp_path: Path) -> None:
    stranger(tmp_path)
    told: list[str] = []
    seeker = LeaseSeeker(LocalConditionalStore(tmp_path), "run", told.append)
    seeker.wait()
    assert record_of(tmp_path).token == 4
    keeper = seeker.take()
    assert (keeper.token, keeper.from_unknown) == (5, True)
    assert len(told) == 1
    assert "run is held by host far, process 7" in told[0]
    keeper.close()


def test_a_lease_that_no_process_of_this_machine_can_have_is_taken_at_once(tmp_path: Path) -> None:
    """The holder was killed: a lease that would live for a day is not waited for."""
    with other_driver(tmp_path, 86_400.0) as process:
        process.kill()
        process.wait()
        keeper = taken(tmp_path)
    assert (keeper.token, keeper.from_unknown) == (2, False)
    keeper.close()


def test_a_file_that_is_no_lease_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / LEASE_KEY).write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"lease\.json cannot be read"):
        taken(tmp_path)


# ------------------------------------------------------------------ two at a time


def test_a_process_that_stood_still_loses_its_lease(tmp_path: Path) -> None:
    """It is alive, so nobody can know more than that it is not heard."""
    with other_driver(tmp_path, SHORT_S) as process:
        process.send_signal(signal.SIGSTOP)
        keeper = taken(tmp_path)
        assert (keeper.token, keeper.from_unknown) == (2, True)
        process.send_signal(signal.SIGCONT)
        time.sleep(2 * SHORT_S)  # it tries to renew, and to give back
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        keeper.renew()
    assert (record_of(tmp_path).token, record_of(tmp_path).released) == (2, False)
    keeper.close()


def test_a_process_that_nobody_followed_goes_on(tmp_path: Path) -> None:
    with other_driver(tmp_path, SHORT_S) as process:
        process.send_signal(signal.SIGSTOP)
        before = record_of(tmp_path)
        time.sleep(3 * SHORT_S)
        process.send_signal(signal.SIGCONT)
        with pytest.raises(RunHeldError):
            while True:  # its renewal comes within a life, but perhaps not before the first look
                taken(tmp_path).close()
        assert record_of(tmp_path).token == before.token


def overtaken(root: Path) -> LeaseKeeper:
    """A holder whose lease another one has by now."""
    keeper = taken(root, lives_s=3600.0)
    stranger(root)
    return keeper


def test_who_was_overtaken_writes_nothing_any_more(tmp_path: Path) -> None:
    keeper = overtaken(tmp_path)
    with (
        pytest.raises(LeaseLostError, match=r"taken over by host far, process 7.* as holder 4"),
        keeper.writing(),
    ):
        raise AssertionError("not reached")
    with pytest.raises(LeaseLostError, match="host far"):
        keeper.check()
    keeper.close()
    assert record_of(tmp_path).owner.host == "far"


def test_an_overtaken_driver_commits_no_checkpoint(tmp_path: Path) -> None:
    keeper = taken(tmp_path, lives_s=3600.0)
    store = CheckpointStore(tmp_path / "checkpoints", writing=keeper.writing)
    for id in (0, 1):
        part = write_part(store.begin(id), "a", {"x": torch.ones(2)}, {})
        found = CheckpointManifest(id=id, step=1, created="", config_digest="d" * 64, parts=(part,))
        if id == 1:
            stranger(tmp_path)
            for change in (
                lambda: store.commit(1, found),  # noqa: B023
                lambda: store.abandon(1),
                lambda: store.begin(2),
            ):
                with pytest.raises(LeaseLostError):
                    change()
        else:
            store.commit(id, found)
    assert store.ids() == [0]
    assert (tmp_path / "checkpoints" / "ckpt-00000001").is_dir()
    keeper.close()


def test_an_overtaken_driver_commits_no_checkpoint_to_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(monkeypatch)
    keeper = taken(tmp_path, lives_s=3600.0)
    with s3_server() as endpoint:
        prefix = new_prefix(endpoint)
        store = CheckpointStore(CheckpointPlaces(prefix).root(), writing=keeper.writing)
        part = write_part(store.begin(0), "a", {"x": torch.ones(2)}, {})
        found = CheckpointManifest(id=0, step=1, created="", config_digest="d" * 64, parts=(part,))
        stranger(tmp_path)
        with pytest.raises(LeaseLostError):
            store.commit(0, found)
        with pytest.raises(LeaseLostError):
            store.begin(1)
        assert CheckpointStore(CheckpointPlaces(prefix).root()).ids() == []
    keeper.close()


def test_nobody_takes_the_lease_while_something_is_written(tmp_path: Path) -> None:
    keeper = taken(tmp_path)
    began, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with keeper.writing():
            began.set()
            assert may_end.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(60)
    store = LocalConditionalStore(tmp_path, lock_wait_s=0.2)
    with pytest.raises(RunDirectoryError, match=r"has been locked for 0\.2 s"):
        LeaseSeeker(store, "run", quiet).take()
    may_end.set()
    writer.join()
    assert record_of(tmp_path).token == 1
    keeper.close()


def test_two_that_want_it_at_once(tmp_path: Path) -> None:
    """Real threads on one directory: one gets it, the others are refused."""
    stranger(tmp_path, released=True)
    found: list[LeaseKeeper | RunHeldError] = []

    def attempt() -> None:
        try:
            found.append(taken(tmp_path, lives_s=5.0))
        except RunHeldError as error:
            found.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [each for each in found if isinstance(each, LeaseKeeper)]
    assert len(found) == 6
    assert [keeper.token for keeper in held] == [5]
    held[0].close()


# ------------------------------------------------------------------ the store, the log, processes


def test_a_write_is_refused_if_the_value_is_another(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    first = store.write("k", b"1", None)
    assert store.write("k", b"2", None) is None
    second = store.write("k", b"2", first)
    assert store.write("k", b"3", first) is None
    found = store.read("k")
    assert found is not None
    assert (found.data, found.tag) == (b"2", second)
    with store.unchanged("k", str(first)) as is_held:
        assert not is_held


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        taken(tmp_path / "gone")


def test_a_detached_log_takes_no_late_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    late = EventLog(path)
    late.write("stop_requested", 1.0, cause="before")
    detach(path)
    with EventLog(path) as log:
        late.write("stop_requested", 2.0, cause="late")
        log.write("stop_requested", 3.0, cause="after")
    late.close()
    assert [event["cause"] for event in read_events(path)] == ["before", "after"]
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


def changed(**fields: object) -> Callable[[], bool | None]:
    return lambda: has_ended(this_process().model_copy(update=fields))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (changed(), False),
        (changed(started="1"), True),  # another process has its number by now
        (changed(machine="another"), None),
        (changed(machine=""), None),
    ],
)
def test_whether_a_process_has_ended(ask: Callable[[], bool | None], expected: bool | None) -> None:
    assert ask() is expected


# ------------------------------------------------------------------ a store that is out of reach


def test_what_is_not_known_to_be_lost_goes_on_while_the_store_is_out_of_reach(
    tmp_path: Path,
) -> None:
    """Only what is known counts for what no other process reads; the rest asks, and is refused."""
    root = tmp_path / "store"
    root.mkdir()
    keeper = taken(root, lives_s=0.4)
    root.rename(tmp_path / "away")
    time.sleep(1.0)
    keeper.check_known()
    with pytest.raises(RunDirectoryError):
        keeper.check()
    (tmp_path / "away").rename(root)
    keeper.renew()
    keeper.check()
    stranger(root, token=9)  # somebody has it
    with pytest.raises(LeaseLostError):
        keeper.check_known() or keeper.renew()
    with pytest.raises(LeaseLostError):
        keeper.check_known()
    keeper.close()


def test_a_lease_runs_out_while_the_machine_is_suspended(tmp_path, monkeypatch):
    """Linux stops the monotonic clock then; another machine takes the lease meanwhile."""
    keeper = LeaseSeeker(LocalConditionalStore(tmp_path), "run", print, lives_s=600.0).try_acquire()
    assert isinstance(keeper, LeaseKeeper) and keeper.may_write()
    asleep_s, clock_gettime = 601.0, time.clock_gettime

    def after_a_suspend(clock: int) -> float:
        return clock_gettime(clock) + (asleep_s if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", after_a_suspend)
    assert not keeper.may_write()
