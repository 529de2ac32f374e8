"""What proxies for tests share: they listen, connect on, pump both ways, and leave nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Pump = Callable[[int, int, socket.socket, socket.socket], None]
"""Takes (which connection, direction 0 = to the target, source, sink) until the source ends."""


class Relay:
    """Connects whoever comes to ``address`` with ``target``.

    Args:
        target: where to.
        pump: called in a thread of its own for each direction of each connection.
        admits: whether to take one more, given how many were taken.
    """

    def __init__(
        self, target: tuple[str, int], pump: Pump, admits: Callable[[int], bool] = lambda _: True
    ) -> None:
        self.accepted = 0
        self._target = target
        self._pump = pump
        self._admits = admits
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def cut(self) -> None:
        """End every connection that is there."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything; pumps must come back once their sockets are shut."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._closed or not self._admits(self.accepted):
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            index, self.accepted = self.accepted, self.accepted + 1
            with self._lock:
                self._sockets += [client, server]
            for direction, (source, sink) in enumerate(((client, server), (server, client))):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pump = threading.Thread(target=self._pump, args=(index, direction, source, sink))
                self._threads.append(pump)
                pump.start()
