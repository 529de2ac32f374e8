"""Endpoints that go on for long: certificates that change, are revoked, and streams that renew."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import LinkDownError
from geo_ray.transport.config import LEAST_STREAM_AGE_S, LEAST_STREAM_BYTES, TransportConfig
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.certs import Authority, issue_for_run
from geo_ray.transport.security.tls import TlsFiles
from tests.support.wan_support import Node, leaving_nothing_behind, numbers_of, running, until


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A deployment's directory, which all bridges of this test see, as on a shared disk."""
    cert_store.init(tmp_path)
    for region in ("asia", "eu", "us"):
        cert_store.issue(tmp_path, region)
    return tmp_path


def _node(home: Path, region: str) -> Node:
    return Node(region, certificate=cert_store.files_of(home, region), tls="required")


def _linked(*nodes: Node) -> None:
    """The first one listens; the others dial it."""
    first, *others = nodes
    address = first.endpoint.listen()
    for node in others:
        node.join(first, address)


@pytest.mark.parametrize("revoked", ["eu", "us"])
def test_a_revoked_region_loses_the_link_that_it_has_and_gets_no_other(
    home: Path, revoked: str
) -> None:
    """Whether it dialed or listens; the third region's links go on."""
    eu, us, asia = (_node(home, region) for region in ("eu", "us", "asia"))
    with running(eu, us, asia):
        _linked(us, eu)
        _linked(asia, eu, us)
        us.say("eu", 1)
        eu.wait_messages(1)
        cert_store.revoke(home, revoked)
        victim = {"eu": eu, "us": us}[revoked]
        other = {"eu": us, "us": eu}[revoked]
        for node in (other, asia):
            until(lambda node=node: not node.about(revoked)["connected"])
            until(lambda node=node: "revoked" in str(node.about(revoked)["last_error"]))
        with pytest.raises(LinkDownError):
            other.endpoint.wait_connected([revoked], 0.5)
        asia.say(other.region, 2)
        other.wait_messages(1 if other is us else 2)

        cert_store.issue(home, revoked, force=True)  # another key: it may come back
        victim.endpoint.wait_connected([other.region, "asia"], 60.0)


def test_a_ca_is_replaced_while_regions_stay_linked_and_reconnect(home: Path) -> None:
    eu, us = _node(home, "eu"), _node(home, "us")
    with running(eu, us):
        _linked(us, eu)
        cert_store.rotate_ca(home)
        cert_store.renew(home, "eu")  # of the new CA; us has one of the old
        _until_a_new_link_holds(eu, us, home, 1)
        cert_store.renew(home, "us")
        cert_store.finish_rotation(home)
        _until_a_new_link_holds(eu, us, home, 2)
        for number in range(3):
            us.say("eu", number)
        assert numbers_of(eu.wait_messages(3)) == [0, 1, 2]


def _until_a_new_link_holds(eu: Node, us: Node, home: Path, attempt: int) -> None:
    """The certificates of now are in use: a region that only knows these can join."""
    cert_store.renew(home, "asia")
    asia = Node("asia", attempt, certificate=cert_store.files_of(home, "asia"), tls="required")
    with running(asia):
        address = asia.endpoint.listen()
        for node in (eu, us):
            node.endpoint.connect("asia", address)
            node.endpoint.wait_connected(["asia"], 60.0)
    assert eu.about("us")["reconnects"] == 0


def test_files_that_are_copied_slowly_do_no_harm(home: Path, tmp_path: Path) -> None:
    """For a moment the key does not fit; what was read before is used until both are there."""
    here = tmp_path / "host" / "eu"
    shutil.copytree(home / "regions/eu", here)
    eu = Node("eu", certificate=TlsFiles.in_directory(here), tls="required")
    us, asia = _node(home, "us"), _node(home, "asia")
    with running(eu, us, asia):
        _linked(us, eu)
        files = cert_store.issue(home, "eu", force=True)
        shutil.copy(files.cert, here)
        time.sleep(0.5)  # it has looked several times
        _linked(asia, eu)
        old = next(iter(asia.endpoint._sessions["eu"]._connection.peer_serials))
        shutil.copy(files.key, here)
        asia.endpoint._sessions["eu"]._connection.end("a test cuts it")
        until(lambda: _serial(asia, "eu") not in (None, old))
        assert eu.about("us")["reconnects"] == 0


def _serial(node: Node, peer: str) -> int | None:
    """What the peer showed; a link with the old certificate is cut, so that it shows another."""
    connection = node.endpoint._sessions[peer]._connection
    if connection is None:
        return None
    serial = next(iter(connection.peer_serials))
    connection.end("a test cuts it")
    time.sleep(0.1)
    return serial


def test_a_running_endpoint_gets_another_certificate() -> None:
    """As bridges do when theirs is half over: also the CA may be another."""
    first, second = issue_for_run("run", ["eu", "us"]), issue_for_run("run", ["asia", "eu", "us"])
    eu = Node("eu", certificate=first["eu"], tls="required")
    us = Node("us", certificate=first["us"], tls="required")
    asia = Node("asia", certificate=second["asia"], tls="required")
    with running(eu, us, asia):
        _linked(us, eu)
        asia.endpoint.listen()
        for node in (eu, us):
            node.endpoint.use_certificate(second[node.region])
            node.endpoint.connect("asia", asia.endpoint.advertised)
            node.endpoint.wait_connected(["asia"], 60.0)
        assert eu.about("us")["reconnects"] == 0


@pytest.mark.parametrize(
    "limits",
    [{"max_stream_bytes": LEAST_STREAM_BYTES}, {"max_stream_age_s": LEAST_STREAM_AGE_S}],
)
@pytest.mark.parametrize("tls", ["required", pytest.param("off", marks=pytest.mark.slow)])
def test_streams_are_replaced_and_every_message_comes_once_in_order(
    limits: dict[str, float], tls: str
) -> None:
    """Both directions at once, until every data stream, or the whole connection, was new.

    The limits are the smallest that a configuration may have; the link stays in use with them.
    """
    certs, rng = issue_for_run("run", ["eu", "us"]), random.Random(1)
    eu, us = (
        Node(r, certificate=certs[r], tls=tls, min_streams=2, max_streams=2, **limits)
        for r in ("eu", "us")
    )
    numbers: set[int] = set()

    def is_renewed() -> bool:
        connection = eu.endpoint._sessions["us"]._connection
        numbers.update(s.number for s in (connection._data if connection is not None else []))
        if "max_stream_age_s" in limits:
            return eu.about("us")["reconnects"] > 0
        return len(numbers) >= 4

    payloads, size = [], 200_000 if "max_stream_bytes" in limits else 2000
    with running(eu, us):
        _linked(us, eu)
        while not is_renewed():
            payloads.append(rng.randbytes(size))
            for node, peer in ((eu, "us"), (us, "eu")):
                node.say(peer, len(payloads) - 1, payloads[-1])
            time.sleep(0.01)
            assert len(payloads) < 6000, numbers
        for node in (eu, us):
            messages = node.wait_messages(len(payloads))
            assert numbers_of(messages) == list(range(len(payloads)))
            assert [bytes(message.payload) for message in messages] == payloads
        # At most one for each look that is taken at the streams of a link, once a second.
        assert eu.about("us")["reconnects"] == (0 if "max_stream_bytes" in limits else 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_stream_bytes", LEAST_STREAM_BYTES - 1), ("max_stream_age_s", LEAST_STREAM_AGE_S - 0.1)],
)
def test_streams_that_would_always_be_replaced_are_refused_with_the_reason(
    key: str, value: float
) -> None:
    with pytest.raises(ValidationError, match=f"{key}: must be at least .+: .*stream"):
        TransportConfig.model_validate({key: value})


def test_both_ends_derive_the_same_keys_and_a_new_connection_has_others() -> None:
    eu, us = Node("eu", tls="off"), Node("us", tls="off")
    with running(eu, us):
        _linked(us, eu)
        link, out = eu.endpoint.link_key("us", b"x", outgoing=True)
        assert us.endpoint.link_key("eu", b"x", outgoing=False, link_id=link) == (link, out)
        others = {
            eu.endpoint.link_key("us", b"x", outgoing=False)[1],
            eu.endpoint.link_key("us", b"y", outgoing=True)[1],
            eu.endpoint._sessions["us"]._connection.greeting.send_key,
        }
        assert len(others | {out}) == 4
        eu.endpoint._sessions["us"]._connection.end("a test cuts it")
        until(lambda: eu.about("us")["reconnects"] and us.about("eu")["connected"])
        with pytest.raises(LinkDownError, match="another one now"):
            eu.endpoint.link_key("us", b"x", outgoing=True, link_id=link)
        with pytest.raises(LinkDownError):
            eu.endpoint.link_key("asia", b"x", outgoing=True)


def test_a_foreign_revocation_list_has_no_effect(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eu, us = _node(home, "eu"), _node(home, "us")
    with running(eu, us):
        _linked(us, eu)
        serials = us.endpoint._sessions["eu"]._connection.peer_serials
        forged = Authority.create("geo-ray deployment CA").crl(serials)
        (home / "regions/us/crl.pem").write_bytes(forged)
        until(lambda: "not from this deployment" in caplog.text)
        us.say("eu", 1)
        eu.wait_messages(1)
        assert not eu.about("us")["reconnects"]
