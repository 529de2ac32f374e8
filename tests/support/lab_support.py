"""Helpers of tests in a real WAN lab: sockets inside regions, and the requirements of a lab."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from geo_ray.lab import lab as requirements
from geo_ray.lab.lab import Lab

needs_lab = pytest.mark.skipif(
    requirements.missing_requirements() is not None, reason=str(requirements.missing_requirements())
)

WAIT_S = 240.0  # never reached


def udp_socket(
    lab: Lab, region: str, port: int = 0, *, family: int = socket.AF_INET
) -> socket.socket:
    """A UDP socket inside a region, bound to its address."""
    addresses = lab.addresses if family == socket.AF_INET else lab.addresses6

    def make() -> socket.socket:
        made = socket.socket(family, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        made.bind((addresses[region], port))
        made.settimeout(WAIT_S)
        return made

    return lab.inside(region, make)


def until(done: Callable[[], bool]) -> None:
    """Wait for something that will come; fails after `WAIT_S`."""
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.005)


def tcp_pair(
    lab: Lab, src: str, dst: str, *, family: int = socket.AF_INET
) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from one region to another: (its near end, its far end)."""
    address = (lab.addresses if family == socket.AF_INET else lab.addresses6)[dst]

    def listen() -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen()
        return listener

    with lab.inside(dst, listen) as listener:
        near = lab.inside(
            src, lambda: socket.create_connection(listener.getsockname()[:2], timeout=WAIT_S)
        )
        far, _ = listener.accept()
    far.settimeout(WAIT_S)
    return near, far
