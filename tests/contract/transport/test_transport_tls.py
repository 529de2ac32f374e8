"""Endpoints with TLS: accepted and refused peers, and the reported reasons."""

from __future__ import annotations

import datetime as dt
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from geo_ray.base.errors import LinkDownError
from geo_ray.transport.connection import Stream
from geo_ray.transport.security.certs import Authority, issue_for_run
from geo_ray.transport.security.tls import TlsBytes
from tests.support.wan_support import (
    WAIT_S,
    Node,
    leaving_nothing_behind,
    numbers_of,
    running,
    until,
)

LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
FAR_AHEAD = dt.datetime.now(dt.UTC) + dt.timedelta(days=100)
SIZES = [0, 1, 1000, 16_384, 65_536, 65_537, 3_000_000]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


@pytest.fixture(scope="module")
def certs() -> dict[str, TlsBytes]:
    return issue_for_run("run", ["eu", "us"])


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("test CA")


def _node(region: str, certificate: TlsBytes | None, **options: Any) -> Node:
    return Node(region, certificate=certificate, **{"tls": "required"} | options)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


# ------------------------------------------------------------------ who belongs together


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_messages_of_all_sizes_pass_both_ways(host: str, certs: dict[str, TlsBytes]) -> None:
    eu, us = _node("eu", certs["eu"]), _node("us", certs["us"])
    payloads = [random.Random(size).randbytes(size) for size in SIZES]
    with running(eu, us):
        eu.dial(us, host)
        for n, payload in enumerate(payloads):
            eu.say("us", n, payload)
            us.say("eu", n, payload)
        for node, peer in ((eu, "us"), (us, "eu")):
            messages = node.wait_messages(len(payloads))
            assert [bytes(message.payload) for message in messages] == payloads
            assert node.about(peer)["encrypted"] and node.about(peer)["reconnects"] == 0
        eu.endpoint.flush("us", WAIT_S)
        us.endpoint.flush("eu", WAIT_S)
        assert eu.about("us")["bytes_sent"]["update"] == us.about("eu")["bytes_received"]["update"]


def test_data_streams_are_opened_and_used_too(certs: dict[str, TlsBytes]) -> None:
    eu = _node("eu", certs["eu"], min_streams=4, chunk_bytes=16_384)
    us = _node("us", certs["us"], min_streams=4, chunk_bytes=16_384)
    big = random.Random(1).randbytes(5_000_000)
    with running(eu, us):
        eu.dial(us)
        until(lambda: eu.about("us")["streams"] == us.about("eu")["streams"] == 4)
        for n in range(4):
            eu.say("us", n, big)
            us.say("eu", n, big)
        for node, peer in ((eu, "us"), (us, "eu")):
            messages = node.wait_messages(4)
            assert numbers_of(messages) == [0, 1, 2, 3]
            assert all(message.payload == big for message in messages)
            assert node.about(peer)["reconnects"] == 0 and node.about(peer)["encrypted"]


def test_counters_never_miss_the_bytes_of_a_stream_that_is_just_being_closed(
    certs: dict[str, TlsBytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = (_node(region, certs[region], min_streams=3) for region in ("eu", "us"))
    close, seen = Stream.close, []

    def watched(stream: Stream) -> None:
        close(stream)
        seen.append(us.about("eu")["bytes_received"]["update"])

    with running(eu, us):
        eu.dial(us)
        until(lambda: eu.about("us")["streams"] == us.about("eu")["streams"] == 3)
        for n in range(8):
            eu.say("us", n, bytes(1_000_000))
        us.wait_messages(8)
        eu.endpoint.flush("us", WAIT_S)
        had = us.about("eu")["bytes_received"]["update"]
        monkeypatch.setattr(Stream, "close", watched)
        for stream in list(us.endpoint._sessions["eu"]._connection._data):
            stream.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: len(seen) >= 3)
        monkeypatch.undo()
        assert min(seen) == had > 8_000_000


def test_on_loopback_auto_goes_without(certs: dict[str, TlsBytes]) -> None:
    eu, us = _node("eu", certs["eu"], tls="auto"), _node("us", certs["us"], tls="auto")
    with running(eu, us):
        eu.dial(us)
        assert not eu.about("us")["encrypted"] and not us.about("eu")["encrypted"]


def test_a_listener_that_would_do_without_takes_tls(certs: dict[str, TlsBytes]) -> None:
    eu, us = _node("eu", certs["eu"]), _node("us", certs["us"], tls="auto")
    with running(eu, us):
        eu.dial(us)
        eu.say("us", 1)
        us.wait_messages(1)
        assert eu.about("us")["encrypted"] and us.about("eu")["encrypted"]


# ------------------------------------------------------------------ who does not


def _outdated(authority: Authority, region: str) -> TlsBytes:
    return authority.issue(region, days=10, now=LONG_AGO)


def _young(authority: Authority, region: str) -> TlsBytes:
    return authority.issue(region, days=10, now=FAR_AHEAD)


def _of_another_ca(_: Authority, region: str) -> TlsBytes:
    return Authority.create("test CA").issue(region)


def _of_another_ca_but_trusting(authority: Authority, region: str) -> TlsBytes:
    other = _of_another_ca(authority, region)
    return TlsBytes(authority.cert_pem, other.cert_pem, other.key_pem)


def _of_another_region(authority: Authority, _: str) -> TlsBytes:
    return authority.issue("elsewhere")


Make = Callable[[Authority, str], TlsBytes]
WRONG: list[tuple[Make, str, str]] = [  # certificate, said of a dialer's, said of a listener's
    (_outdated, "expired", "expired"),
    (_young, "not valid yet", "not valid yet"),
    (_of_another_ca, "CA", "another CA"),
    (_of_another_ca_but_trusting, "", ""),
    (_of_another_region, "'elsewhere'", "'elsewhere'"),
]


class Healthy:
    """Two regions that talk all the time while a third one is refused."""

    def __init__(self, authority: Authority) -> None:
        self.us = _node("us", authority.issue("us"))
        self.asia = _node("asia", authority.issue("asia"))
        self.address = self.asia.dial(self.us)
        self._stop = threading.Event()
        self._said = 0
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        while not self._stop.wait(0.005):
            self.asia.say("us", self._said, b"x" * 1000)
            self._said += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        got = self.us.wait_messages(self._said)
        assert numbers_of(got) == list(range(self._said))
        assert self.asia.about("us")["reconnects"] == self.us.about("asia")["reconnects"] == 0


def _refused(dialer: Node, peer: str, caplog: pytest.LogCaptureFixture, words: str) -> None:
    """The dial fails until the reason was reported or logged, and never succeeds."""
    until(
        lambda: (
            words in str(dialer.about(peer)["last_error"])
            or any(words in record.getMessage() for record in caplog.records)
        )
    )
    with pytest.raises(LinkDownError, match=peer):
        dialer.endpoint.wait_connected([peer], 0.2)
    assert dialer.about(peer)["last_error"]
    assert not any(message[0] == peer for message in dialer.peers)


@pytest.mark.parametrize(("make", "words"), [(make, words) for make, words, _ in WRONG])
def test_a_dialer_with_a_wrong_certificate_is_refused(
    authority: Authority, make: Make, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = Healthy(authority)
    eu = _node("eu", make(authority, "eu"))
    with running(eu, healthy.us, healthy.asia):
        eu.endpoint.connect("us", healthy.address)
        _refused(eu, "us", caplog, words or "CA")
        healthy.end()
        assert "eu" not in healthy.us.endpoint.stats()


@pytest.mark.parametrize(("make", "words"), [(make, words) for make, _, words in WRONG])
def test_a_listener_with_a_wrong_certificate_is_refused(
    authority: Authority, make: Make, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = Healthy(authority)
    eu = _node("eu", make(authority, "eu"))
    with running(eu, healthy.us, healthy.asia):
        healthy.us.endpoint.connect("eu", eu.endpoint.listen())
        _refused(healthy.us, "eu", caplog, words or "CA")
        healthy.end()
        assert not eu.peers


def _plain(region: str, _: Authority) -> Node:
    return Node(region, tls="off")


def _bare(region: str, _: Authority) -> Node:
    return Node(region, tls="auto")


def _empty_handed(region: str, _: Authority) -> Node:
    return Node(region, tls="required")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_plain, "connects without TLS, but `transport.tls` is required"),
        (_bare, "connects without TLS, but `transport.tls` is required"),
        (_empty_handed, "this region has no certificate, but `transport.tls` is required"),
    ],
)
def test_a_dialer_without_tls_or_certificate_is_refused(
    authority: Authority,
    make: Callable[[str, Authority], Node],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    healthy, eu = Healthy(authority), make("eu", authority)
    with running(eu, healthy.us, healthy.asia):
        eu.endpoint.connect("us", healthy.address)
        _refused(eu, "us", caplog, words)
        healthy.end()
        assert "eu" not in healthy.us.endpoint.stats()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_plain, "a frame begins with"),
        (_bare, "the peer wants TLS, but this region has no certificate"),
        (_empty_handed, "the peer wants TLS, but this region has no certificate"),
    ],
)
def test_a_listener_without_tls_or_certificate_is_refused(
    authority: Authority,
    make: Callable[[str, Authority], Node],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    healthy, eu = Healthy(authority), make("eu", authority)
    with running(eu, healthy.us, healthy.asia):
        healthy.us.endpoint.connect("eu", eu.endpoint.listen())
        _refused(healthy.us, "eu", caplog, words)
        healthy.end()
        assert not eu.peers


def test_another_run_is_refused_even_with_a_valid_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = Healthy(authority)
    eu = _node("eu", authority.issue("eu"), run_id="old")
    with running(eu, healthy.us, healthy.asia):
        eu.endpoint.connect("us", healthy.address)
        _refused(eu, "us", caplog, "'old'")
        healthy.end()
        assert "eu" not in healthy.us.endpoint.stats()


def test_close_interrupts_tls_handshakes(certs: dict[str, TlsBytes]) -> None:
    """With a timeout that outlasts the test: what waits for it would be left behind."""
    eu = _node("eu", certs["eu"], handshake_timeout_s=1000.0)
    us = _node("us", certs["us"], handshake_timeout_s=1000.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with running(eu, us):
            eu.endpoint.connect("silent", silent.getsockname())
            connection, _ = silent.accept()
            assert connection.recv(5)  # the dialer waits for an answer to its hello by now
            hello = socket.create_connection(us.endpoint.listen())
            record, rest_comes_later = b"\x16\x03\x01\x00\xff", b"\x01\x00\x04\x00"
            hello.sendall(record + rest_comes_later + bytes(251))
            until(lambda: any("wan-receive" in each.name for each in threading.enumerate()))
        connection.close()
        hello.close()
