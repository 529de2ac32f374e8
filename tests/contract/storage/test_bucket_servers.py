"""Servers of the S3 protocol that behave oddly: what a bucket, a lease and a run make of them."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from geo_ray.base.errors import RunDirectoryError, StoreError
from geo_ray.runs import remote
from geo_ray.runs import remote as copies
from geo_ray.runs.lease import LEASE_KEY, LEASE_S, LeaseSeeker
from geo_ray.runs.remote import RunObjects
from geo_ray.runs.uploader import Uploader
from geo_ray.storage import conditional_store
from geo_ray.storage.bucket import Bucket, RequestLimits, endpoint_of
from geo_ray.storage.conditional_store import LEASE_LIMITS, S3ConditionalStore, StoreLocation
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import parse_s3, s3_uri
from geo_ray.telemetry.event_log import EVENTS_FILE
from tests.support.s3_support import set_credentials

LIMITS = RequestLimits(20.0, 20.0, attempts=1)


class TinyServer:
    """An S3 server whose bucket is a dictionary; what is odd about it is set from outside."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.headers: list[dict[str, str]] = []
        self.ignores_conditions = False
        self.key: str | None = None
        self.date: str | None = None
        self.modified = "Fri, 27 Nov 2026 12:00:00 GMT"
        self.row = "<Key>{name}</Key><Size>{size}</Size>"
        self.endpoint = ""

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(request.path)
        sent = {name.lower(): value for name, value in request.headers.items()}
        data = request.rfile.read(int(sent.get("content-length") or 0))
        self.headers.append(sent)
        found = re.search(r"Credential=([^/]+)/", sent.get("authorization", ""))
        if self.key is not None and (found is None or found[1] != self.key):
            return 400, {}, b"<Error><Code>ExpiredToken</Code><Message>no</Message></Error>"
        key = unquote(parts.path.lstrip("/").partition("/")[2])
        if request.command == "PUT":
            if "if-none-match" in sent and not self.ignores_conditions and key in self.objects:
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            kept = {name: v for name, v in sent.items() if name.startswith("x-amz-meta-")}
            self.objects[key] = (data, kept)
            return 200, {"ETag": '"x"'}, b""
        if request.command == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b""
        query = parse_qs(parts.query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            names = sorted(name for name in self.objects if name.startswith(prefix))
            rows = "".join(
                f"<Contents>{self.row.format(name=name, size=size)}</Contents>"
                for name, size in ((name, len(self.objects[name][0])) for name in names)
            )
            return 200, {}, f"<ListBucketResult>{rows}</ListBucketResult>".encode()
        if key not in self.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        body, kept = self.objects[key]
        return 200, kept | {"Last-Modified": self.modified}, body


@contextmanager
def serving(tiny: TinyServer) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, headers, body = tiny.answer(self)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_HEAD = _answer

        def date_time_string(self, timestamp: float | None = None) -> str:
            return tiny.date or super().date_time_string(timestamp)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    tiny.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
    set_credentials(monkeypatch)
    found = TinyServer()
    with serving(found):
        yield found


def address_of(tiny: TinyServer, prefix: str = "some/run") -> str:
    return s3_uri("bucket", prefix, endpoint_url=tiny.endpoint, region="us-east-1")


def lease_at(uri: str) -> S3ConditionalStore:
    return S3ConditionalStore(Bucket(parse_s3(uri), LIMITS), "run/")


# ------------------------------------------------------------------ conditions


def test_no_lease_is_taken_where_a_server_ignores_conditions(tiny: TinyServer) -> None:
    tiny.ignores_conditions = True
    seekers = [LeaseSeeker(lease_at(address_of(tiny)), "run", print) for _ in range(2)]
    for seeker in seekers:
        with pytest.raises(RunDirectoryError, match="overwrites objects"):
            seeker.try_acquire()


def test_no_run_takes_a_name_where_a_server_ignores_conditions(tiny: TinyServer) -> None:
    tiny.ignores_conditions = True
    with pytest.raises(StoreError, match="overwrites objects"):
        RunObjects(address_of(tiny), LIMITS).begin()


def test_a_process_asks_once_whether_a_server_keeps_to_conditions(tiny: TinyServer) -> None:
    store = lease_at(address_of(tiny))
    tag = store.write("k", b"0", None)
    before = len(tiny.headers)
    for number in range(1, 4):
        tag = store.write("k", b"%d" % number, tag)
        assert tag is not None
    puts = [each for each in tiny.headers[before:] if "if-none-match" in each]
    assert len(puts) == 3


# ------------------------------------------------------------------ servers that hang


def hanging(monkeypatch: pytest.MonkeyPatch) -> tuple[socket.socket, str]:
    """A server that accepts and says nothing."""
    set_credentials(monkeypatch)
    listening = socket.create_server(("127.0.0.1", 0), backlog=50)
    endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
    return listening, s3_uri("bucket", "some/run", endpoint_url=endpoint, region="us-east-1")


def store_in_place(uri: str) -> S3ConditionalStore:
    store = StoreLocation(uri).store()
    assert isinstance(store, S3ConditionalStore)
    return store


@pytest.mark.parametrize("open_lease", [store_in_place, lambda uri: RunObjects(uri).lease()])
def test_a_lease_read_from_a_server_that_hangs_ends_after_two_requests_at_most(
    open_lease: Callable[[str], S3ConditionalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * LEASE_LIMITS.read_timeout_s < LEASE_S and LEASE_LIMITS.attempts == 1
    short = RequestLimits(0.4, 0.4, attempts=1)
    for module in (conditional_store, remote):
        monkeypatch.setattr(module, "LEASE_LIMITS", short)
    listening, uri = hanging(monkeypatch)
    with listening:
        with pytest.raises(RunDirectoryError, match="did not answer"):
            open_lease(uri).read(LEASE_KEY)
        listening.setblocking(False)
        asked = 0
        with pytest.raises(BlockingIOError):
            while True:
                listening.accept()[0].close()
                asked += 1
    assert 1 <= asked <= 2


def test_a_short_refusal_costs_a_lease_nothing(tiny: TinyServer) -> None:
    store = lease_at(address_of(tiny))
    tag = store.write("k", b"0", None)
    refusals = [503, 503]
    plain = tiny.answer

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if refusals:
            request.rfile.read(int(request.headers.get("Content-Length") or 0))
            return refusals.pop(), {}, b"<Error><Code>SlowDown</Code></Error>"
        return plain(request)

    tiny.answer = answer  # type: ignore[method-assign]
    found = store.read("k")
    assert found is not None and found.tag == tag


# ------------------------------------------------------------------ odd objects and answers


def test_a_folder_made_in_a_console_stops_no_mirror(tiny: TinyServer, tmp_path: Path) -> None:
    objects = RunObjects(address_of(tiny), LIMITS)
    assert objects.begin()
    log = tmp_path / EVENTS_FILE
    log.write_text('{"t_s": 0.0}\n')
    for name in (
        "requests/",
        "requests/a/",
        "files/",
        "events/",
        "files/000001-00000001-" + "0" * 16 + "/../x",
    ):
        tiny.objects[f"some/run/{name}"] = (b"", {})
    objects.ask("stop", b"{}")
    uploader = Uploader(objects, tmp_path, 1, lambda: None)
    uploader.start()
    with log.open("a") as file:
        file.write('{"t_s": 1.0}\n')
    objects.ask("stop", b"{}")
    uploader.close()
    assert (tmp_path / copies.REQUESTS / "stop").read_bytes() == b"{}"
    assert max(each.end for each in objects.segments()) == log.stat().st_size
    assert "some/run/requests/" in tiny.objects and "some/run/requests/stop" not in tiny.objects


@pytest.mark.parametrize("date", ["yesterday", "Fri, 27 Nov 2026 12:00:00 -0000", "Fri, 99 Foo"])
def test_an_odd_date_leaves_the_age_of_a_value_unknown(date: str, tiny: TinyServer) -> None:
    store = lease_at(address_of(tiny))
    store.write("k", b"1", None)
    tiny.date = date
    found = store.read("k")
    assert found is not None and found.data == b"1" and found.age_s is None


@pytest.mark.parametrize("date", ["yesterday", "Fri, 99 Foo", "99999999999999999999"])
def test_an_odd_date_of_an_object_is_an_error_of_the_store(date: str, tiny: TinyServer) -> None:
    bucket = Bucket(parse_s3(address_of(tiny)), LIMITS)
    bucket.put("some/run/a", b"1")
    tiny.modified = date
    for ask in (bucket.get, bucket.metadata):
        with pytest.raises(StoreError, match=r"answer is not valid \((read|look up) some/run/a\)"):
            ask("some/run/a")


@pytest.mark.parametrize(
    "row",
    [
        "<Key>{name}</Key>",
        "<Key>{name}</Key><Size>many</Size>",
        "<Size>{size}</Size>",
        "<Key>{name}</Key><Size>{size}</Size><LastModified>yesterday</LastModified>",
    ],
)
def test_a_listing_without_sense_is_an_error_of_the_store(row: str, tiny: TinyServer) -> None:
    bucket = Bucket(parse_s3(address_of(tiny)), LIMITS)
    bucket.put("some/run/a", b"1")
    tiny.row = row
    with pytest.raises(StoreError, match=r"answer is not valid \(list some/run/\)"):
        bucket.sizes("some/run/")


# ------------------------------------------------------------------ credentials and endpoints


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Writes static keys into the shared credentials file, the only place where there are some."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return lambda key: path.write_text(
        f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n"
    )


def test_keys_that_were_rotated_are_read_again(
    tiny: TinyServer, key_file: Callable[[str], object]
) -> None:
    tiny.key = "KEYONE"
    key_file("KEYONE")
    store = open_store(address_of(tiny))
    store.write("a", b"1")
    tiny.key = "KEYTWO"
    key_file("KEYTWO")
    assert store.exists("a")  # a HEAD, whose refusal has no code
    tiny.key = "KEYTHREE"
    before = len(tiny.headers)
    with pytest.raises(StoreError, match="ExpiredToken"):
        store.write("a", b"3")
    assert len(tiny.headers) == before + 1  # the same keys are not tried again


def test_an_endpoint_of_the_environment_is_one_of_the_address(
    tiny: TinyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_store(address_of(tiny)).write("a", b"1")
    bare = s3_uri("bucket", "some/run", region="us-east-1")
    elsewhere = copies.copy_path(bare, "seen")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", tiny.endpoint)
    open_store(bare).write("a", b"1")
    first, second = ({name for name in each if "checksum" in name} for each in tiny.headers)
    assert first == second == set()
    assert endpoint_of(parse_s3(bare)) == tiny.endpoint
    assert Bucket(parse_s3(bare), LIMITS).place.endswith(tiny.endpoint)
    here = copies.copy_path(bare, "seen")
    assert here == copies.copy_path(address_of(tiny), "seen") != elsewhere


def test_a_profile_names_an_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_credentials(monkeypatch)
    config = tmp_path / "config"
    config.write_text(
        "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://minio:9000\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    bare = parse_s3("s3://bucket/some")
    assert endpoint_of(bare) == "http://minio:9000"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert endpoint_of(bare) is None
    monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://key:secret@minio")
    with pytest.raises(StoreError, match="contains credentials") as caught:
        endpoint_of(bare)
    assert "secret@" not in str(caught.value)
