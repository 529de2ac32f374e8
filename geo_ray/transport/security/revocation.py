"""Revocation lists (CRL): which certificates of a deployment count no more. Pure.

Serial numbers are random, so a list of one CA may name certificates that another one of the same
bundle issued: one list serves a deployment also while its CA is being replaced.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from geo_ray.errors import CertificateError

_PEM: Final = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)
_LISTED_FOR: Final = dt.timedelta(days=36500)  # a list counts until there is a newer one
_FIX: Final = (
    "Copy `crl.pem` again from the deployment's directory, where `geo-ray certs revoke` puts it."
)


def revoked_serials(crl_pem: bytes, ca_pem: bytes) -> frozenset[int]:
    """Return the serial numbers that a list names.

    Args:
        crl_pem: PEM text of lists; empty if there is none.
        ca_pem: the CAs of the deployment, of which one must have signed each list.

    Raises:
        CertificateError: a list cannot be read, or is not one of this deployment.
    """
    if not crl_pem.strip():
        return frozenset()
    texts = _PEM.findall(crl_pem)
    if not texts:
        raise CertificateError("the revocation list is no PEM text of one", fix=_FIX)
    try:
        lists = [x509.load_pem_x509_crl(text) for text in texts]
        keys = [cert.public_key() for cert in x509.load_pem_x509_certificates(ca_pem)]
        if not all(any(_signed_by(crl, key) for key in keys) for crl in lists):
            raise CertificateError("the revocation list is not from this deployment's CA", fix=_FIX)
        return frozenset(entry.serial_number for crl in lists for entry in crl)
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError("the revocation list cannot be read", fix=_FIX) from None


def make_crl(
    issuer: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    serials: Iterable[int],
    now: dt.datetime,
) -> bytes:
    """Return a list of a CA, as PEM text."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(now)
        .next_update(now + _LISTED_FOR)
    )
    for serial in sorted(set(serials)):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _signed_by(crl: x509.CertificateRevocationList, key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePublicKey) and crl.is_signature_valid(key)
