"""One suite, every store: a directory, and a bucket behind a real S3 server over HTTP."""

from __future__ import annotations

import gzip
import io
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from geo_ray.base.errors import ManifestError, ShardMissingError, StoreError
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.manifest import load_manifest, save_manifest
from geo_ray.data.prepare.inputs import gather_rows
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.reader import RegionReader
from geo_ray.data.shards import write_shards
from geo_ray.data.split import IidSplit
from geo_ray.storage.bucket import RequestLimits
from geo_ray.storage.store import S3Store, Store, open_store
from geo_ray.storage.uri import join, parse_s3, s3_uri, split
from tests.support.s3_support import SECRET, new_prefix, s3_server, set_credentials


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@pytest.fixture
def bucket_uri(endpoint: str) -> str:
    return new_prefix(endpoint)


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return (tmp_path / "store with a space").as_uri()
    return str(request.getfixturevalue("bucket_uri"))


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)


# ------------------------------------------------------------------ the contract


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_what_is_written_is_read(store: Store, data: bytes) -> None:
    store.write("a/b.bin", data)
    assert store.read("a/b.bin") == data
    assert store.exists("a/b.bin")
    with store.open("a/b.bin") as file:
        assert file.seek(0, 2) == len(data)
        file.seek(len(data) // 2)
        assert file.read() == data[len(data) // 2 :]


def test_a_write_replaces(store: Store) -> None:
    store.write("a", b"long long long")
    store.write("a", b"short")
    assert store.read("a") == b"short"
    assert store.list() == ["a"]


def test_what_is_not_there_is_missing(store: Store) -> None:
    store.write("a/b", b"1")
    assert not store.exists("a/c")
    assert not store.exists("a")
    with pytest.raises(ShardMissingError, match="a/c"):
        store.read("a/c")
    with pytest.raises(ShardMissingError, match="a/c"):
        store.open("a/c")


def test_listing_is_sorted_relative_and_by_folder(store: Store) -> None:
    for path in ("b/2", "b/1", "a", "bc", "b/d/e"):
        store.write(path, b"")
    assert store.list() == ["a", "b/1", "b/2", "b/d/e", "bc"]
    assert store.list("b") == ["b/1", "b/2", "b/d/e"]
    assert store.list("nothing") == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\\b", "a//b", "."])
def test_paths_that_leave_the_store_are_refused(store: Store, path: str) -> None:
    for act in (store.read, store.open, store.exists, lambda p: store.write(p, b"x")):
        with pytest.raises(StoreError, match="rejected"):
            act(path)
    if path:
        with pytest.raises(StoreError, match="rejected"):
            store.list(path)


def test_the_uri_opens_the_same_store(store: Store) -> None:
    store.write("a", b"1")
    assert open_store(store.uri).read("a") == b"1"


def test_simultaneous_writers_leave_one_whole_file(store: Store) -> None:
    versions = [bytes([number]) * 200_000 for number in range(4)]
    threads = [threading.Thread(target=store.write, args=("a", data)) for data in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("a") in versions
    assert store.list() == ["a"]


def test_a_data_set_lives_in_it(uri: str) -> None:
    columns = {"x": np.arange(60, dtype=np.float32).reshape(30, 2), "y": np.arange(30) % 3}
    manifest = write_shards(
        {"train": columns}, "toy", {"x": "float32[2]", "y": "int64"}, "y", IidSplit(), ("a", "b"),
        0, uri, 4,
    )  # fmt: skip
    save_manifest(manifest, join(uri, "manifest.json"))
    again = load_manifest(join(uri, "manifest.json"))
    assert again == manifest
    found = [
        value
        for region in ("a", "b")
        for value in RegionReader(again, region, "train", 0).read(0, 15)["x"][:, 0].tolist()
    ]
    assert sorted(found) == columns["x"][:, 0].tolist()
    with pytest.raises(ManifestError, match="other"):
        load_manifest(join(uri, "other.json"))


def test_a_users_own_files_are_read_from_it(uri: str) -> None:
    store = open_store(uri)
    store.write("raw/b.csv", b"x,y\n3,4\n")
    store.write("raw/a.csv.gz", gzip.compress(b"x,y\n1,2\n"))
    store.write("raw/notes.txt", b"")
    parquet = io.BytesIO()
    pq.write_table(pa.table({"x": [5.0], "y": [6]}), parquet)
    store.write("raw/c/d.parquet", parquet.getvalue())
    preparation = resolve(None, {"x": "float32", "y": "int64"}).preparation
    for source, options, expected in (
        ("raw", ReadOptions(format="csv"), [1.0, 3.0]),
        ("raw/b.csv", ReadOptions(), [3.0]),
        ("raw/c", ReadOptions(), [5.0]),
    ):
        found = find_files(join(uri, source), options)
        assert gather_rows(found, preparation).columns["x"].tolist() == expected
    with pytest.raises(ShardMissingError):
        find_files(join(uri, "nothing"))


# ------------------------------------------------------------------ directories


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    store.write("d/a", b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        with pytest.raises(StoreError, match="No space left"):
            store.write("d/a", b"new")
    assert store.read("d/a") == b"old"
    assert [file.name for file in (tmp_path / "d").iterdir()] == ["a"]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    open_store(str(tmp_path)).write("a", b"1")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_local_use_does_not_import_the_sdk(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import geo_ray.data.reader, geo_ray.data.shards\n"
        "from geo_ray.storage.store import open_store\n"
        f"open_store({str(tmp_path)!r}).write('a', b'1')\n"
        "sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ buckets


def test_listing_goes_beyond_one_page(bucket_uri: str) -> None:
    store = open_store(bucket_uri)
    address = parse_s3(bucket_uri)
    # The server runs in this process; filling it directly spares a thousand requests.
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for number in range(1001):
        backend.put_object(address.bucket, f"{address.prefix}/f{number:04d}", b"")
    assert store.list() == [f"f{number:04d}" for number in range(1001)]


def test_a_missing_bucket_is_a_store_error(endpoint: str) -> None:
    store = open_store(s3_uri("no-such-bucket", endpoint_url=endpoint, region="us-east-1"))
    for act in (
        lambda: store.read("a"),
        lambda: store.write("a", b""),
        lambda: store.exists("a"),
        store.list,
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert type(caught.value) is StoreError
        assert "no-such-bucket" in caught.value.message
        assert endpoint in caught.value.message


def test_an_unreachable_endpoint_is_a_store_error_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        uri = s3_uri("bucket", endpoint_url=endpoint, region="us-east-1")
        store = S3Store(uri, RequestLimits(0.5, 0.5, attempts=2))
        with caplog.at_level(logging.INFO), pytest.raises(StoreError) as caught:
            store.read("a/b")
    assert "'bucket'" in caught.value.message
    assert endpoint in caught.value.message
    assert SECRET not in str(caught.value) + caplog.text
    assert "canary-key" not in str(caught.value) + caplog.text


def test_an_endpoint_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        uri = s3_uri("bucket", endpoint_url=endpoint, region="us-east-1")
        store = S3Store(uri, RequestLimits(0.2, 0.2, attempts=2))
        with pytest.raises(StoreError, match="ReadTimeoutError"):
            store.write("a", b"1")


def test_missing_credentials_are_said_so(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(s3_uri("bucket", endpoint_url=endpoint, region="us-east-1"))
    with pytest.raises(StoreError, match="no credentials"):
        store.read("a")


class Flaky(BaseHTTPRequestHandler):
    """Answers 503, then a body that breaks off, then properly; counts its requests."""

    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        body = b"whole body"
        if self.requests == 1:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:4] if self.requests == 2 else body)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def test_errors_of_the_server_and_broken_downloads_are_retried() -> None:
    Flaky.requests = 0
    server = HTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        store = S3Store(
            s3_uri("bucket", endpoint_url=endpoint, region="us-east-1"), RequestLimits(attempts=3)
        )
        assert store.read("a") == b"whole body"
        assert Flaky.requests == 3
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_cos_is_addressed_by_host_name() -> None:
    cos = s3_uri("data-1250000000", endpoint_url="https://cos.ap-guangzhou.myqcloud.com",
                 region="ap-guangzhou")  # fmt: skip
    client = S3Store(cos)._bucket.client
    address = client.generate_presigned_url(
        "get_object", Params={"Bucket": "data-1250000000", "Key": "a"}
    )
    assert address.startswith("https://data-1250000000.cos.ap-guangzhou.myqcloud.com/a?")
    once = {"Bucket": "data-1250000000", "Key": "a", "IfNoneMatch": "*"}
    assert "x-cos-forbid-overwrite" in client.generate_presigned_url("put_object", Params=once)


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://host/x",
        "gs://bucket/x",
        "file://otherhost/x",
        "s3://",
        "s3://bucket?colour=red",
        "s3://bucket?addressing=sideways",
        "s3://bucket?endpoint_url=localhost:9000",
        "s3://[x",
        "s3://bucket?endpoint_url=http://[x",
        "s3://bucket?endpoint_url=http://host:port",
        "s3://bucket?endpoint_url=http://",
    ],
)
def test_addresses_that_are_not_understood_are_refused(uri: str) -> None:
    with pytest.raises(StoreError):
        open_store(uri)


def test_joining_and_splitting_keep_the_options() -> None:
    uri = "s3://bucket/a/b?region=eu-west-1"
    assert join(uri, "c/m.json") == "s3://bucket/a/b/c/m.json?region=eu-west-1"
    assert split(join(uri, "m.json")) == (uri, "m.json")
    assert split(join("s3://bucket", "m.json")) == ("s3://bucket", "m.json")
    assert parse_s3("s3://bucket").prefix == ""
