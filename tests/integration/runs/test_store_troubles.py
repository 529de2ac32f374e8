"""A run in a bucket whose server is slow, full, refuses, answers late or not at all, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import LeaseLostError, RunDirectoryError, StoreError
from geo_ray.runs import remote, uploader
from geo_ray.runs.lease import LEASE_KEY, LeaseKeeper, LeaseSeeker, decode_record
from geo_ray.runs.remote import RunObjects, driven_copy, is_ahead, view_copy
from geo_ray.runs.uploader import _MERGE_AT, Uploader, uploading
from geo_ray.storage.bucket import Bucket, RequestLimits
from geo_ray.storage.conditional_store import S3ConditionalStore
from geo_ray.storage.uri import parse_s3
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, read_events
from tests.support.s3_support import (
    Proxy,
    Request,
    new_prefix,
    proxy_before,
    s3_server,
    set_credentials,
)
from tests.support.train_support import eventually

LEASE_S = 10.0
ONE_TRY = RequestLimits(20.0, 20.0, attempts=1)  # trouble is seen, and a busy machine is none
FAILS = ["403", "503", "cut"]  # full or forbidden, overloaded, broken off


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(endpoint: str) -> Iterator[Proxy]:
    with proxy_before(endpoint) as found:
        yield found


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.setattr(remote, "RequestLimits", lambda: ONE_TRY)
    monkeypatch.setattr(uploader, "_EVERY_S", 0.05)


def through(proxy: Proxy, uri: str) -> str:
    """The same address, by way of the proxy."""
    return uri.replace(quote(proxy.endpoint, safe=""), "").replace(
        "endpoint_url=" + uri.split("endpoint_url=")[1].split("&")[0],
        "endpoint_url=" + quote(proxy.endpoint, safe=""),
    )


# ------------------------------------------------------------------ the lease


class Drivers:
    """Two that want one run; the first reaches the bucket through the proxy."""

    def __init__(self, endpoint: str, proxy: Proxy) -> None:
        self.clock = VirtualClock()
        self._uri = new_prefix(endpoint)
        self.proxied = self._store(through(proxy, self._uri))
        self.first = self.take(self.proxied)
        self._other = self.seeker(self._store(self._uri))

    def _store(self, uri: str) -> S3ConditionalStore:
        return S3ConditionalStore(Bucket(parse_s3(uri), ONE_TRY), "run/")

    def seeker(self, store: S3ConditionalStore) -> LeaseSeeker:
        return LeaseSeeker(store, "run", lambda _: None, lives_s=LEASE_S, clock=self.clock)

    def take(self, store: S3ConditionalStore) -> LeaseKeeper:
        found = self.seeker(store).try_acquire()
        assert isinstance(found, LeaseKeeper)
        return found

    def overtake(self, monkeypatch: pytest.MonkeyPatch) -> LeaseKeeper:
        """The second takes it, for whom the first is silent for long enough."""
        monkeypatch.setattr("geo_ray.runs.lease.has_ended", lambda owner: None)
        self._other.try_acquire()
        self.clock.sleep_s(1.5 * LEASE_S)
        found = self._other.try_acquire()
        assert isinstance(found, LeaseKeeper) and found.token == 2
        return found


@pytest.fixture
def drivers(endpoint: str, proxy: Proxy) -> Drivers:
    return Drivers(endpoint, proxy)


@pytest.mark.parametrize("kind", FAILS)
def test_a_lease_that_cannot_be_renewed_holds_for_its_life_and_then_stops_writes(
    kind: str, drivers: Drivers, proxy: Proxy
) -> None:
    proxy.trouble = lambda _: kind
    with pytest.raises(RunDirectoryError):
        drivers.first.renew()
    drivers.clock.sleep_s(LEASE_S - 0.1)
    drivers.first.check()
    drivers.clock.sleep_s(0.2)
    assert not drivers.first.may_write()
    with pytest.raises(RunDirectoryError):
        drivers.first.check()
    drivers.first.check_known()  # its own log goes on meanwhile
    proxy.trouble = lambda _: None
    drivers.first.check()
    assert drivers.first.may_write() and drivers.first.token == 1


@pytest.mark.parametrize("kind", FAILS)
def test_who_was_overtaken_while_the_store_was_away_hears_it_when_it_is_back(
    kind: str, drivers: Drivers, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.trouble = lambda _: kind
    drivers.overtake(monkeypatch)
    with pytest.raises(RunDirectoryError):
        drivers.first.check()
    proxy.trouble = lambda _: None
    with pytest.raises(LeaseLostError, match="holder 2"):
        drivers.first.check()
    with pytest.raises(LeaseLostError):
        drivers.first.check_known()


def in_a_write(
    act: Callable[[], object], kind: str | None = None
) -> Callable[[Request], str | None]:
    """Something happens while the first renewal is on its way to the server."""
    done: list[object] = []

    def trouble(request: Request) -> str | None:
        if request.method == "PUT" and not done:
            done.append(None)
            act()
            return kind
        return None

    return trouble


def test_a_renewal_that_is_late_counts_from_when_it_was_sent(
    drivers: Drivers, proxy: Proxy
) -> None:
    proxy.trouble = in_a_write(lambda: drivers.clock.sleep_s(0.8 * LEASE_S))
    drivers.first.renew()
    assert drivers.first.may_write()
    drivers.clock.sleep_s(0.3 * LEASE_S)
    assert not drivers.first.may_write(), "not from when its answer was there"
    proxy.trouble = in_a_write(lambda: drivers.clock.sleep_s(1.1 * LEASE_S))
    drivers.first.renew()
    assert not drivers.first.may_write()
    drivers.first.check()
    assert drivers.first.may_write(), "nobody had taken it"


@pytest.mark.parametrize("kind", [None, "lost", "503"])
def test_a_lease_that_expires_in_mid_write_is_the_next_ones(
    kind: str | None, drivers: Drivers, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write arrives behind the next holder's, with or without an answer."""
    taken: list[LeaseKeeper] = []
    proxy.trouble = in_a_write(lambda: taken.append(drivers.overtake(monkeypatch)), kind)
    with pytest.raises((LeaseLostError, RunDirectoryError)):
        drivers.first.renew()
    with pytest.raises(LeaseLostError):
        drivers.first.check()
    (second,) = taken
    second.renew()
    found = drivers.proxied.read(LEASE_KEY)
    assert found is not None and decode_record(found.data).token == 2


def test_a_renewal_whose_answer_was_lost_is_the_own_one(drivers: Drivers, proxy: Proxy) -> None:
    proxy.trouble = in_a_write(lambda: None, "lost")
    drivers.first.renew()
    puts = [request for request in proxy.seen if request.method == "PUT"]
    assert len(puts) > 1, "the renewal is sent again, and meets itself"
    assert drivers.first.may_write() and drivers.first.token == 1


# ------------------------------------------------------------------ what the driver writes


@pytest.mark.parametrize("kind", [*FAILS, "slow", "lost"])
def test_trouble_for_a_while_costs_a_run_nothing(
    kind: str, endpoint: str, proxy: Proxy, tmp_path: Path
) -> None:
    uri = new_prefix(endpoint).replace("?", "/tiny?")
    assert RunObjects(uri).begin()
    path = tmp_path / "run"  # not around the copies of this machine
    path.mkdir()
    uploader = Uploader(RunObjects(through(proxy, uri)), path, 1, lambda: None)
    uploader.start()
    with EventLog(path / EVENTS_FILE) as log:
        log.write("stop_requested", 0.0, cause="before")
        eventually(lambda: "before" in (view_copy(uri) / EVENTS_FILE).read_text(), "a copy")
        asked = len(proxy.seen)
        proxy.trouble = lambda request: kind if request.method == "PUT" or kind == "slow" else None
        log.write("stop_requested", 0.0, cause="meanwhile")
        (path / "summary.json").write_text("{}")
        eventually(lambda: len([r for r in proxy.seen[asked:] if r.method == "PUT"]) >= 2, "tries")
        proxy.trouble = lambda _: None
        log.write("stop_requested", 0.0, cause="after")
    uploader.close()
    assert [e["cause"] for e in read_events(view_copy(uri) / EVENTS_FILE)] == [
        "before", "meanwhile", "after"
    ]  # fmt: skip
    assert (view_copy(uri) / "summary.json").read_text() == "{}"


@pytest.mark.parametrize("kind", FAILS)
def test_trouble_to_the_end_is_told_and_nothing_is_lost(
    kind: str, endpoint: str, proxy: Proxy, tmp_path: Path
) -> None:
    uri = new_prefix(endpoint).replace("?", "/tiny?")
    assert RunObjects(uri).begin()
    path = driven_copy(uri)
    uploader = Uploader(RunObjects(through(proxy, uri)), path, 1, lambda: None)
    uploader.start()
    proxy.trouble = lambda _: kind
    with EventLog(path / EVENTS_FILE) as log:
        log.write("stop_requested", 0.0, cause="said late")
    with pytest.raises(StoreError, match=r"is only in ") as told:
        uploader.close()
    assert "--resume" in str(told.value.fix)
    proxy.trouble = lambda _: None
    again = Uploader(RunObjects(through(proxy, uri)), path, 2, lambda: None)
    again.start()
    again.close()
    assert "said late" in (view_copy(uri) / EVENTS_FILE).read_text()


def test_the_end_is_copied_as_soon_as_the_bucket_is_back(
    endpoint: str, proxy: Proxy, tmp_path: Path
) -> None:
    uri = new_prefix(endpoint).replace("?", "/tiny?")
    assert RunObjects(uri).begin()
    path, told = driven_copy(uri), list[str]()
    uploader = Uploader(RunObjects(through(proxy, uri)), path, 1, lambda: None)
    uploader.start()
    proxy.trouble = lambda _: "403"
    with EventLog(path / EVENTS_FILE) as log:
        log.write("stop_requested", 0.0, cause="said late")

    def notify(text: str) -> None:
        told.append(text)
        proxy.trouble = lambda _: None

    uploader.close(600.0, notify)
    assert "retrying the upload" in told[0]
    assert "said late" in (view_copy(uri) / EVENTS_FILE).read_text()


def test_a_model_that_did_not_reach_the_bucket_is_kept_and_sent_later(
    endpoint: str, proxy: Proxy
) -> None:
    """All events did, so the log alone does not tell."""
    uri = new_prefix(endpoint).replace("?", "/tiny?")
    assert RunObjects(uri).begin()
    path = driven_copy(uri)
    uploader = Uploader(RunObjects(through(proxy, uri)), path, 1, lambda: None)
    uploader.start()
    proxy.trouble = lambda request: "403" if "/files/" in request.path else None
    (path / "model.safetensors").write_bytes(b"weights")
    with EventLog(path / EVENTS_FILE) as log:
        log.write("stop_requested", 0.0, cause="at the end")
    with pytest.raises(StoreError, match=r"with its model .*model\.safetensors"):
        uploader.close()
    assert is_ahead(RunObjects(uri), path) and driven_copy(uri) == path
    assert (path / "model.safetensors").read_bytes() == b"weights"
    proxy.trouble = lambda _: None
    with uploading(uri, path, 2, lambda: None):
        pass
    assert (view_copy(uri, models=True) / "model.safetensors").read_bytes() == b"weights"


def test_pieces_that_could_not_be_put_together_are_later(
    endpoint: str, proxy: Proxy, tmp_path: Path
) -> None:
    uri = new_prefix(endpoint).replace("?", "/tiny?")
    objects = RunObjects(through(proxy, uri))
    assert objects.begin()
    path = tmp_path / "run"
    path.mkdir()
    uploader = Uploader(objects, path, 1, lambda: None)
    line = b'{"a":1}\n'

    def write(times: int) -> None:
        for _ in range(times):
            with (path / EVENTS_FILE).open("ab") as file:
                file.write(line)
            uploader.tick()

    write(_MERGE_AT - 1)
    puts: list[None] = []

    def second(request: Request) -> str | None:
        puts.extend([None] if request.method == "PUT" else [])
        return "503" if request.method == "PUT" and len(puts) == 2 else None

    proxy.trouble = second
    with pytest.raises(StoreError):
        write(1)
    proxy.trouble = lambda _: None
    write(1)
    assert len(objects.segments()) == 1
    assert (view_copy(uri) / EVENTS_FILE).read_bytes() == line * (_MERGE_AT + 1)
