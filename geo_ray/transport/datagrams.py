"""Encrypted datagrams between regions, and their pacing. Pure.

    version 1 | session 8 | number 8 | AES-256-GCM of the body, with a tag of 16

The first 17 bytes are authenticated as well. Both ends derive the key from the keys of their
connection and the session number; it is never sent. Numbers start at 1 and never repeat under one
key, so they serve as the nonce, and a `ReplayWindow` accepts each once. Body, big-endian:

    sent 8 | attempt 4 | seq 8 | first rank 4 | blocks 1 | bytes of a block 2
    number of each block 4 | blocks

`sent` is the sender's clock in microseconds. Ranks count an update's lossy blocks in send order.

`YieldingRate` yields to other traffic on the link: it falls when datagrams queue for longer than
`TARGET_QUEUE_S`, which is below the queue that connections aim at, or when losses exceed the
link's usual ones. While connections are idle it grows fast up to what the link has carried, then
slowly. Source: the idea of LEDBAT (RFC 6817), from one-way delays over their minimum.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geo_ray.base.errors import FrameError

MAX_DATAGRAM_BYTES: Final = 1400  # passes every usual path in one piece
TUNNEL_DATAGRAM_BYTES: Final = 1232
"""What every path passes in one piece: IPv6 promises 1,280 bytes, of which 48 are headers."""

SESSION_BYTES: Final = 8
KEY_BYTES: Final = 32
MOST_UNDER_ONE_KEY: Final = 2**23
"""Datagrams; some 10 GB, a third of what AES-GCM is good for."""
REPLAY_WINDOW: Final = 8192

_VERSION: Final = 1
_HEAD: Final = struct.Struct(f">B{SESSION_BYTES}sQ")
_BODY: Final = struct.Struct(">QIQIBH")
_TAG_BYTES: Final = 16
_ID: Final = struct.Struct(">I")
_OVERHEAD_BYTES: Final = _HEAD.size + _TAG_BYTES + _BODY.size


@dataclass(frozen=True, slots=True)
class Secret:
    """The name and key of a session, known to both of its ends.

    Attributes:
        session: number of the session; sent in the clear.
        key: key for AES-256.
    """

    session: bytes
    key: bytes = field(repr=False)

    @classmethod
    def derived(cls, session: bytes, link_key: bytes) -> Self:
        """Return the secret of a session.

        Args:
            session: number of the session, see `new_session`.
            link_key: what both ends derive from their connection for datagrams one way.
        """
        info = b"geo_ray datagrams" + session
        return cls(session, HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(link_key))


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Some blocks of one update, in one datagram.

    Attributes:
        attempt: attempt of the sender.
        seq: the update's number.
        first_rank: rank of the first block; the others follow in order.
        ids: positions of the blocks within the vector.
        blocks: their bytes, all of one length.
        sent_us: the sender's clock in microseconds when it was sent.
    """

    attempt: int
    seq: int
    first_rank: int
    ids: Sequence[int]
    blocks: Sequence[bytes | memoryview]
    sent_us: int = 0

    def pack(self, sent_us: int = 0) -> bytes:
        """Return the body of a datagram that is sent at ``sent_us``."""
        size = len(self.blocks[0])
        update = self.attempt, self.seq, self.first_rank
        fixed = _BODY.pack(sent_us, *update, len(self.ids), size)
        return b"".join([fixed, *map(_ID.pack, self.ids), *self.blocks])

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        """Read what `pack` wrote.

        Raises:
            FrameError: if the sizes do not fit.
        """
        if len(body) < _BODY.size:
            raise FrameError(f"a datagram's body has {len(body)} bytes")
        sent_us, attempt, seq, first_rank, count, size = _BODY.unpack_from(body)
        start = _BODY.size + _ID.size * count
        if count == 0 or size == 0 or len(body) != start + count * size:
            raise FrameError(f"a datagram of {count} blocks of {size} has {len(body)} bytes")
        ids = struct.unpack_from(f">{count}I", body, _BODY.size)
        view = memoryview(body)
        blocks = [view[start + i * size : start + (i + 1) * size] for i in range(count)]
        return cls(attempt, seq, first_rank, ids, blocks, sent_us)


def blocks_per_datagram(block_bytes: int) -> int:
    """Return how many blocks one datagram holds; 0 if a block is too large.

    A datagram with several blocks passes every tunnel; a single large block may need more.
    """
    each_bytes = block_bytes + _ID.size
    total = (TUNNEL_DATAGRAM_BYTES - _OVERHEAD_BYTES) // each_bytes
    is_single = each_bytes <= MAX_DATAGRAM_BYTES - _OVERHEAD_BYTES
    return min(255, max(total, int(is_single)))


def new_session() -> bytes:
    """Return the number of a new session."""
    return secrets.token_bytes(SESSION_BYTES)


class Sealer:
    """The sending end of a session; not locked.

    Args:
        secret: secret of the session.
    """

    def __init__(self, secret: Secret) -> None:
        self.number = 0
        self._session = secret.session
        self._cipher = AESGCM(secret.key)

    def seal(self, body: bytes) -> bytes:
        """Return the next datagram.

        Raises:
            FrameError: the datagram would be too long.
        """
        if len(body) > MAX_DATAGRAM_BYTES - _HEAD.size - _TAG_BYTES:
            raise FrameError(f"a body of {len(body)} bytes is too long for a datagram")
        self.number += 1
        head = _HEAD.pack(_VERSION, self._session, self.number)
        return head + self._cipher.encrypt(_nonce(self.number), body, head)


class Opener:
    """The receiving end of a session; not locked.

    Args:
        secret: secret of the session.

    Attributes:
        highest: highest number of an authentic datagram.
        received: count of authentic datagrams, each counted once.
        repeated: count of authentic datagrams that were refused as repeated or too old.
    """

    def __init__(self, secret: Secret) -> None:
        self.received = 0
        self.repeated = 0
        self._cipher = AESGCM(secret.key)
        self._window = ReplayWindow()

    @property
    def highest(self) -> int:
        """The highest number of an authentic datagram so far."""
        return self._window.highest

    def open(self, datagram: bytes) -> bytes | None:
        """Return the body if it is authentic and new; `session_of` has found this session."""
        head = datagram[: _HEAD.size]
        _, _, number = _HEAD.unpack(head)
        if number == 0 or not self._window.is_new(number):
            self.repeated += 1
            return None
        try:
            body = self._cipher.decrypt(_nonce(number), datagram[_HEAD.size :], head)
        except InvalidTag:
            return None
        self._window.add(number)
        self.received += 1
        return body


class ReplayWindow:
    """Accepts each number once, and no number that is far behind the highest.

    Attributes:
        highest: the highest number that was added.
    """

    def __init__(self, length: int = REPLAY_WINDOW) -> None:
        self.highest = 0
        self._length = length
        self._seen = 0  # bit i: highest - i was added

    def is_new(self, number: int) -> bool:
        """Whether ``number`` may be added."""
        behind = self.highest - number
        return behind < 0 or (behind < self._length and not self._seen >> behind & 1)

    def add(self, number: int) -> None:
        """Refuse ``number`` from now on; call only after `is_new`."""
        ahead = number - self.highest
        if ahead > 0:
            self._seen = 1 if ahead >= self._length else self._cut(self._seen << ahead) | 1
            self.highest = number
        else:
            self._seen |= 1 << -ahead

    def _cut(self, bits: int) -> int:
        return bits & ((1 << self._length) - 1)


def session_of(datagram: bytes) -> bytes | None:
    """Return the session that a datagram names; None if it is too short or of another version."""
    if not _HEAD.size + _TAG_BYTES < len(datagram) <= MAX_DATAGRAM_BYTES:
        return None
    version, session, _ = _HEAD.unpack_from(datagram)
    return bytes(session) if version == _VERSION else None


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


TARGET_QUEUE_S: Final = 0.006
REPORT_S: Final = 0.1
"""How often a receiver reports while datagrams arrive."""

_BURST_S: Final = 0.004  # the shortest sleep that the system keeps to
_LEAST_BURST_BYTES: Final = 2 * 1400
_ROUNDING_BYTES: Final = 0.5  # else the time to wait could round to zero
_LOWEST_MBPS: Final = 0.2
_HIGHEST_MBPS: Final = 10_000.0
_GROW: Final = 1.5  # with an empty queue; half a queue grows half as much
_GROW_SLOWLY: Final = 1.08
_KNOWN: Final = 0.8  # the rate may grow fast up to this share of what the link carried
_OVERSHOT: Final = 0.9  # of the rate at which datagrams began to wait
_FADING: Final = 0.95  # of what was carried, if now it is less
_SHRINK: Final = 0.7
_EXTRA_LOSS: Final = 0.05  # above what the link always loses
_ENOUGH: Final = 50  # fewest datagrams from which a share of lost ones is computed
_MEMORY_S: Final = 30.0  # after which the least delay and loss are forgotten
_IN_USE: Final = 0.6  # share of the rate that must have been used before a good report raises it


@dataclass(frozen=True, slots=True)
class Seen:
    """A receiver's report on the datagrams of a session.

    Attributes:
        highest: number of the newest datagram.
        received: how many datagrams have arrived.
        delay_s: shortest delay since the last report, measured with two clocks that need not agree.
    """

    highest: int
    received: int
    delay_s: float


class TokenBucket:
    """Lets bytes pass at a rate, with a burst of a few milliseconds' worth after a pause.

    Args:
        rate_mbps: the rate in 10^6 bit/s.
    """

    def __init__(self, rate_mbps: float) -> None:
        self._rate_mbps = rate_mbps
        self._tokens_bytes = float(_LEAST_BURST_BYTES)
        self._at_s: float | None = None

    def set_rate(self, now_s: float, rate_mbps: float) -> None:
        """Continue at another rate."""
        self._fill(now_s)
        self._rate_mbps = rate_mbps

    def take(self, now_s: float, size_bytes: int) -> float:
        """Take tokens for a datagram if there are enough.

        Returns:
            0 if the datagram may leave now; otherwise the seconds to wait, and nothing was taken.
        """
        self._fill(now_s)
        missing_bytes = min(size_bytes, _LEAST_BURST_BYTES) - self._tokens_bytes
        if missing_bytes > _ROUNDING_BYTES:
            return missing_bytes * 8e-6 / self._rate_mbps
        self._tokens_bytes -= size_bytes
        return 0.0

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        bytes_per_s = self._rate_mbps / 8e-6
        most_bytes = max(_LEAST_BURST_BYTES, _BURST_S * bytes_per_s)
        self._tokens_bytes = min(most_bytes, self._tokens_bytes + passed_s * bytes_per_s)


class YieldingRate:
    """A rate that falls when datagrams queue or get lost; see the module's docstring.

    Args:
        start_mbps: first rate.
        most_mbps: upper bound of the rate; None for no bound.

    Attributes:
        mbps: the present rate.
        loss: share of datagrams lost recently; None if too few were sent to tell.
    """

    def __init__(self, start_mbps: float, most_mbps: float | None = None) -> None:
        self._most_mbps = _HIGHEST_MBPS if most_mbps is None else most_mbps
        self.mbps = self._within(start_mbps)
        self.loss: float | None = None
        self._last = Seen(0, 0, 0.0)
        self._sent_bytes = 0
        self._achieved_mbps: float | None = None  # before datagrams began to wait
        self._changed_s: float | None = None
        self._delays_s = _Least(_MEMORY_S)
        self._losses = _Least(_MEMORY_S)

    def on_sent(self, size_bytes: int) -> None:
        """Count a datagram that has left."""
        self._sent_bytes += size_bytes

    def on_seen(self, now_s: float, seen: Seen) -> None:
        """Adapt the rate to a receiver's report."""
        self._delays_s.add(now_s, seen.delay_s)
        queue_s = seen.delay_s - self._delays_s.value
        sent = seen.highest - self._last.highest
        crowded = queue_s > TARGET_QUEUE_S
        if sent >= _ENOUGH:
            got = seen.received - self._last.received
            self.loss = min(1.0, max(0.0, 1.0 - got / sent))
            self._losses.add(now_s, self.loss)
            self._last = seen
            crowded |= self.loss > self._losses.value + _EXTRA_LOSS
        before_s, self._changed_s = self._changed_s, now_s
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        if crowded:
            faded_mbps = _FADING * (self._achieved_mbps or 0.0)
            self._achieved_mbps = max(_OVERSHOT * self.mbps, faded_mbps)
            self.mbps = self._within(self.mbps * _SHRINK)
        elif before_s is not None:
            passed_s = min(max(now_s - before_s, 1e-3), 2 * REPORT_S)
            if sent_bytes * 8e-6 / passed_s >= _IN_USE * self.mbps:
                headroom = 1.0 - max(0.0, queue_s) / TARGET_QUEUE_S
                achieved_mbps = self._achieved_mbps
                is_known = achieved_mbps is None or self.mbps < _KNOWN * achieved_mbps
                gain = (_GROW if is_known else _GROW_SLOWLY) - 1.0
                self.mbps = self._within(self.mbps * (1.0 + gain * headroom))

    def _within(self, mbps: float) -> float:
        return min(self._most_mbps, max(_LOWEST_MBPS, mbps))


class _Least:
    """The least value of the last ``memory_s`` seconds; the newest value always counts."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._extremes: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        while self._extremes and self._extremes[-1][1] >= value:
            self._extremes.pop()
        self._extremes.append((now_s, value))
        while now_s - self._extremes[0][0] > self._memory_s:
            self._extremes.popleft()

    @property
    def value(self) -> float:
        return self._extremes[0][1]
