"""Keys and certificates of a run and how its processes obtain them.

Ray's calls are authenticated but not encrypted. So keys are created where they are used, and a key
shared by several processes is sealed for one of them at a time. The keys of a run stay in the
memory of one process (`RunKeys`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.base.errors import InvariantError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.cert_store import check_certificates, files_of
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.security.process_keys import (
    OwnCertificate,
    SecretReceiver,
    SignedCertificate,
    seal_secret,
)
from geo_ray.transport.security.tls import TlsBytes, TlsSource

LAN_KEY = "lan"
WAN_KEY = "wan"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a process sends before it receives keys.

    Attributes:
        public: see `SecretReceiver.public`.
        request_pem: request for a certificate of the run's CA; None if it needs none.
    """

    public: bytes
    request_pem: bytes | None = None


@dataclass(frozen=True, slots=True)
class BridgeKeys:
    """The keys of a bridge.

    Attributes:
        wan: the key that all bridges of the run share, sealed.
        lan: the key of its region, sealed; None if there are no connections inside the region.
        signed: its certificate, if it requested one.
    """

    wan: bytes
    lan: bytes | None
    signed: SignedCertificate | None


class BridgeSecrets:
    """The private keys of a process that connects to other regions.

    Args:
        region: its region.
        config: whether TLS is used, and where certificates are.
    """

    def __init__(self, region: str, config: TransportConfig) -> None:
        self._region = region
        self._directory = config.certs
        self._has_tls = config.tls != "off"
        self._receiver = SecretReceiver()
        self._own = OwnCertificate(region) if wants_certificate(config) else None

    def introduce(self) -> Introduction:
        """Return the introduction for the run actor."""
        request = None if self._own is None else self._own.request()
        return Introduction(self._receiver.public, request)

    def wan_key(self, keys: BridgeKeys) -> bytes:
        """Return the key of connections between regions."""
        return self._receiver.open(keys.wan, WAN_KEY)

    def lan_key(self, keys: BridgeKeys) -> bytes:
        """Return the key of connections inside the region."""
        if keys.lan is None:
            raise InvariantError(f"the bridge of region {self._region} received no LAN key")
        return self._receiver.open(keys.lan, LAN_KEY)

    def certificate(self, signed: SignedCertificate | None) -> TlsSource | None:
        """Return the certificate to use: of the run's CA, else the one on this host.

        Raises:
            CertificateError: the one on this host cannot be used, with or without TLS.
        """
        if self._own is None:
            if self._directory is None:
                return None
            here = Path(self._directory)
            if self._has_tls:  # even if all links turn out to be loopback
                check_certificates(here, (self._region,))
            return files_of(here, self._region)
        return None if signed is None else self._own.accept(signed)

    def renewed(self, signed: SignedCertificate) -> TlsBytes | None:
        """Return the certificate that answers a `renewal`."""
        return None if self._own is None else self._own.accept(signed)

    def renewal(self) -> bytes | None:
        """Return a request for the next certificate when it is due, else None."""
        return None if self._own is None else self._own.renewal()


def wants_certificate(config: TransportConfig) -> bool:
    """Return whether bridges request certificates from the run's own CA."""
    return config.tls != "off" and config.certs is None


_KEY_BYTES: Final = 32
_CERTIFICATE_DAYS: Final = 2.0  # renewed daily during the run


class RunKeys:
    """One key for all bridges, one for each region's own sockets, and a CA if TLS needs one.

    Nothing of this is stored: a resumed run creates new keys. It cannot be pickled.

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
        """Return the keys of the bridge of a region.

        Raises:
            CertificateError: its request is invalid.
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
        """Answer a region's request for a certificate; None if this run has no CA.

        Raises:
            CertificateError: the request is invalid.
        """
        if self._authority is None:
            return None
        cert_pem = self._authority.sign(region, request_pem, _CERTIFICATE_DAYS)
        return SignedCertificate(self._authority.cert_pem, cert_pem)

    def __reduce__(self) -> str:
        raise TypeError("the keys of a run cannot be pickled")
