"""Loss of a path by a train of UDP packets: numbered, paced, counted where they arrive.

The two ends agree on a token over an authenticated connection; packets without it do not count.
Only one end has to be reachable: the other opens the way through firewalls with a packet.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from geo_ray.errors import TransportError
from geo_ray.transport.flow.estimator import spread
from geo_ray.transport.wire.sockets import Address

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
    """What a train showed.

    Attributes:
        sent: packets.
        arrived: of these, each counted once; what this host dropped counts as arrived.
        loss: share that did not arrive.
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
        """Count what arrives of a train.

        Args:
            token: of the train.
            packets: how many are sent.
            timeout_s: longest time.
            is_over: whether the sender has finished; asked when nothing arrives.

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
        carried = min(packets, arrived + self._dropped - dropped_before)
        blocks = [seen[i * packets // _BLOCKS : (i + 1) * packets // _BLOCKS] for i in range(10)]
        losses = [1 - sum(block) / len(block) for block in blocks if block]
        return TrainResult(packets, carried, 1 - carried / packets, spread(losses) or 0.0)

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
