"""Who gets a place when there are more connections than places, and what counts as a beginning."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire.accept_pool import Places, first_frame_bytes, source_of
from geo_ray.transport.wire.frames import Frame, FrameKind, encode

HELLO = b"".join(encode(Frame(FrameKind.HELLO, {"service": "wan"}), b"any"))


def _full(*sources: str) -> Places[str]:
    """Places with a holder each, one second apart from time 0 on."""
    places: Places[str] = Places(len(sources))
    for n, source in enumerate(sources):
        places.take(f"{source}{n}", source, float(n))
    return places


def test_the_greediest_source_gives_up_its_oldest_place() -> None:
    places = _full("a", "b", "b", "b", "a")
    assert places.is_full
    assert places.victim("c", 5.0, 100.0) == "b1"
    assert places.victim("a", 5.0, 100.0) is None  # it would have as many as b has
    assert places.victim("b", 5.0, 100.0) is None
    assert places.victim("b", 5.0, 4.0) == "b1"  # it has had its time
    places.leave("b1")
    places.leave("b1")
    assert not places.is_full and "b1" not in places
    assert places.holders() == ["a0", "b2", "b3", "a4"]
    assert [places.count(source) for source in "abc"] == [2, 2, 0]


def test_without_tenure_a_connection_can_always_be_dropped() -> None:
    assert _full("a", "b").victim("c", 1.0) == "a0"
    assert _full("a").victim("a", 0.0) == "a0"
    assert Places[str](3).victim("a", 0.0) is None


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_network_is_one_source(host: str, source: str) -> None:
    assert source_of(host) == source


def test_the_length_of_a_first_frame_is_known_as_soon_as_its_header_is() -> None:
    for length in range(len(HELLO) + 10):
        needed = first_frame_bytes(HELLO[:length] + bytes(max(0, length - len(HELLO))))
        assert needed == (len(HELLO) if length >= 36 else 36)
    record = b"\x16\x03\x01\x02\x00" + bytes(512)
    assert [first_frame_bytes(record[:length]) for length in (1, 4, 5, 517)] == [5, 5, 517, 517]


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1",
        b"\x00",
        b"\x16\x02",
        b"\x16\x03\x01\xff\xff",
        b"GEOX",
        b"".join(encode(Frame(FrameKind.READY, {}), b"any")),
        b"".join(encode(Frame(FrameKind.HELLO, {"long": "x" * 5000}), b"any")),
    ],
)
def test_an_invalid_hello_is_refused(start: bytes) -> None:
    with pytest.raises(FrameError):
        first_frame_bytes(start)


def test_another_version_is_reported_by_the_handshake() -> None:
    assert first_frame_bytes(HELLO[:4] + b"\x09" + HELLO[5:]) <= len(HELLO)
