"""Explains errors of OpenSSL to people who connect regions."""

from __future__ import annotations

import ssl
from typing import Final

from geo_ray.errors import PeerRefusedError

_VERIFY: Final = {  # X509_V_ERR_*, openssl/x509_vfy.h
    9: "the peer's certificate is not valid yet; compare the clocks of both hosts",
    10: "the peer's certificate has expired; renew it: `geo-ray certs renew --dir DIR`",
    18: "the peer's certificate is signed by itself, not by this deployment's CA",
    19: "the peer's certificate is from another CA than this deployment's",
    20: "the peer's certificate is from another CA than this deployment's",
    21: "the peer's certificate is from another CA than this deployment's",
    23: "the peer's certificate was revoked",
    26: "the peer's certificate is not meant for this use",
    30: "the peer's certificate is from another CA than this deployment's",
}
_WRONG_CA = "the peer does not know the CA of this region's certificate (another deployment?)"
_NO_TLS = "the peer does not speak TLS; is TLS off in its configuration?"
_VERSION = "the peer offers no TLS 1.3"
_GONE = "the peer ended the connection in the TLS handshake; its log has the reason"
_REASONS: Final = {
    # alerts from the peer about this end
    "TLSV1_ALERT_UNKNOWN_CA": _WRONG_CA,
    "TLSV1_ALERT_DECRYPT_ERROR": _WRONG_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        "the peer says that this region's certificate has expired or is not valid yet; renew it"
        " with `geo-ray certs renew --dir DIR`, or compare the clocks"
    ),
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refuses this region's certificate: not valid (yet)",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "the peer cannot use this region's certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer asks for a certificate and was shown none",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer refused the TLS handshake",
    "TLSV1_ALERT_PROTOCOL_VERSION": _VERSION,
    # errors found at this end
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer showed no certificate",
    "UNSUPPORTED_PROTOCOL": _VERSION,
    "NO_PROTOCOLS_AVAILABLE": _VERSION,
    "VERSION_TOO_LOW": _VERSION,
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "UNEXPECTED_EOF_WHILE_READING": _GONE,
    "EOF_OCCURRED": _GONE,
}


def explain(error: ssl.SSLError) -> str:
    """Return a sentence for people, such as that a certificate has expired.

    Args:
        error: error of a handshake, or of the first read after it, when TLS 1.3 tells a client.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY.get(
            error.verify_code, f"the peer's certificate is not valid: {error.verify_message}"
        )
    if isinstance(error, ssl.SSLEOFError):
        return _GONE
    return _REASONS.get(error.reason or "", f"TLS failed: {error.reason or error}")


def refusal(error: ssl.SSLError, peer: str) -> PeerRefusedError:
    """The typed error for a failed handshake with ``peer``, a region or an address."""
    return PeerRefusedError(
        f"no TLS connection with {peer}: {explain(error)}",
        fix="Give every region a certificate of the same CA; `geo-ray certs show DIR` lists them.",
    )
