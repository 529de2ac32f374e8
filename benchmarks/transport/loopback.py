"""Large messages between two endpoints over loopback, next to bare sockets with the same bytes.

Two processes. In each turn one sends a message, and the other one answers with a message of the
same size: with geo_ray, and over bare sockets, in an order that changes. Bare sockets move pieces
of 1 MiB, of one blocking thread each, into memory that is used again:

  plain  with a tag per piece (AES-GMAC), as the frames of geo_ray have them without TLS
  tls    the standard library's TLS sockets, with the contexts of geo_ray

  ratio      seconds of bare sockets over those of geo_ray, median over the turns after the first
  cpu ratio  the same of the processor seconds of both processes, which load changes less
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import socket
import ssl
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.common import support
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint, EndpointIdentity, Message
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.security.tls import TlsBytes, client_context, server_context
from geo_ray.transport.wire.frames import TAG_BYTES, PayloadSealer

MESSAGE_BYTES: Final = 250_000_000
_PIECE_BYTES: Final = 1024**2
_KEY: Final = bytes(32)
_HERE, _THERE = "here", "there"
KINDS: Final = ("bare plain", "geo_ray plain", "bare tls", "geo_ray tls")


def main() -> None:
    """Measure turns."""
    parser = support.parser(__doc__)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    machine = support.hardware()
    size_bytes, turns = (25_000_000, 3) if options.quick else (MESSAGE_BYTES, options.turns)
    found = measure(size_bytes, turns)
    support.say(json.dumps(found))
    figures = []
    for kind in KINDS:
        runs = [each[1:] for each in (found[kind]["wall"], found[kind]["cpu"])]
        figures.append(support.median(f"{kind}, s", runs[0], "s"))
        figures.append(support.median(f"{kind}, cpu s", runs[1], "s"))
    for bare, own in (("plain", "plain"), ("tls", "tls"), ("plain", "tls")):
        for what in ("wall", "cpu"):
            pairs = zip(
                found[f"bare {bare}"][what][1:], found[f"geo_ray {own}"][what][1:], strict=True
            )
            name = f"{what} ratio, bare {bare} / geo_ray {own}"
            figures.append(support.median(name, [a / b for a, b in pairs], "ratio"))
    machine["load_after"] = round(os.getloadavg()[0], 2)
    support.finish("transport.loopback", machine, figures, options.out)


def measure(size_bytes: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds and processor seconds of each turn, by kind."""
    authority = Authority.create("benchmark")
    certificates = {name: authority.issue(name) for name in (_HERE, _THERE)}
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=_answer, args=(certificates[_THERE], size_bytes, turns, other))
    child.start()
    ports = pipe.recv()
    ends = {
        "bare plain": _Bare(_dial(ports["bare plain"], None), size_bytes, tagged=True),
        "bare tls": _Bare(_dial(ports["bare tls"], certificates[_HERE]), size_bytes, tagged=False),
    }
    for mode, tls in (("plain", "off"), ("tls", "required")):
        end = _Own(_HERE, _THERE, certificates[_HERE], tls)
        end.endpoint.connect(_THERE, ("127.0.0.1", ports[f"geo_ray {mode}"]))
        end.endpoint.wait_connected([_THERE], 30)
        ends[f"geo_ray {mode}"] = end
    found = {kind: {"wall": [], "cpu": []} for kind in KINDS}
    payload = np.random.default_rng(0).integers(0, 255, size_bytes, np.uint8)
    for turn in range(turns):
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            pipe.send(kind)
            pipe.recv()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            ends[kind].send(payload)
            ends[kind].receive()
            lasted_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            found[kind]["wall"].append(lasted_s)
            found[kind]["cpu"].append(cpu_s + pipe.recv())
    pipe.send(None)
    for each in ends.values():
        each.close()
    child.join()
    return found


def _answer(certificate: TlsBytes, size_bytes: int, turns: int, pipe: Connection) -> None:
    listeners = {
        kind: socket.create_server(("127.0.0.1", 0)) for kind in ("bare plain", "bare tls")
    }
    ports = {kind: each.getsockname()[1] for kind, each in listeners.items()}
    ends: dict[str, Any] = {}
    for mode, tls in (("plain", "off"), ("tls", "required")):
        end = _Own(_THERE, _HERE, certificate, tls)
        ports[f"geo_ray {mode}"] = end.endpoint.listen()[1]
        ends[f"geo_ray {mode}"] = end
    pipe.send(ports)
    for kind, listener in listeners.items():
        sock = listener.accept()[0]
        if kind == "bare tls":
            sock = server_context(certificate).wrap_socket(sock, server_side=True)
        ends[kind] = _Bare(sock, size_bytes, tagged=kind == "bare plain")
        listener.close()
    payload = np.random.default_rng(1).integers(0, 255, size_bytes, np.uint8)
    while (kind := pipe.recv()) is not None:
        began_cpu_s = time.process_time()
        pipe.send("ready")
        ends[kind].receive()
        ends[kind].send(payload)
        ends[kind].flush()
        pipe.send(time.process_time() - began_cpu_s)
    for each in ends.values():
        each.close()


def _dial(port: int, certificate: TlsBytes | None) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    if certificate is None:
        return sock
    return client_context(certificate).wrap_socket(sock)


class _Own:
    """An endpoint of geo_ray."""

    def __init__(self, region: str, peer: str, certificate: TlsBytes, tls: Any) -> None:
        self._peer = peer
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        identity = EndpointIdentity("benchmark", region, 0, _KEY)
        self.endpoint = Endpoint(
            identity,
            lambda _, message: self._mail.put(message),
            TransportConfig(tls=tls),
            certificate=certificate,
        )

    def send(self, payload: np.ndarray) -> None:
        self.endpoint.send(self._peer, Message("model", {}, payload.data, "update"))

    def receive(self) -> None:
        self._mail.get()

    def flush(self) -> None:
        self.endpoint.flush(self._peer, 60)

    def close(self) -> None:
        self.endpoint.close()


@dataclass
class _Bare:
    """A socket."""

    sock: socket.socket
    size_bytes: int
    tagged: bool

    def __post_init__(self) -> None:
        self._room = memoryview(bytearray(self.size_bytes))
        self._flags = 0 if isinstance(self.sock, ssl.SSLSocket) else socket.MSG_WAITALL

    def send(self, payload: np.ndarray) -> None:
        view = payload.data
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.sock.sendall(piece)
            if self.tagged:
                self.sock.sendall(_tag(piece))

    def receive(self) -> None:
        tag = memoryview(bytearray(TAG_BYTES))
        for start in range(0, self.size_bytes, _PIECE_BYTES):
            piece = self._room[start : start + _PIECE_BYTES]
            self._fill(piece)
            if self.tagged:
                self._fill(tag)
                if _tag(piece) != tag:
                    raise RuntimeError("a piece was damaged")

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self.sock.recv_into(view, 0, self._flags) :]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.sock.close()


def _tag(piece: memoryview) -> bytes:
    sealer = PayloadSealer(bytes(16), _KEY)
    sealer.update(piece)
    return sealer.tag()


if __name__ == "__main__":
    main()
