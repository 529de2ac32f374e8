"""Hands a secret to one process over a channel that others may read, such as Ray's calls.

The process makes a key pair and tells the public half. Whoever has the secret encrypts it for that
half: X25519 with a pair of its own for this once, HKDF, AES-256-GCM. Who records the channel learns
nothing, also later. Who could change what passes would be found out only if he does not replace
the public half: the channel must be authenticated, as Ray's is by its token.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geo_ray.errors import TransportError

_PUBLIC_BYTES: Final = 32
_NONCE: Final = bytes(12)  # each key encrypts one secret


class SecretReceiver:
    """One process's key pair, of which only `public` leaves it; it cannot be pickled.

    Attributes:
        public: for `seal_secret`.
    """

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def open(self, sealed: bytes, purpose: str) -> bytes:
        """Return the secret that was sealed for this process and this purpose.

        Raises:
            TransportError: it was sealed for another process or purpose, or was changed.
        """
        theirs, box = sealed[:_PUBLIC_BYTES], sealed[_PUBLIC_BYTES:]
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(theirs))
            return _cipher(shared, theirs + self.public, purpose).decrypt(_NONCE, box, None)
        except (InvalidTag, ValueError):
            raise TransportError(
                f"a sealed {purpose} key is not meant for this process, or was changed on its way",
                fix="Start the run again; protect Ray by its token (RAY_AUTH_MODE=token).",
            ) from None


def seal_secret(secret: bytes, public: bytes, purpose: str) -> bytes:
    """Encrypt a secret for the `SecretReceiver` that has told ``public``.

    Args:
        secret: any bytes.
        public: see `SecretReceiver.public`.
        purpose: what it is for; `SecretReceiver.open` must name the same.
    """
    once = X25519PrivateKey.generate()
    mine = once.public_key().public_bytes_raw()
    shared = once.exchange(X25519PublicKey.from_public_bytes(public))
    return mine + _cipher(shared, mine + public, purpose).encrypt(_NONCE, secret, None)


def _cipher(shared: bytes, both_public: bytes, purpose: str) -> AESGCM:
    info = b"geo_ray sealed secret: " + purpose.encode()
    return AESGCM(HKDF(SHA256(), 32, salt=both_public, info=info).derive(shared))
