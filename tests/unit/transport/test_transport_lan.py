from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    InvariantError,
    LinkDownError,
    NonFiniteError,
    PeerRefusedError,
    PortInUseError,
)
from geo_ray.transport import lan
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import Handler, LanClient, LanConnection, LanServer
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, encode, recv_frame
from tests.support.wan_support import open_files

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


@pytest.mark.parametrize(
    "config",
    [LanConfig(), LanConfig(digest_payload=False), LanConfig(encrypt_payload=True)],
    ids=lambda config: config.protection,
)
@pytest.mark.parametrize("size", [1, 1000, 3_000_001])
def test_payloads_both_ways(config: LanConfig, size: int) -> None:
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

    monkeypatch.setattr(lan.SharedBuffer, "proven", lambda _: False)
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


def test_on_close_names_the_peer_even_while_its_handler_waits() -> None:
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


@pytest.mark.parametrize(
    "config", [LanConfig(digest_payload=False), LanConfig(encrypt_payload=True)]
)
def test_a_peer_that_protects_payloads_otherwise_is_refused(config: LanConfig) -> None:
    with _serving() as server:
        with pytest.raises(PeerRefusedError, match=r"payloads is.*this side's 'authenticated'"):
            LanClient(server.address, KEY, {"peer": "w"}, config=config)
        with LanClient(server.address, KEY, {"peer": "w"}) as client:
            assert client.request({}, b"abc")[1] == b"abc"


class Wire:
    """A wire between a client and its server that a test can look at and change.

    Args:
        address: the server's.
        up: given the client's bytes as they come; returns what the server gets.
        down: the same for the server's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        up: Callable[[bytes], bytes] = bytes,
        down: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.seen = b""
        self._server = address
        self._changes = up, down
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Join the threads; the client must have gone."""
        self._thread.join(30)
        self._listener.close()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._server)
        up, down = self._changes
        with client, server:
            back = threading.Thread(target=self._pass, args=(server, client, down))
            back.start()
            self._pass(client, server, up)
            back.join(30)

    def _pass(
        self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen += piece
                target.sendall(change(piece))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _is_request(piece: bytes) -> bool:
    return piece[:4] == b"GEOR" and piece[5] == FrameKind.REQUEST


@pytest.mark.parametrize("config", [LanConfig(), LanConfig(digest_payload=False)])
def test_a_request_that_comes_twice_is_carried_out_once_and_ends_the_connection(
    config: LanConfig,
) -> None:
    ran: list[object] = []
    gone = threading.Event()

    def note(_: LanConnection, meta: Meta, __: memoryview | None) -> Answer:
        ran.append(meta["n"])
        return {"answer": meta["n"]}, None

    def twice(piece: bytes) -> bytes:
        return piece + piece if _is_request(piece) else piece

    with _serving(note, config=config, on_close=lambda _: gone.set()) as server:
        wire = Wire(server.address, twice)
        with LanClient(wire.address, KEY, {"peer": "w"}, config=config) as client:
            assert client.request({"n": 1})[0] == {"answer": 1}
            assert gone.wait(30)
            with pytest.raises(LinkDownError):
                client.request({"n": 2})
        wire.close()
    assert ran == [1]


def test_the_answer_to_another_request_is_refused() -> None:
    """The answer to request 0 comes once more, as if it were that to request 1."""
    held: list[bytes] = []

    def repeat(piece: bytes) -> bytes:
        if not (piece[:4] == b"GEOR" and piece[5] == FrameKind.RESPONSE):
            return piece
        held.append(piece)
        return held[0]

    with _serving() as server:
        wire = Wire(server.address, down=repeat)
        with LanClient(wire.address, KEY, {"peer": "w"}) as client:
            assert client.request({"n": 1})[0]["n"] == 1
            with pytest.raises(FrameError, match="digest"):
                client.request({"n": 2})
            with pytest.raises(LinkDownError, match="closed"):
                client.request({"n": 3})
        wire.close()
    assert len(held) == 2


@pytest.mark.parametrize("encrypt", [True, False])
def test_encrypted_payloads_cannot_be_read_on_the_wire_either_way(encrypt: bool) -> None:
    config = LanConfig(encrypt_payload=encrypt)
    secret = b"the weights of the model" * 50_000

    def twist(_: LanConnection, meta: Meta, payload: memoryview | None) -> Answer:
        assert payload is not None and payload == secret
        return {}, memoryview(secret[::-1])

    with _serving(twist, config=config) as server:
        wire = Wire(server.address)
        with LanClient(wire.address, KEY, {"peer": "w"}, config=config) as client:
            _, answer = client.request({}, secret)
            assert answer is not None and answer == secret[::-1]
        wire.close()
    for text in (secret[:24], secret[::-1][:24]):
        assert (text in wire.seen) is not encrypt


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_changed_payload_never_reaches_the_handler(encrypt: bool) -> None:
    config = LanConfig(encrypt_payload=encrypt)
    ran: list[Meta] = []

    def note(_: LanConnection, meta: Meta, __: memoryview | None) -> Answer:
        ran.append(meta)
        return {}, None

    def flip(piece: bytes) -> bytes:
        return piece[:-20] + bytes([piece[-20] ^ 1]) + piece[-19:] if _is_request(piece) else piece

    with _serving(note, config=config) as server:
        wire = Wire(server.address, flip)
        with (
            LanClient(wire.address, KEY, {"peer": "w"}, config=config) as client,
            pytest.raises(LinkDownError),
        ):
            client.request({}, bytes(1000))
        wire.close()
    assert ran == []


def test_an_older_release_is_refused_and_reads_that_it_is() -> None:
    with _serving() as server, socket.create_connection(server.address) as sock:
        sock.settimeout(30)
        hello = b"".join(encode(Frame(FrameKind.HELLO, {"service": "lan"}), b"geo_ray hello"))
        sock.sendall(hello[:4] + b"\x03" + hello[5:])
        refused = recv_frame(sock, b"geo_ray hello", FrameLimits())
        assert refused.kind is FrameKind.REFUSED
        assert "version 3, this side version 5" in str(refused.meta["reason"])


def test_an_answer_that_stops_in_the_middle_ends_at_the_timeout() -> None:
    left = 100_000

    def stop(piece: bytes) -> bytes:
        nonlocal left
        kept = piece[:left]
        left -= len(kept)
        return kept

    def answer(_: LanConnection, __: Meta, ___: memoryview | None) -> Answer:
        return {}, memoryview(bytes(3_000_000))

    with _serving(answer) as server:
        wire = Wire(server.address, down=stop)
        with (
            LanClient(wire.address, KEY, {"peer": "w"}) as client,
            pytest.raises(DeadlineExceededError, match="timeout_s"),
        ):
            client.request({}, timeout_s=0.3)
        wire.close()


def test_an_address_without_a_listener() -> None:
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
