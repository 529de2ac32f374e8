from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from wan_support import open_files

from geo_ray.errors import (
    DeadlineExceededError,
    FrameError,
    InvariantError,
    LinkDownError,
    NonFiniteError,
    PeerRefusedError,
    PortInUseError,
)
from geo_ray.transport.lan import shared_buffer
from geo_ray.transport.lan.lan import Handler, LanClient, LanConfig, LanConnection, LanServer, Meta

KEY = b"k" * 32
Answer = tuple[Meta, memoryview | None]


def _echo(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
    return {**meta, "peer": connection.peer}, payload


@contextmanager
def _serving(handler: Handler = _echo, **options: object) -> Iterator[LanServer]:
    before = set(threading.enumerate())
    with LanServer("127.0.0.1", KEY, handler, **options) as server:  # type: ignore[arg-type]
        yield server
    assert not set(threading.enumerate()) - before


def test_request_and_answer() -> None:
    with _serving() as server, LanClient(server.address, KEY, {"peer": "w0"}) as client:
        assert client.request({"step": 3, "names": ["a", "b"]}) == (
            {"step": 3, "names": ["a", "b"], "peer": "w0"},
            None,
        )
        assert client.shared is None


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("size", [1, 1000, 3_000_001])
def test_payloads_both_ways(digest: bool, size: int) -> None:
    config = LanConfig(digest_payload=digest)
    sent = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    with (
        _serving(config=config) as server,
        LanClient(server.address, KEY, {"peer": "w"}, config=config) as client,
    ):
        _, fresh = client.request({}, memoryview(sent))
        assert fresh is not None and bytes(fresh) == sent.tobytes()
        into = np.zeros(size + 5, np.uint8)
        _, view = client.request({}, memoryview(sent), into=memoryview(into))
        assert view is not None and view.nbytes == size
        assert np.array_equal(into[:size], sent) and not into[size:].any()


def test_float_arrays_and_empty_payloads() -> None:
    with _serving() as server, LanClient(server.address, KEY, {"peer": "w"}) as client:
        grad_P = np.arange(12, dtype=np.float32).reshape(3, 4)
        _, answer = client.request({}, memoryview(grad_P))  # type: ignore[arg-type]
        assert answer is not None
        assert np.array_equal(np.frombuffer(answer, np.float32), grad_P.ravel())
        assert client.request({}, memoryview(np.zeros(0, np.float32)))[1] is None
        with pytest.raises(FrameError, match="contiguous"):
            client.request({}, memoryview(grad_P.T))  # type: ignore[arg-type]
        assert client.request({"still": "usable"})[0]["still"] == "usable"


def test_shared_memory_passes_tensors_without_payload() -> None:
    def double(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        assert connection.shared is not None and payload is None
        np.frombuffer(connection.shared, np.float32)[:] *= 2
        return {}, None

    with (
        _serving(double) as server,
        LanClient(server.address, KEY, {"peer": "w"}, shared_bytes=4096) as client,
    ):
        assert client.shared is not None and client.shared.nbytes == 4096
        shared_P = np.frombuffer(client.shared, np.float32)
        shared_P[:] = 1.5
        client.request({})
        assert (shared_P == 3.0).all()
        del shared_P


def test_falls_back_to_inline_when_the_server_declines() -> None:
    with (
        _serving(config=LanConfig(shared_memory=False)) as server,
        LanClient(server.address, KEY, {"peer": "w"}, shared_bytes=4096) as client,
    ):
        assert client.shared is None
        assert client.request({}, b"abc")[1] == b"abc"


def test_falls_back_to_inline_when_both_see_different_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[memoryview | None] = []

    def look(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        seen.append(connection.shared)
        return {}, None

    monkeypatch.setattr(shared_buffer.SharedBuffer, "proven", lambda _: False)
    with (
        _serving(look) as server,
        LanClient(server.address, KEY, {"peer": "w"}, shared_bytes=4096) as client,
    ):
        client.request({})
        assert client.shared is None and seen == [None]


def test_errors_of_the_handler_arrive_with_their_type() -> None:
    def fail(_: LanConnection, meta: Meta, __: memoryview | None) -> Answer:
        if meta["how"] == "typed":
            raise NonFiniteError("gradient of w3 is NaN", fix="clip")
        if meta["how"] == "unsendable":
            return {"x": object()}, None  # type: ignore[dict-item]
        raise KeyError("surprise")

    with _serving(fail) as server, LanClient(server.address, KEY, {"peer": "w"}) as client:
        with pytest.raises(NonFiniteError) as typed:
            client.request({"how": "typed"})
        assert (typed.value.message, typed.value.fix) == ("gradient of w3 is NaN", "clip")
        with pytest.raises(InvariantError, match="surprise"):
            client.request({"how": "untyped"})
        with pytest.raises(FrameError, match="'x'"):
            client.request({"how": "unsendable"})


def test_handlers_of_two_connections_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=30)

    def meet(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        barrier.wait()
        return {"peer": connection.peer}, None

    answers: list[object] = []

    def ask(server: LanServer, peer: str) -> None:
        with LanClient(server.address, KEY, {"peer": peer}) as client:
            answers.append(client.request({})[0]["peer"])

    with _serving(meet) as server:
        threads = [threading.Thread(target=ask, args=(server, peer)) for peer in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(map(str, answers)) == ["a", "b"]


def test_on_close_tells_which_peer_went_even_while_its_handler_waits() -> None:
    gone = threading.Event()
    noticed = threading.Event()
    peers: list[str] = []

    def wait(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        while connection.is_open():
            gone.wait(0.01)
        noticed.set()
        return {}, None

    def on_close(connection: LanConnection) -> None:
        peers.append(connection.peer)
        gone.set()

    with _serving(wait, on_close=on_close) as server:
        client = LanClient(server.address, KEY, {"peer": "w7"})
        with pytest.raises(DeadlineExceededError, match="timeout_s"):
            client.request({}, timeout_s=0.2)
        with pytest.raises(LinkDownError, match="closed"):
            client.request({})
        assert noticed.wait(30) and gone.wait(30)
        client.close()
    assert peers == ["w7"]


def test_a_request_fails_when_the_server_closes() -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(connection: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        entered.set()
        release.wait(30)
        return {}, None

    server = LanServer("127.0.0.1", KEY, wait)
    client = LanClient(server.address, KEY, {"peer": "w"})
    failed: list[type[BaseException]] = []

    def ask() -> None:
        try:
            client.request({})
        except LinkDownError as error:
            failed.append(type(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(30)
    threading.Timer(0.05, release.set).start()
    server.close(30)
    thread.join(30)
    client.close()
    assert failed == [LinkDownError]


def test_another_key_is_refused_with_both_key_ids() -> None:
    with _serving() as server, pytest.raises(PeerRefusedError, match=r"key is '\w+', this side's"):
        LanClient(server.address, b"x" * 32, {"peer": "w"})


def test_garbage_and_oversize_close_only_their_own_connection() -> None:
    config = LanConfig(max_payload_bytes=1000)
    with _serving(config=config) as server:
        good = LanClient(server.address, KEY, {"peer": "good"}, config=config)
        for junk in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 500, b"GEOR\x01"):
            with socket.create_connection(server.address) as sock:
                sock.sendall(junk)
        with pytest.raises(FrameError, match="limit 1000"):
            good.request({}, bytes(1001))
        greedy = LanClient(server.address, KEY, {"peer": "greedy"})
        with pytest.raises(LinkDownError):
            greedy.request({}, bytes(100_000))
        greedy.close()
        assert good.request({"n": 1})[0]["n"] == 1
        good.close()


def test_undigested_payload_is_refused_by_a_server_that_wants_digests() -> None:
    with (
        _serving() as server,
        LanClient(
            server.address, KEY, {"peer": "w"}, config=LanConfig(digest_payload=False)
        ) as client,
        pytest.raises(LinkDownError),
    ):
        client.request({}, b"abc")


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(LinkDownError, match="no LAN server answers"):
        LanClient(address, KEY, {"peer": "w"}, connect_timeout_s=0.2)


def test_taken_port_is_a_typed_error() -> None:
    with _serving() as server, pytest.raises(PortInUseError):
        LanServer("127.0.0.1", KEY, _echo, port=server.address[1])


def test_close_leaves_no_thread_file_or_shared_memory() -> None:
    before = open_files()
    shm = set(Path("/dev/shm").glob("geo_ray-*"))
    for _ in range(3):
        with _serving() as server:
            clients = [
                LanClient(server.address, KEY, {"peer": str(n)}, shared_bytes=8192)
                for n in range(4)
            ]
            for client in clients:
                client.request({}, b"x" * 100)
            for client in clients:
                client.close()
    assert not open_files() - before
    assert set(Path("/dev/shm").glob("geo_ray-*")) <= shm
