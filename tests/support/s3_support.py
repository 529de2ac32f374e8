"""A real S3 server over HTTP, and a proxy before it that makes trouble on demand."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

from geo_ray.storage.uri import s3_uri

SECRET = "canary-secret-8d1f"
_buckets = count()


@contextmanager
def s3_server() -> Iterator[str]:
    """Address of a real S3 server on a free port, in threads of this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for such a server, and no other way to any."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def client_of(endpoint: str) -> Any:
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")


def new_bucket(endpoint: str) -> str:
    """A bucket that nobody has used."""
    bucket = f"bucket-{next(_buckets)}-{time.time_ns()}"
    client_of(endpoint).create_bucket(Bucket=bucket)
    return bucket


def new_prefix(endpoint: str) -> str:
    """The address of a prefix in a new bucket."""
    return s3_uri(new_bucket(endpoint), "some/prefix", endpoint_url=endpoint, region="us-east-1")


@dataclass(frozen=True)
class Request:
    """What a proxy has seen of a request."""

    method: str
    path: str
    query: dict[str, list[str]]

    @property
    def is_piece(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query

    @property
    def file(self) -> str:
        return self.path.rsplit("/", 1)[-1]


Trouble = Callable[[Request], str | None]
"""What happens to a request: ``503`` or another status, ``cut`` (the connection is closed in the
middle of what is sent), ``lost`` (it is carried out, the answer is not given), ``part`` (the answer
breaks off), ``unconditional`` (its condition is not heard), ``slow``; None: nothing."""


@dataclass
class Proxy:
    """Passes requests on to a server, and makes trouble."""

    endpoint: str
    trouble: Trouble
    seen: list[Request] = field(default_factory=list)


def once(kind: str, fits: Callable[[Request], bool], times: int = 1) -> Trouble:
    """Trouble for the first requests that fit."""
    left = [times]
    lock = threading.Lock()

    def trouble(request: Request) -> str | None:
        with lock:
            if left[0] and fits(request):
                left[0] -= 1
                return kind
        return None

    return trouble


@contextmanager
def proxy_before(server: str) -> Iterator[Proxy]:
    """A proxy before a server; nothing goes wrong until its `trouble` is set."""
    proxy = Proxy("", lambda request: None)
    behind = urlsplit(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            parts = urlsplit(self.path)
            request = Request(
                self.command, parts.path, parse_qs(parts.query, keep_blank_values=True)
            )
            proxy.seen.append(request)
            kind = proxy.trouble(request)
            length = int(self.headers.get("Content-Length") or 0)
            if kind == "cut":
                self.rfile.read(min(length, 1000))
                self.close_connection = True
                self.connection.close()
                return
            body = self.rfile.read(length)
            if kind is not None and kind.isdigit():
                self._answer(int(kind), {"Content-Type": "application/xml"}, _refusal(kind))
                return
            if kind == "slow":
                time.sleep(0.3)
            status, headers, answer = self._ask(body, drop=kind == "unconditional")
            if kind == "lost":
                self.close_connection = True
                self.connection.close()
                return
            if kind == "part":
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer[: len(answer) // 2])
                self.close_connection = True
                return
            self._answer(status, headers, answer)

        def _ask(self, body: bytes, *, drop: bool) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(str(behind.hostname), behind.port, timeout=30)
            sent = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            if drop:
                sent = {k: v for k, v in sent.items() if k.lower() != "if-none-match"}
            connection.request(self.command, self.path, body=body, headers=sent)
            answer = connection.getresponse()
            kept = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "date", "server")
            }
            data = answer.read()
            connection.close()
            return answer.status, kept, data

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD" and status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        def log_message(self, *args: object) -> None:
            pass

    server_here = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server_here.daemon_threads = True
    thread = threading.Thread(target=server_here.serve_forever, args=(0.05,))
    thread.start()
    proxy.endpoint = f"http://127.0.0.1:{server_here.server_port}"
    try:
        yield proxy
    finally:
        server_here.shutdown()
        thread.join()
        server_here.server_close()


def _refusal(status: str) -> bytes:
    codes = {"500": "InternalError", "503": "SlowDown", "403": "QuotaExceeded"} | {
        "404": "NoSuchUpload"
    }
    return f"<Error><Code>{codes[status]}</Code><Message>no</Message></Error>".encode()
