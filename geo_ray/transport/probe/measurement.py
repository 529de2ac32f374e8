"""Measurement methods of a probe: the filling transfer, and UDP packet trains.

The send window and arrival log of a transfer are pure. A train measures loss: packets are
numbered, paced and counted where they arrive. Both ends agree on a token over an authenticated
connection; packets without it do not count. Only one end must be reachable: the other opens the
path through firewalls with a packet.
"""

from __future__ import annotations

import hmac
import math
import secrets
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from geo_ray.base.errors import TransportError
from geo_ray.transport.links import spread
from geo_ray.transport.wire.sockets import Address

MAX_CHUNK_BYTES: Final = 4 * 1024**2
_MIN_CHUNK_BYTES: Final = 8 * 1024
_FIRST_CHUNK_BYTES: Final = 16 * 1024
_MAX_MESSAGES: Final = 48  # an outbox takes 64
_MAX_AHEAD_BYTES: Final = 64 * 1024**2  # what the receiver may have to hold
_AHEAD_S: Final = 0.5  # this and the next bound the time that the rest takes at the end
_AHEAD_RTTS: Final = 6  # a lost packet may delay what follows for that long
_SLICES: Final = 20
_MAX_ARRIVALS: Final = 200_000


class SendWindow:
    """The bytes that a probing sender keeps under way: enough for the link, few enough to end soon.

    It grows: after each round trip it allows more than twice of what arrived in it.

    Args:
        rtt_s: the idle link's.
    """

    def __init__(self, rtt_s: float) -> None:
        self._rtt_s = rtt_s
        self._ahead_s = _AHEAD_S + _AHEAD_RTTS * rtt_s
        self._seen: deque[tuple[float, int]] = deque()
        self._sizes: deque[int] = deque()
        self._sent_bytes = 0
        self._got_bytes = 0
        self.rate_mbps: float | None = None

    @property
    def chunk_bytes(self) -> int:
        """Return the size of the next message."""
        if self.rate_mbps is None:
            return _FIRST_CHUNK_BYTES
        wanted = int(self.rate_mbps * 125_000 * self._ahead_s / (_MAX_MESSAGES - 8))
        return max(_MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, wanted))

    def has_capacity(self) -> bool:
        """Return whether the next message may be sent now."""
        if len(self._sizes) >= _MAX_MESSAGES:
            return False
        rate_mbps = self.rate_mbps or 0.0
        wanted = min(_MAX_AHEAD_BYTES, int(rate_mbps * 125_000 * self._ahead_s))
        window_bytes = max(4 * self.chunk_bytes, wanted)
        return self._sent_bytes - self._got_bytes < window_bytes

    def sent(self, size_bytes: int) -> None:
        """Count a message that was handed to the transport."""
        self._sent_bytes += size_bytes
        self._sizes.append(size_bytes)

    def arrived(self, now_s: float, got_bytes: int) -> None:
        """Record the receiver's report of ``got_bytes`` in total."""
        if not self._got_bytes < got_bytes <= self._sent_bytes:
            return  # nothing new, or an impossible report
        done = got_bytes - self._got_bytes
        while self._sizes and done >= self._sizes[0]:
            done -= self._sizes.popleft()
        self._got_bytes = got_bytes - done
        self._seen.append((now_s, self._got_bytes))
        span_s = max(0.2, self._rtt_s)
        while len(self._seen) > 2 and now_s - self._seen[1][0] > span_s:
            self._seen.popleft()
        first_s, first_bytes = self._seen[0]
        if len(self._seen) > 1:
            # Two reports that were delayed together arrive at the same moment.
            passed_s = max(now_s - first_s, span_s / 2)
            self.rate_mbps = (self._got_bytes - first_bytes) * 8e-6 / passed_s


@dataclass(frozen=True, slots=True)
class Arrived:
    """A receiver's measurement.

    Attributes:
        goodput_mbps: payload that arrived after the ramp over the time that it took.
        goodput_mad_mbps: median absolute deviation of equal slices of time.
        samples: how many slices.
        size_bytes: payload that counts.
        seconds: time that counts.
    """

    goodput_mbps: float
    goodput_mad_mbps: float
    samples: int
    size_bytes: int
    seconds: float


class ArrivalLog:
    """Arrivals over time by the receiver's clock alone, so that clocks need not agree.

    Args:
        ramp_s: seconds after the first arrival that do not count, while TCP finds its rate.
    """

    def __init__(self, ramp_s: float) -> None:
        self._ramp_s = ramp_s
        self._arrivals: list[tuple[float, int]] = []
        self.got_bytes = 0

    def add(self, now_s: float, size_bytes: int) -> None:
        """Record a complete message."""
        self.got_bytes += size_bytes
        if len(self._arrivals) < _MAX_ARRIVALS:
            self._arrivals.append((now_s, size_bytes))
        else:
            last = self._arrivals[-1][1]
            self._arrivals[-1] = (now_s, last + size_bytes)

    def result(self) -> Arrived | None:
        """Return the result; None if too little arrived to compute a rate.

        If nothing arrived after the ramp, because the link is slower than expected, all but the
        first arrival count.
        """
        if not self._arrivals:
            return None
        counted_from_s = self._arrivals[0][0] + self._ramp_s
        counted = [one for one in self._arrivals if one[0] >= counted_from_s]
        if len(counted) < 3:
            counted = self._arrivals
        began_s, ended_s = counted[0][0], counted[-1][0]
        if len(counted) < 2 or ended_s <= began_s:
            return None
        size_bytes = sum(size for _, size in counted[1:])
        rates = _slice_rates(counted, (ended_s - began_s) / _SLICES)
        return Arrived(
            goodput_mbps=size_bytes * 8e-6 / (ended_s - began_s),
            goodput_mad_mbps=spread(rates) or 0.0,
            samples=max(1, len(rates)),
            size_bytes=size_bytes,
            seconds=ended_s - began_s,
        )


def _slice_rates(arrivals: Sequence[tuple[float, int]], slice_s: float) -> list[float]:
    rates = []
    began_s, size_bytes = arrivals[0][0], 0
    for at_s, size in arrivals[1:]:
        size_bytes += size
        if at_s - began_s >= slice_s:
            rates.append(size_bytes * 8e-6 / (at_s - began_s))
            began_s, size_bytes = at_s, 0
    return rates


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that ``fraction`` of the (non-empty) values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


PACKET_BYTES: Final = 1200  # passes every path without fragments
TOKEN_BYTES: Final = 16
MAX_PACKETS: Final = 20_000
_MAX_PACKETS_S: Final = 3_000  # rate that a busy Python process can still count
_RXQ_OVFL: Final = 40 if sys.platform.startswith("linux") else None  # SO_RXQ_OVFL
_HEAD: Final = struct.Struct("!16sI")
_OPEN: Final = 0xFFFFFFFF  # packet number that marks packets which only open the way
_TICK_S: Final = 0.005
_BLOCKS: Final = 10
_BUFFER_BYTES: Final = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a train.

    Attributes:
        sent: packets.
        arrived: of these, each counted once; what this host dropped counts as arrived.
        loss: fraction that did not arrive.
        loss_mad: median absolute deviation of the loss in ten parts of the train.
    """

    sent: int
    arrived: int
    loss: float
    loss_mad: float


def new_token() -> bytes:
    """Make a token that names a train and proves that a packet belongs to it."""
    return secrets.token_bytes(TOKEN_BYTES)


def packets_for(goodput_mbps: float, seconds: float) -> int:
    """Return how many packets to send: half of the link's rate, so that loss is the path's own."""
    packets_s = min(_MAX_PACKETS_S, goodput_mbps * 0.5e6 / 8 / PACKET_BYTES)
    return max(20, min(MAX_PACKETS, int(packets_s * seconds)))


class UdpPort:
    """One end's UDP socket.

    Args:
        host: address to bind.
        port: port to bind; any free one if it is taken, or 0.

    Raises:
        TransportError: no port can be bound.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._dropped = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            if _RXQ_OVFL is not None:
                self._sock.setsockopt(socket.SOL_SOCKET, _RXQ_OVFL, 1)
            try:
                self._sock.bind((host, port))
            except OSError:
                self._sock.bind((host, 0))
        except OSError as error:
            self._sock.close()
            raise TransportError(f"no UDP port on {host}: {error}") from error

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Free the port."""
        self._sock.close()

    def open_way(self, to: Address, token: bytes) -> None:
        """Make address translators and firewalls on this side accept packets from ``to``."""
        self._send(_HEAD.pack(token, _OPEN), to)

    def wait_opened(self, token: bytes, timeout_s: float) -> Address | None:
        """Return where the other end's opening packet came from; None if none came in time."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            found = self._receive(token, left_s)
            if found is not None and found[0] == _OPEN:
                return found[1]
        return None

    def send_train(self, to: Address, token: bytes, packets: int, seconds: float) -> None:
        """Send numbered packets evenly over ``seconds``, catching up after delays."""
        padding = bytes(PACKET_BYTES - _HEAD.size)
        began_s = time.monotonic()
        number = 0
        while number < packets:
            due = min(packets, int((time.monotonic() - began_s) / seconds * packets) + 1)
            while number < due:
                self._send(_HEAD.pack(token, number) + padding, to)
                number += 1
            time.sleep(_TICK_S)

    def count_train(
        self, token: bytes, packets: int, timeout_s: float, is_over: Callable[[], bool]
    ) -> TrainResult | None:
        """Count the arriving packets of a train.

        Args:
            token: of the train.
            packets: how many are sent.
            timeout_s: longest time.
            is_over: whether the sender has finished; called when nothing arrives.

        Returns:
            The result; None if nothing arrived, since then UDP is blocked and loss is not known.
        """
        seen = bytearray(packets)
        arrived = 0
        dropped_before = self._dropped
        deadline_s = time.monotonic() + timeout_s
        over = False
        while (left_s := deadline_s - time.monotonic()) > 0 and arrived < packets:
            found = self._receive(token, min(left_s, 0.2))
            if found is None:
                if over:
                    break
                over = is_over()  # one more turn of the loop for packets still on their way
            elif found[0] < packets and not seen[found[0]]:
                seen[found[0]] = 1
                arrived += 1
        if not arrived:
            return None
        # Packets that this host's kernel dropped are not the path's loss.
        achieved = min(packets, arrived + self._dropped - dropped_before)
        blocks = [seen[i * packets // _BLOCKS : (i + 1) * packets // _BLOCKS] for i in range(10)]
        losses = [1 - sum(block) / len(block) for block in blocks if block]
        return TrainResult(packets, achieved, 1 - achieved / packets, spread(losses) or 0.0)

    def _receive(self, token: bytes, timeout_s: float) -> tuple[int, Address] | None:
        ready, _, _ = select.select([self._sock], [], [], timeout_s)
        if not ready:
            return None
        try:
            data, extra, _, source = self._sock.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(4))
        except OSError:  # an ICMP error of something that was sent
            return None
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, _RXQ_OVFL) and len(value) >= 4:
                self._dropped = struct.unpack("=I", value[:4])[0]
        if len(data) not in (_HEAD.size, PACKET_BYTES):
            return None
        theirs, number = _HEAD.unpack_from(data)
        if not hmac.compare_digest(theirs, token):
            return None
        return int(number), (str(source[0]), int(source[1]))

    def _send(self, data: bytes, to: Address) -> None:
        try:
            self._sock.sendto(data, to)
        except OSError:  # a full queue or no route: it counts as lost
            return
