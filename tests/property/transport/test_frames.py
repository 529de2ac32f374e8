"""Whatever arrives: a frame, a typed error or a lost connection, and never memory beyond limits."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import FrameError, PeerRefusedError
from geo_ray.transport.wire.fields import decode_meta, encode_meta
from geo_ray.transport.wire.frames import (
    HEADER,
    PIECE_BYTES,
    PROTOCOL_VERSION,
    TAG_BYTES,
    Frame,
    FrameKind,
    FrameLimits,
    WireCount,
    encode,
    recv_frame,
    send_frame,
)

KEY = b"k" * 32
LIMITS = FrameLimits(max_meta_bytes=4096, max_payload_bytes=100_000)
SEALED = FrameLimits(max_meta_bytes=4096, max_payload_bytes=100_000, encrypted=True)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
metas = st.dictionaries(st.text(max_size=10), scalars | st.lists(scalars, max_size=5), max_size=5)
frames = st.builds(
    Frame, kind=st.sampled_from(FrameKind), meta=metas, payload=st.binary(max_size=2000)
)


@contextmanager
def _pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(30)
        yield left, right


def _receive(raw: bytes, limits: FrameLimits = LIMITS) -> Frame:
    """What a receiver makes of these bytes and then the end of the connection."""
    with _pipe() as (left, right):
        writer = threading.Thread(target=_write, args=(left, raw))
        writer.start()
        try:
            return recv_frame(right, KEY, limits)
        finally:
            right.shutdown(socket.SHUT_RDWR)
            writer.join()


def _write(sock: socket.socket, raw: bytes) -> None:
    try:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the receiver gave up


def _raw(frame: Frame, *, digest_payload: bool = True, encrypt: bool = False) -> bytes:
    return b"".join(encode(frame, KEY, digest_payload=digest_payload, encrypt=encrypt))


@given(frame=frames, digest=st.booleans())
def test_round_trip(frame: Frame, digest: bool) -> None:
    limits = FrameLimits(LIMITS.max_meta_bytes, LIMITS.max_payload_bytes, payload_digest=digest)
    got = _receive(_raw(frame, digest_payload=digest), limits)
    assert (got.kind, got.meta, bytes(got.payload)) == (frame.kind, frame.meta, frame.payload)


@given(frame=frames)
def test_an_encrypted_payload_comes_back_and_is_not_on_the_wire(frame: Frame) -> None:
    raw = _raw(frame, encrypt=True)
    got = _receive(raw, SEALED)
    assert (got.kind, got.meta, bytes(got.payload)) == (frame.kind, frame.meta, frame.payload)
    payload = bytes(frame.payload)
    assert len(payload) < 8 or payload not in raw[-len(payload) - TAG_BYTES :]


@given(
    payload=st.binary(min_size=1, max_size=2000),
    number=st.integers(0, 2**64 - 1),
    sealed=st.booleans(),
)
def test_the_tag_equals_that_of_another_implementation(
    payload: bytes, number: int, sealed: bool
) -> None:
    """`AESGCM` takes a payload whole; the frame's key and nonce as the page says."""
    raw = b"".join(encode(Frame(FrameKind.CHUNK, {}, payload), KEY, encrypt=sealed, number=number))
    fields, head_digest, meta = raw[:20], raw[20:36], raw[36:37]
    salt, person = number.to_bytes(16, "big"), b"geo_ray head"
    head = blake2b(fields + meta, digest_size=16, key=KEY, salt=salt, person=person)
    assert head.digest() == head_digest
    key = blake2b(head_digest, digest_size=32, key=KEY, person=b"geo_ray payload").digest()
    cipher = AESGCM(key)
    if sealed:
        assert raw[37:] == cipher.encrypt(bytes(12), payload, None)
    else:
        assert raw[37:] == payload + cipher.encrypt(bytes(12), b"", payload)


@given(junk=st.binary(max_size=3000))
def test_random_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises((FrameError, ConnectionError)):
        _receive(junk)


@given(junk=st.binary(max_size=300))
def test_random_bytes_after_a_valid_magic_and_version_are_refused(junk: bytes) -> None:
    with pytest.raises((FrameError, ConnectionError)):
        _receive(b"GEOR" + bytes([PROTOCOL_VERSION]) + junk)


@given(
    frame=frames,
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    encrypt=st.booleans(),
)
def test_any_flipped_bit_is_noticed(frame: Frame, at: float, bit: int, encrypt: bool) -> None:
    raw = bytearray(_raw(frame, encrypt=encrypt))
    raw[int(at * len(raw))] ^= 1 << bit
    with pytest.raises((FrameError, PeerRefusedError, ConnectionError)):
        _receive(bytes(raw), SEALED if encrypt else LIMITS)


@given(frame=frames, keep=st.floats(0, 1, exclude_max=True))
def test_truncation_is_a_lost_connection(frame: Frame, keep: float) -> None:
    raw = _raw(frame)
    with pytest.raises(ConnectionError):
        _receive(raw[: int(keep * len(raw))])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(frame=frames, meta_bytes=st.integers(0, 2**32 - 1), payload_bytes=st.integers(0, 2**64 - 1))
def test_lies_about_lengths_never_allocate_beyond_the_limits(
    frame: Frame, meta_bytes: int, payload_bytes: int
) -> None:
    raw = bytearray(_raw(frame))
    fields = list(HEADER.unpack(raw[: HEADER.size]))
    if fields[4:6] == [meta_bytes, payload_bytes]:
        return
    fields[4:6] = [meta_bytes, payload_bytes]
    raw[: HEADER.size] = HEADER.pack(*fields)
    tracemalloc.start()
    try:
        with pytest.raises((FrameError, ConnectionError)):
            _receive(bytes(raw))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@given(packed=st.binary(max_size=200))
def test_decoding_any_bytes_as_meta_is_safe(packed: bytes) -> None:
    try:
        meta = decode_meta(packed)
    except FrameError:
        return
    assert decode_meta(encode_meta(meta)).keys() == meta.keys()


@pytest.mark.parametrize(
    "packed",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 5000,  # nested beyond reason
        b"\x81\xa1a\x81\xa1b\x01",  # a map in the map
        b"\x81\xa1a\xc7\x01\x05x",  # an extension type
        b"\x81\x90\x01",  # a list as key
        b"\x81\xa2\xff\xfe\x01",  # no UTF-8
        b"",
    ],
)
def test_hostile_meta_is_refused(packed: bytes) -> None:
    with pytest.raises(FrameError):
        decode_meta(packed)


@pytest.mark.parametrize(
    "meta",
    [{"a": object()}, {"a": {"b": 1}}, {"a": [[1]]}, {1: 2}, {"a": 2**64}, {"a": np.float32(1)}],
)
def test_unsendable_meta_is_refused_before_anything_is_sent(meta: Any) -> None:
    with _pipe() as (left, right):
        with pytest.raises(FrameError, match="cannot send"):
            send_frame(left, Frame(FrameKind.PING, meta), KEY)
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_large_payloads_arrive_in_the_receivers_buffer(size: int) -> None:
    sent = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    buffer = np.zeros(size + 10, np.uint8)
    count = WireCount()
    with _pipe() as (left, right):
        frame = Frame(FrameKind.CHUNK, {"n": 1}, memoryview(sent))
        writer = threading.Thread(target=send_frame, args=(left, frame, KEY))
        writer.start()
        limits = FrameLimits(max_payload_bytes=size)
        got = recv_frame(right, KEY, limits, lambda *_: memoryview(buffer), count=count)
        writer.join()
    assert np.shares_memory(np.frombuffer(got.payload, np.uint8), buffer)
    assert np.array_equal(buffer[:size], sent) and not buffer[size:].any()
    assert count.wire_bytes == len(_raw(frame))


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with _pipe() as (left, right):
        send_frame(left, Frame(FrameKind.CHUNK, {}, b"abc"), KEY)
        with pytest.raises(FrameError, match="does not fit"):
            recv_frame(right, KEY, LIMITS, lambda *_: memoryview(bytearray(2)))


def test_another_key_version_or_missing_digest_is_refused() -> None:
    frame = Frame(FrameKind.CHUNK, {"a": 1}, b"abc")
    with pytest.raises(FrameError, match="digest"):
        _receive(b"".join(encode(frame, b"x" * 32)))
    with pytest.raises(FrameError, match="no tag"):
        _receive(_raw(frame, digest_payload=False))
    with pytest.raises(FrameError, match="is encrypted"):
        _receive(_raw(frame, encrypt=True))
    with pytest.raises(FrameError, match="not encrypted"):
        _receive(_raw(frame), SEALED)
    other_version = bytearray(_raw(frame))
    other_version[4] = 9
    with pytest.raises(PeerRefusedError, match=r"version 9, this side version 5"):
        _receive(bytes(other_version))


def test_a_payload_of_another_frame_is_refused() -> None:
    one, two = (Frame(FrameKind.CHUNK, {"n": n}, bytes([n]) * 50) for n in (1, 2))
    tail = 50 + 16
    with pytest.raises(FrameError, match="payload's tag"):
        _receive(_raw(one)[:-tail] + _raw(two)[-tail:])


def test_a_frame_that_dribbles_ends_at_the_timeout() -> None:
    with _pipe() as (left, right):
        left.sendall(_raw(Frame(FrameKind.PING, {}))[:-1])
        with pytest.raises(TimeoutError):
            recv_frame(right, KEY, LIMITS, timeout_s=0.05)
