"""One suite for every place where a lease may lie: values written only if nobody else has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import LeaseLostError, RunHeldError
from geo_ray.runs.lease import LeaseKeeper, LeaseSeeker, Waiting
from geo_ray.storage.bucket import Bucket, RequestLimits
from geo_ray.storage.conditional_store import (
    ConditionalStore,
    LocalConditionalStore,
    S3ConditionalStore,
)
from geo_ray.storage.uri import parse_s3
from tests.support.s3_support import new_prefix, s3_server, set_credentials

Make = Callable[[], ConditionalStore]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["directory", "bucket"])
def make(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """Opens the same store again, as another process does."""
    if request.param == "directory":
        return lambda: LocalConditionalStore(tmp_path)
    set_credentials(monkeypatch)
    address = parse_s3(new_prefix(endpoint))
    return lambda: S3ConditionalStore(Bucket(address, RequestLimits()), f"{address.prefix}/")


def test_a_value_is_written_if_it_is_as_the_writer_knows_it(make: Make) -> None:
    store = make()
    assert store.read("k") is None
    first = store.write("k", b"1", None)
    assert first is not None and store.write("k", b"x", None) is None
    found = make().read("k")
    assert found is not None and (found.data, found.tag) == (b"1", first)
    second = make().write("k", b"2", first)
    assert second not in (None, first)
    assert store.write("k", b"late", first) is None
    found = store.read("k")
    assert found is not None and found.data == b"2"


def test_a_value_says_how_old_it_is(make: Make) -> None:
    store = make()
    tag = store.write("k", b"1", None)
    new = store.read("k")
    time.sleep(2.1)  # a server tells whole seconds
    old = make().read("k")
    assert new is not None and old is not None
    assert new == old and old.tag == tag
    assert new.age_s is not None and old.age_s is not None
    assert 0.0 <= new.age_s < old.age_s


def test_a_writer_that_is_late_by_many_writes_is_refused(make: Make) -> None:
    store = make()
    tags = [store.write("k", b"0", None)]
    for number in range(1, 9):
        tags.append(store.write("k", b"%d" % number, tags[-1]))
    for tag in tags[:-1]:
        assert make().write("k", b"late", tag) is None
        found = make().read("k")
        assert found is not None and (found.data, found.tag) == (b"8", tags[-1])


def test_of_writers_at_one_moment_one_is_first(make: Make) -> None:
    tag = make().write("k", b"0", None)
    won: list[int] = []

    def write(number: int) -> None:
        if make().write("k", b"%d" % number, tag) is not None:
            won.append(number)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = make().read("k")
    assert len(won) == 1 and found is not None and found.data == b"%d" % won[0]


def test_it_is_seen_whether_a_value_has_changed(make: Make) -> None:
    store = make()
    tag = store.write("k", b"0", None)
    assert tag is not None
    with store.unchanged("k", tag) as is_so:
        assert is_so
    store.write("k", b"1", tag)
    with store.unchanged("k", tag) as is_so:
        assert not is_so


def test_a_lease_goes_from_one_to_the_next(make: Make) -> None:
    """A holder that stood still for longer than its lease lives writes nothing any more."""
    clock = VirtualClock()

    def seeker() -> LeaseSeeker:
        return LeaseSeeker(make(), "run", lambda _: None, lives_s=10.0, clock=clock)

    def taken(by: LeaseSeeker) -> LeaseKeeper:
        found = by.try_acquire()
        assert isinstance(found, LeaseKeeper)
        return found

    first = taken(seeker())
    second = seeker()
    assert isinstance(second.try_acquire(), Waiting)
    first.renew()
    with pytest.raises(RunHeldError):
        second.try_acquire()
    with first.writing():
        pass
    third = seeker()
    waiting = third.try_acquire()
    assert isinstance(waiting, Waiting)
    clock.advance_to_s(clock.now_s() + waiting.left_s + 0.1)  # the first one stands still
    assert taken(third).token == 2
    with pytest.raises(LeaseLostError):
        first.renew()
    with pytest.raises(LeaseLostError), first.writing():
        pytest.fail("it wrote although it was overtaken")
