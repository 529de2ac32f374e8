"""One end of a link in the WAN lab: a process that `wan.py` starts inside a region's namespace.

Reads one JSON object per line from its standard input and answers with one. The first line says
who it is; keys come that way and not as arguments, which others could read.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import socket
import sys
import threading
import time
from typing import Any

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.security.tls import TlsBytes
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message

SAMPLE_S = 0.004
BLOCK = os.urandom(1 << 20)  # not compressible, by whatever lies on the way


class Node:
    """An endpoint that says when a message arrived, and can send one back."""

    def __init__(self, hello: dict[str, Any]) -> None:
        pem = [base64.b64decode(text) for text in hello["certificate"]]
        identity = EndpointIdentity("bench", hello["region"], 1, base64.b64decode(hello["key"]))
        config = TransportConfig.model_validate_json(json.dumps(hello["config"]))
        self.endpoint = Endpoint(identity, self.on_message, config, certificate=TlsBytes(*pem))
        self.peer: str = hello["peer"]
        self.port: int = hello["port"]
        self.arrived: list[float] = []
        self.changed = threading.Condition()

    def on_message(self, peer: str, message: Message) -> None:
        """Answer data with the time at which it was here."""
        at_s = time.monotonic()  # the same clock in every process of the machine
        if message.kind == "data":
            self.endpoint.send(peer, Message("got", {"at_s": at_s}, b"", "control", CONTROL))
            return
        with self.changed:
            self.arrived.append(float(str(message.meta["at_s"])))
            self.changed.notify_all()

    def listen(self, host: str) -> dict[str, Any]:
        """Take connections."""
        self.endpoint.listen(host, self.port)
        return {}

    def connect(self, host: str) -> dict[str, Any]:
        """Connect to the other node."""
        self.endpoint.connect(self.peer, (host, self.port))
        self.endpoint.wait_connected([self.peer], 60.0)
        return {}

    def send(self, size_bytes: int, count: int, pause_s: float) -> dict[str, Any]:
        """Send messages one after the other; how long each took, and what it cost."""
        payload = (BLOCK * (size_bytes // len(BLOCK) + 1))[:size_bytes]
        times_s, rtts_s, arrived_s = [], [], []
        before = cpu_s()
        began_s = time.monotonic()
        for _ in range(count):
            done = threading.Event()
            watcher = threading.Thread(target=self.watch, args=(done, rtts_s))
            with self.changed:
                self.arrived.clear()
            sent_s = time.monotonic()
            watcher.start()
            self.endpoint.send(self.peer, Message("data", {}, payload, "update"), 60.0)
            with self.changed:
                self.changed.wait_for(lambda: self.arrived, 600.0)
                times_s.append(self.arrived[0] - sent_s)
                arrived_s.append(self.arrived[0])
            done.set()
            watcher.join()
            time.sleep(pause_s)
        lasted_s = time.monotonic() - began_s
        stats = self.endpoint.stats()[self.peer]
        return {
            "times_s": times_s,
            "arrived_s": arrived_s,
            "rtts_s": rtts_s,
            "cores": (cpu_s() - before) / lasted_s,
            "streams": stats["streams"],
            "encrypted": stats["encrypted"],
            "rtt_min_s": stats["rtt_min_s"],
            "resend_bytes": stats["bytes_sent"].get("resend", 0),
            "reconnects": stats["reconnects"],
        }

    def watch(self, done: threading.Event, rtts_s: list[float]) -> None:
        """Note every heartbeat that comes back meanwhile."""
        last = self.endpoint.stats()[self.peer]["rtt_s"]
        while not done.wait(SAMPLE_S):
            rtt_s = self.endpoint.stats()[self.peer]["rtt_s"]
            if rtt_s is not None and rtt_s != last:
                rtts_s.append(rtt_s)
                last = rtt_s

    def stop(self) -> dict[str, Any]:
        """Close everything."""
        self.endpoint.close(1.0)
        return {}


class Plain:
    """One TCP stream without anything of ours, for comparison."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.port: int = hello["port"]
        self.sock: socket.socket | None = None

    def listen(self, host: str) -> dict[str, Any]:
        """Take connections."""
        listener = socket.create_server((host, self.port))
        threading.Thread(target=self.drain, args=(listener,), daemon=True).start()
        return {}

    def drain(self, listener: socket.socket) -> None:
        """Read all, and answer each mark with the time and the bytes before it."""
        sock, _ = listener.accept()
        room = bytearray(1 << 20)
        total = 0
        while count := sock.recv_into(room):
            total += count
            if room[count - 1] == 0xFF:  # the mark of the end
                sock.sendall(json.dumps([time.monotonic(), total]).encode().ljust(64))
                total = 0

    def connect(self, host: str) -> dict[str, Any]:
        """Connect to the other node."""
        self.sock = socket.create_connection((host, self.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    def send(self, size_bytes: int, count: int, longest_s: float) -> dict[str, Any]:
        """Send messages, each for at most so long; the bytes that arrived per second."""
        assert self.sock is not None
        block = bytes(1 << 16)
        rates = []
        for _ in range(count):
            began_s = time.monotonic()
            sent = 0
            while sent < size_bytes and time.monotonic() - began_s < longest_s:
                self.sock.sendall(block)
                sent += len(block)
            self.sock.sendall(b"\xff")
            at_s, total = json.loads(self.sock.recv(64))
            rates.append(total / (at_s - began_s))
        return {"bytes_per_s": rates}

    def stop(self) -> dict[str, Any]:
        """Close everything."""
        if self.sock is not None:
            self.sock.close()
        return {}


def cpu_s() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    node: Any = Plain(hello) if hello["kind"] == "plain" else Node(hello)
    for line in sys.stdin:
        order = json.loads(line)
        verb = order.pop("do")
        print(json.dumps(getattr(node, verb)(**order)), flush=True)
        if verb == "stop":
            return


if __name__ == "__main__":
    main()
