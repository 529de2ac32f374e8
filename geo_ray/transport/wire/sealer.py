"""A payload's tag, and its encryption where that is wanted: AES-256 in Galois/counter mode.

A tag alone (GMAC) costs less than a copy of the payload; encryption somewhat more than one. The key
is one frame's own. It is made of the connection's key for this direction and of the digest of the
frame's head, which covers how many frames came before. So the payload belongs to its head, and no
key is used for two frames: the nonce may be constant.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

TAG_BYTES: Final = 16
_NONCE: Final = bytes(12)


class PayloadSealer:
    """Takes in one payload, piece by piece; both ends end up with the same tag.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._sealer = _cipher(head_digest, key).encryptor()

    def update(self, piece: memoryview) -> None:
        """Take in the next piece, which stays readable."""
        self._sealer.authenticate_additional_data(piece)

    def encrypt(self, piece: memoryview) -> bytes:
        """Take in the next piece and return it encrypted."""
        return self._sealer.update(piece)

    def tag(self) -> bytes:
        """Return the tag of all pieces; nothing may follow."""
        self._sealer.finalize()
        return self._sealer.tag


class PayloadOpener:
    """Decrypts what `PayloadSealer.encrypt` returned; nothing may be used before `has_tag` is true.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._opener = _cipher(head_digest, key).decryptor()

    def update(self, piece: memoryview) -> None:
        """Decrypt the next piece in its place."""
        piece[:] = self._opener.update(piece)

    def has_tag(self, tag: bytes) -> bool:
        """Return whether the sender's tag is that of all pieces; nothing may follow."""
        try:
            self._opener.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


class PayloadCheck:
    """Checks a payload that is not encrypted; used as `PayloadOpener` is.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._seal = PayloadSealer(head_digest, key)

    def update(self, piece: memoryview) -> None:
        """Take in the next piece."""
        self._seal.update(piece)

    def has_tag(self, tag: bytes) -> bool:
        """Return whether the sender's tag is that of all pieces; nothing may follow."""
        return hmac.compare_digest(self._seal.tag(), tag)


def _cipher(head_digest: bytes, key: bytes) -> Cipher[modes.GCM]:
    frame_key = blake2b(head_digest, key=key, digest_size=32, person=b"geo_ray payload").digest()
    return Cipher(algorithms.AES(frame_key), modes.GCM(_NONCE))
