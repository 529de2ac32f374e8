"""Finds the address of an existing cluster, and whether a Ray head answers there.

``ray.init`` tries a dead address for minutes; these checks come first and take seconds.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

from geo_ray.errors import RayUnreachableError

# What a client of HTTP/2, and so of gRPC, says first: the preface and empty settings.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_FRAME = 4
_FRAME_HEADER_BYTES = 9


def find_address(configured: str) -> str:
    """Return host:port of the head.

    Args:
        configured: ``auto`` or host:port. ``auto`` is the job's own cluster, else RAY_ADDRESS, else
            the cluster that ``ray start`` has started on this machine.

    Raises:
        RayUnreachableError: if ``auto`` finds none, or the address has another form.
    """
    address = configured
    if configured == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
        address = _started_here() if address in ("", "auto", "local") else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise RayUnreachableError(
            f"'{address}' is no address of a Ray head",
            fix="Give the address as host:port of the head (default port 6379); "
            "ray:// and http:// addresses are for other clients.",
        )
    return address


def wait_for_ray(address: str, longest_s: float) -> None:
    """Return once a gRPC server, as a Ray head is one, answers at ``address``.

    Args:
        address: host:port.
        longest_s: how long to try; also the longest that this takes, name look-up aside.

    Raises:
        RayUnreachableError: if none does.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + longest_s
    while True:
        cause = _probe(host.strip("[]"), int(port), min(5.0, longest_s))
        if cause is None:
            return
        if time.monotonic() + 0.5 > deadline:
            raise RayUnreachableError(f"no Ray head answers at {address}: {cause}")
        time.sleep(0.5)


def _started_here() -> str:
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for path in (root / "ray" / "ray_current_cluster", Path("/tmp/ray/ray_current_cluster")):  # noqa: S108
        if path.is_file():
            return path.read_text().strip()
    raise RayUnreachableError(
        "the address is 'auto', but there is no Ray cluster: RAY_ADDRESS is not set and none "
        "was started on this machine",
        fix="Start one, or give the address of one as host:port: `cluster.address` of a "
        "configuration, `--address` of a command. A run can do without: `cluster.kind: local`.",
    )


def _probe(host: str, port: int, timeout_s: float) -> str | None:
    """Why no gRPC server answers, or None if one does."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("1", "true", "True"):
                return None  # an encrypted port says nothing before the handshake
            connection.sendall(_HTTP2_HELLO)
            header = b""
            while len(header) < _FRAME_HEADER_BYTES:
                read = connection.recv(_FRAME_HEADER_BYTES - len(header))
                if not read:
                    return "the port is open but whoever listens there hangs up"
                header += read
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return error.strerror or str(error)
    return None if header[3] == _SETTINGS_FRAME else "the port is open but it is not Ray's"
