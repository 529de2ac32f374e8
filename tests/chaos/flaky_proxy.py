"""A TCP proxy that damages, cuts, stalls or refuses what goes through it, for tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

# (which connection, direction 0 = to the target, offset of the piece, the piece) -> the piece as
# it is passed on, or None to cut the connection
Alter = Callable[[int, int, int, bytes], bytes | None]


class FlakyProxy:
    """Listens on ``address`` and passes everything on to ``target``, through ``alter``."""

    def __init__(self, target: tuple[str, int], alter: Alter = lambda *args: args[3]) -> None:
        self.alter = alter
        self.refusing = False
        self.accepted = 0
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def cut(self) -> None:
        """End every connection that is there."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for sock in pair:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Swallow nothing and pass nothing on, like a route that vanished."""
        self._flowing.clear()

    def resume(self) -> None:
        """Pass on what waited."""
        self._flowing.set()

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for sock in pair:
                sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing or self._closed:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            index = self.accepted
            self.accepted += 1
            with self._lock:
                self._pairs.append((client, server))
            for direction, (source, sink) in enumerate(((client, server), (server, client))):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._pump, args=(index, direction, source, sink))
                self._threads.append(thread)
                thread.start()

    def _pump(self, index: int, direction: int, source: socket.socket, sink: socket.socket) -> None:
        offset = 0
        with suppress(OSError):
            while piece := source.recv(65536):
                self._flowing.wait()
                altered = self.alter(index, direction, offset, piece)
                if altered is None:
                    break
                offset += len(piece)
                sink.sendall(altered)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
