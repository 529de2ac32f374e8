"""A certificate whose key is made by the process that uses it, and never leaves it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from geo_ray.errors import CertificateError
from geo_ray.transport.security.certs import new_key, pem_of_key, read_cert
from geo_ray.transport.security.tls import TlsBytes, region_uri

_RENEW_AT: Final = 0.5  # of its life
_ASK_AGAIN: Final = dt.timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """What a CA answers to a request; everybody may read it.

    Attributes:
        ca_pem: the certificate of the CA.
        cert_pem: the certificate that was asked for.
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
        """Take the answer to a request; keys of earlier requests are forgotten.

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
