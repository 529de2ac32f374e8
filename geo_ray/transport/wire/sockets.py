"""Plain TCP sockets with the settings that connections inside and between regions need.

`read_tcp_info` returns the kernel's counters of a socket: retransmissions, round trips and delivery
rate. Linux only (`struct tcp_info`, linux/tcp.h: the offset of a field never changes, new fields
are appended).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from geo_ray.base.errors import PortInUseError, TransportError

Address: TypeAlias = tuple[str, int]

_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_ANOTHER_S: Final = 1.0
_LOOK_S: Final = 0.1
_BACKLOG: Final = 1024
_IS_LINUX: Final = sys.platform.startswith("linux")
_TIMEVAL: Final = struct.Struct("ll")
_NOTSENT_LOWAT: Final = 25  # Linux's number; Python has a name for it from 3.12 on


def listen(host: str, port: int, buffer_bytes: int = 0) -> socket.socket:
    """Listen on ``host:port``; port 0 takes any free one.

    Raises:
        PortInUseError: another process has the port.
        TransportError: the host is not one of this machine.
    """
    sock = _bound(host, port, buffer_bytes)
    sock.listen(_BACKLOG)
    return sock


def reserve(host: str, port: int) -> socket.socket:
    """Take ``host:port`` without listening there, or any free port if another process has it.

    Connections are refused; to listen, close the socket and call `listen`.

    Raises:
        TransportError: the host is not one of this machine.
    """
    try:
        return _bound(host, port)
    except PortInUseError:
        return _bound(host, 0)


def _bound(host: str, port: int, buffer_bytes: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":  # every address of both families
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _set_buffers(sock, buffer_bytes)  # accepted sockets inherit them
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use") from error
        raise TransportError(
            f"cannot listen on {host}:{port}: {error}",
            fix="Listen on an address of this machine.",
        ) from error
    return sock


@dataclass(frozen=True, slots=True)
class SocketTarget:
    """One address that a name stands for.

    Attributes:
        family: of the address.
        address: what `socket.connect` takes.
    """

    family: int
    address: Any


def resolve(address: Address) -> list[SocketTarget]:
    """Return every address of a host's name, IPv6 or IPv4, in the system's order.

    Raises:
        OSError: the name is unknown.
    """
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [SocketTarget(family, where) for family, _, _, _, where in found]


def new_socket(target: SocketTarget, buffer_bytes: int = 0) -> socket.socket:
    """Return a socket that can be connected to ``target``."""
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    _set_buffers(sock, buffer_bytes)
    return sock


def connect_first(
    targets: list[SocketTarget],
    buffer_bytes: int,
    timeout_s: float,
    is_closed: Callable[[], bool] | None = None,
) -> socket.socket:
    """Return a blocking socket that is connected to the first target that answers.

    A request that an outage swallowed is repeated by the kernel after 1, 3, 7 and 15 s, so that a
    path that is back would go unnoticed for as long. Another one every second costs a packet.
    Earlier ones stay: the path may take longer than that.

    Args:
        targets: tried in turn, the next one at once when one refuses.
        buffer_bytes: see `new_socket`.
        timeout_s: in all.
        is_closed: called ten times per second; True gives up; None: never.

    Raises:
        OSError: no server answers there in time.
    """
    deadline_s = time.monotonic() + timeout_s
    left, next_s, code = list(targets), 0.0, errno.ETIMEDOUT
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        while (now_s := time.monotonic()) < deadline_s and not (is_closed and is_closed()):
            answers: list[tuple[socket.socket, SocketTarget, int]] = []
            if left and now_s >= next_s:
                target, next_s = left.pop(0), now_s + _ANOTHER_S
                left.append(target)
                sock = stack.enter_context(new_socket(target, buffer_bytes))
                sock.setblocking(False)
                said = sock.connect_ex(target.address)
                if said == errno.EINPROGRESS:
                    selector.register(sock, selectors.EVENT_WRITE, target)
                else:
                    answers.append((sock, target, said))
            elif not selector.get_map():
                break  # all have refused
            if not answers:
                for key, _ in selector.select(max(0.0, min(next_s - now_s, _LOOK_S))):
                    sock = cast("socket.socket", key.fileobj)
                    selector.unregister(sock)
                    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    answers.append((sock, key.data, said))
            for sock, target, said in answers:
                if not said:
                    return _connected(sock)
                code, next_s = said, now_s
                if target in left:
                    left.remove(target)
    raise OSError(code, os.strerror(code))


def _connected(sock: socket.socket) -> socket.socket:
    """Return a second handle on a connection, which blocks."""
    if sock.getsockname() == sock.getpeername():
        # This happens when a port without a listener is dialed often enough.
        raise ConnectionRefusedError("the kernel connected the socket to itself")
    sock.setblocking(True)
    return sock.dup()


def dial(address: Address, timeout_s: float) -> socket.socket:
    """A connected, blocking socket.

    Raises:
        OSError: no server answers there in time.
    """
    return connect_first(resolve(address)[:1], 0, timeout_s)


def has_one_address(sock: socket.socket) -> bool:
    """Whether both ends of a connection have the same address: then they are on one host."""
    own, peer = sock.getsockname(), sock.getpeername()
    return sock.family in {socket.AF_INET, socket.AF_INET6} and own[0] == peer[0]


def tune(sock: socket.socket, *, ack_timeout_s: float = 0.0, congestion: str = "") -> None:
    """Send small frames at once, notice a vanished host, and pick a congestion control.

    Args:
        sock: a connected socket.
        ack_timeout_s: the connection counts as lost if data is unacknowledged, or unread by the
            other end, for this long; 0 leaves that to the caller.
        congestion: name of the kernel's congestion control; unchanged if that is unknown.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", int(ack_timeout_s * 1000)),
    ):
        option = getattr(socket, name, None)  # not every system has them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if congestion and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def block(sock: socket.socket, timeout_s: float) -> None:
    """Let calls wait in the kernel, each for at most that long; then they raise `BlockingIOError`.

    With Python's own timeout, every call is preceded by another one that waits, and none waits for
    more than the first bytes, which costs processor time where payloads are large.
    """
    sock.settimeout(None)
    seconds, part_s = divmod(max(timeout_s, 1e-6), 1.0)
    value = _TIMEVAL.pack(int(seconds), int(part_s * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def limit_unsent(sock: socket.socket, size_bytes: int) -> None:
    """Let the kernel take data only while fewer bytes than that are unsent.

    Data queued in the kernel cannot be moved to another stream.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", _NOTSENT_LOWAT if _IS_LINUX else None)
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, size_bytes)


def hang_up(sock: socket.socket) -> None:
    """Wake every thread that waits on the socket; its owner closes the socket afterwards.

    Closing it here would free its number while another thread still reads from it.
    """
    with contextlib.suppress(OSError):
        # A TLS socket's own method forgets its state, which the other thread is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def stop_sending(sock: socket.socket) -> None:
    """Send the end of the stream to the other end; this end can still read."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)


def address_of(sock: socket.socket) -> Address:
    """The address that the socket is bound to."""
    host, port = sock.getsockname()[:2]
    return str(host), int(port)


def _set_buffers(sock: socket.socket, buffer_bytes: int) -> None:
    # A fixed size switches the kernel's own growing off, so only ask where it yields more.
    for option, grows_to, cap in (
        (socket.SO_RCVBUF, "ipv4/tcp_rmem", "core/rmem_max"),
        (socket.SO_SNDBUF, "ipv4/tcp_wmem", "core/wmem_max"),
    ):
        if min(buffer_bytes, _kernel_setting(cap)) > _kernel_setting(grows_to):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)


def _kernel_setting(name: str) -> int:
    try:
        return int(Path("/proc/sys/net", name).read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


_ASK_BYTES: Final = 512  # larger than the struct of any kernel
_NEEDED_BYTES: Final = 168  # up to tcpi_delivery_rate, Linux 4.9
_TIMEOUTS_BYTE: Final = 2
_RTT, _RTT_VAR, _CWND = 68, 72, 80
_TOTAL_RETRANS: Final = 100
_BYTES_ACKED: Final = 120
_MIN_RTT, _DATA_SEGS_OUT, _DELIVERY_RATE = 148, 156, 160
_DSACK_DUPS: Final = 216  # Linux 4.19
_APP_LIMITED_BYTE: Final = 7
_APP_LIMITED_BIT: Final = 0x01 if sys.byteorder == "little" else 0x80
_U32: Final = 2**32


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The counters of one socket since it was connected; they wrap at 2^32.

    Attributes:
        segments_out: data segments sent, retransmissions included.
        retransmitted: of these, those that were sent again.
        spurious: of these, those that the other end had got already; 0 where unknown.
        rtt_s: the kernel's smoothed round trip, None before the first.
        rtt_var_s: its mean deviation.
        rtt_min_s: the shortest one of late; None if unknown.
        delivery_rate_mbps: latest, in 10^6 bit/s; a lower bound if ``app_limited``.
        app_limited: the sender had too little to send for the rate to say much.
        bytes_acked: acknowledged by the other end's kernel.
        window_segments: congestion window.
        timeouts: retransmission timeouts in a row that brought no answer of the other end's kernel;
            the pause before the next one doubles each time.
    """

    segments_out: int
    retransmitted: int
    spurious: int
    rtt_s: float | None
    rtt_var_s: float | None
    rtt_min_s: float | None
    delivery_rate_mbps: float
    app_limited: bool
    bytes_acked: int
    window_segments: int
    timeouts: int = 0

    def segments_since(self, earlier: TcpInfo | None) -> tuple[int, int]:
        """Return segments sent and lost since an earlier reading of the socket, or since its start.

        Retransmissions that were not spurious count as lost. This is the path's loss as TCP saw it:
        an unneeded probe of a tail counts as lost until the other end reports it.
        """
        sent = self.segments_out - (earlier.segments_out if earlier else 0)
        again = self.retransmitted - (earlier.retransmitted if earlier else 0)
        needless = self.spurious - (earlier.spurious if earlier else 0)
        lost = again % _U32 - needless % _U32
        return sent % _U32, max(0, lost)


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Ask the kernel.

    Args:
        sock: a TCP socket, a TLS one included.

    Returns:
        None where the system has nothing like it, or the socket is closed.
    """
    if not sys.platform.startswith("linux") or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASK_BYTES))
    except OSError:
        return None


def parse(data: bytes) -> TcpInfo | None:
    """Read the kernel's struct; None if it lacks fields that are needed."""
    if len(data) < _NEEDED_BYTES:
        return None
    (cwnd,) = struct.unpack_from("=I", data, _CWND)
    (rate_bytes_s,) = struct.unpack_from("=Q", data, _DELIVERY_RATE)
    (bytes_acked,) = struct.unpack_from("=Q", data, _BYTES_ACKED)
    return TcpInfo(
        segments_out=_u32(data, _DATA_SEGS_OUT),
        retransmitted=_u32(data, _TOTAL_RETRANS),
        spurious=_u32(data, _DSACK_DUPS) if len(data) >= _DSACK_DUPS + 4 else 0,
        rtt_s=_seconds(_u32(data, _RTT)),
        rtt_var_s=_seconds(_u32(data, _RTT_VAR)) if _u32(data, _RTT) else None,
        rtt_min_s=_seconds(_u32(data, _MIN_RTT)),
        delivery_rate_mbps=rate_bytes_s * 8e-6,
        app_limited=bool(data[_APP_LIMITED_BYTE] & _APP_LIMITED_BIT),
        bytes_acked=bytes_acked,
        window_segments=cwnd,
        timeouts=data[_TIMEOUTS_BYTE],
    )


def _u32(data: bytes, offset: int) -> int:
    (value,) = struct.unpack_from("=I", data, offset)
    return int(value)


def _seconds(microseconds: int) -> float | None:
    """Return None for 0 and 2^32 - 1, which mean that there was no measurement yet."""
    return None if microseconds in (0, _U32 - 1) else microseconds * 1e-6
