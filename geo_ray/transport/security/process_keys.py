"""Keys made by the process that uses them: its certificate, and secrets encrypted for it.

`OwnCertificate` holds a private key that never leaves the process. `SecretReceiver` and
`seal_secret` pass a secret over a channel that others may read, such as Ray calls: X25519 with an
ephemeral key, HKDF, AES-256-GCM. Recording the channel reveals nothing, also later. The channel
must be authenticated, as Ray's is by its token, since an attacker who replaces the public key
could read the secret.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geo_ray.base.errors import CertificateError, TransportError
from geo_ray.transport.security.certs import new_key, pem_of_key, read_cert
from geo_ray.transport.security.tls import TlsBytes, region_uri

_RENEW_AT: Final = 0.5  # of its life
_ASK_AGAIN: Final = dt.timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """A CA's answer to a request; not secret.

    Attributes:
        ca_pem: the certificate of the CA.
        cert_pem: the requested certificate.
    """

    ca_pem: bytes
    cert_pem: bytes


class OwnCertificate:
    """A region's certificate, with a new key for every request.

    Args:
        region: its region.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._keys: dict[bytes, ec.EllipticCurvePrivateKey] = {}  # by public key, as DER
        self._cert: x509.Certificate | None = None
        self._asked_at: dt.datetime | None = None

    def request(self, now: dt.datetime | None = None) -> bytes:
        """Make a key and return a request (CSR, as PEM) for a certificate of it."""
        key = new_key()
        self._keys[_der(key.public_key())] = key
        self._asked_at = now or dt.datetime.now(dt.UTC)
        names = [x509.UniformResourceIdentifier(region_uri(self._region))]
        asked = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([]))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .sign(key, hashes.SHA256())
        )
        return asked.public_bytes(serialization.Encoding.PEM)

    def accept(self, signed: SignedCertificate) -> TlsBytes:
        """Accept the answer to a request; keys of earlier requests are dropped.

        Raises:
            CertificateError: it is no certificate of a key that was made here.
        """
        cert = read_cert(signed.cert_pem)
        public = _der(cert.public_key())
        key = self._keys.get(public)
        if key is None:
            raise CertificateError(
                f"region {self._region} was given a certificate of a key that it has not made",
                fix="Start the run again.",
            )
        self._keys, self._cert = {public: key}, cert
        return TlsBytes(signed.ca_pem, signed.cert_pem, pem_of_key(key))

    def renewal(self, now: dt.datetime | None = None) -> bytes | None:
        """Return another request once half of the certificate's life is over, else None."""
        now, cert = now or dt.datetime.now(dt.UTC), self._cert
        if cert is None:
            return None
        life = cert.not_valid_after_utc - cert.not_valid_before_utc
        if now < cert.not_valid_before_utc + _RENEW_AT * life:
            return None
        if self._asked_at is not None and now < self._asked_at + _ASK_AGAIN:
            return None  # the answer is on its way
        return self.request(now)


def _der(public: object) -> bytes:
    if not isinstance(public, ec.EllipticCurvePublicKey):
        return b""
    return public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


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
    """Encrypt a secret for the `SecretReceiver` with the key ``public``.

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
