"""The keys of a run, which stay in the driver's memory: who gets which, and its own CA."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from geo_ray.runtime.actors.introduction import (
    LAN_KEY,
    WAN_KEY,
    BridgeKeys,
    Introduction,
    wants_certificate,
)
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.security.own_certificate import SignedCertificate
from geo_ray.transport.security.secret_sealer import seal_secret

_KEY_BYTES: Final = 32
_CERTIFICATE_DAYS: Final = 2.0  # renewed daily while the run goes on


class RunKeys:
    """One key for all bridges, one for each region's own sockets, and a CA if TLS needs one.

    Nothing of this is stored: a run that is resumed makes new keys. It cannot be pickled.

    Args:
        run_id: the run.
        regions: its regions.
        config: whether bridges need certificates.
    """

    def __init__(self, run_id: str, regions: Iterable[str], config: TransportConfig) -> None:
        self._wan = secrets.token_bytes(_KEY_BYTES)
        self._lan = {region: secrets.token_bytes(_KEY_BYTES) for region in regions}
        name = f"geo-ray run {run_id}"[:64]
        self._authority = Authority.create(name) if wants_certificate(config) else None

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """Return what the bridge of a region is given.

        Raises:
            CertificateError: its request makes no sense.
        """
        signed = None
        if introduction.request_pem is not None:
            signed = self.sign(region, introduction.request_pem)
        wan = seal_secret(self._wan, introduction.public, WAN_KEY)
        return BridgeKeys(wan, self.for_server(region, introduction), signed)

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """Return the region's key, sealed for one of its processes."""
        return seal_secret(self._lan[region], introduction.public, LAN_KEY)

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """Answer a region's request for a certificate; None if this run has no CA of its own.

        Raises:
            CertificateError: the request makes no sense.
        """
        if self._authority is None:
            return None
        cert_pem = self._authority.sign(region, request_pem, _CERTIFICATE_DAYS)
        return SignedCertificate(self._authority.cert_pem, cert_pem)

    def __reduce__(self) -> str:
        raise TypeError("the keys of a run do not leave the driver")
