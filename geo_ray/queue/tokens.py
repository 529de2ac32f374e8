"""Who asks: a tenant's token signs its requests, and the queue has only the public half.

So whoever reads the queue's configuration or its folder cannot speak for a tenant, and a request
that lies in a bucket cannot be changed there. A request counts once, by its id.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from geo_ray.errors import QueueDeniedError

_MARK: Final = "geoq1-"


def new_token() -> str:
    """Make a token; whoever has it speaks for its tenant."""
    return _MARK + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def key_of(token: str) -> str:
    """Return the public half of a token, for the queue's configuration.

    Raises:
        QueueDeniedError: it is no token.
    """
    return _private(token).public_key().public_bytes_raw().hex()


def sign(token: str, queue_id: str, text: str) -> str:
    """Sign a request for one queue, and for no other of the same name.

    Raises:
        QueueDeniedError: it is no token.
    """
    return _private(token).sign(_said(queue_id, text)).hex()


def is_signed(key: str, queue_id: str, text: str, signature: str) -> bool:
    """Whether the holder of the token of ``key`` signed this for this queue."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), _said(queue_id, text))
    except (InvalidSignature, ValueError):
        return False
    return True


def _said(queue_id: str, text: str) -> bytes:
    return f"geo_ray-queue\n{queue_id}\n{text}".encode()


def _private(token: str) -> Ed25519PrivateKey:
    text = token.strip()
    try:
        if not text.startswith(_MARK):
            raise ValueError("another beginning")
        seed = base64.b64decode(text.removeprefix(_MARK) + "=", altchars=b"-_", validate=True)
        return Ed25519PrivateKey.from_private_bytes(seed)
    except (ValueError, binascii.Error):
        raise QueueDeniedError(
            "this is no token of a queue",
            fix="Make one with `geo-ray queue token`; it begins with geoq1-.",
        ) from None
