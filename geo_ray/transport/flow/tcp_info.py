"""The kernel's counters of a TCP connection: retransmissions, round trips, delivery rate.

Linux only (`struct tcp_info`, linux/tcp.h; a field's place never changes, new ones are appended).
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

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
