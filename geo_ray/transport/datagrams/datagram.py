"""Datagrams between regions, encrypted so that no third party can forge, read or replay one. Pure.

    version 1 | session 8 | number 8 | AES-256-GCM of the body, with a tag of 16

The first 17 bytes are authenticated, too. The key is derived by both ends from the keys of their
connection and the session's number; it is never sent. Numbers begin at 1 and never repeat under
one key, so they serve as the nonce. A `ReplayWindow` accepts each number once, in any order within
its length.

The body is a few blocks of one update:

    sent 8 | epoch 4 | seq 8 | first rank 4 | blocks 1 | bytes of a block 2
    number of each block 4 | blocks

Integers are big-endian. `sent` is the sender's clock in microseconds, from which the receiver tells
how long a datagram took compared with others. Ranks count the update's lossy blocks in the order of
their sending.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geo_ray.errors import FrameError

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
        epoch: epoch of the sender.
        seq: the update's number.
        first_rank: rank of the first block; the others follow in order.
        ids: positions of the blocks within the vector.
        blocks: their bytes, all of one length.
        sent_us: the sender's clock in microseconds when it was sent.
    """

    epoch: int
    seq: int
    first_rank: int
    ids: Sequence[int]
    blocks: Sequence[bytes | memoryview]
    sent_us: int = 0

    def pack(self, sent_us: int = 0) -> bytes:
        """Return the body of a datagram that is sent at ``sent_us``."""
        size = len(self.blocks[0])
        update = self.epoch, self.seq, self.first_rank
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
        sent_us, epoch, seq, first_rank, count, size = _BODY.unpack_from(body)
        start = _BODY.size + _ID.size * count
        if count == 0 or size == 0 or len(body) != start + count * size:
            raise FrameError(f"a datagram of {count} blocks of {size} has {len(body)} bytes")
        ids = struct.unpack_from(f">{count}I", body, _BODY.size)
        view = memoryview(body)
        blocks = [view[start + i * size : start + (i + 1) * size] for i in range(count)]
        return cls(epoch, seq, first_rank, ids, blocks, sent_us)


def blocks_per_datagram(block_bytes: int) -> int:
    """Return how many blocks one datagram holds; 0 if a block is too large.

    A datagram with several blocks passes every tunnel; a single large block may need more.
    """
    each_bytes = block_bytes + _ID.size
    together = (TUNNEL_DATAGRAM_BYTES - _OVERHEAD_BYTES) // each_bytes
    is_single = each_bytes <= MAX_DATAGRAM_BYTES - _OVERHEAD_BYTES
    return min(255, max(together, int(is_single)))


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
