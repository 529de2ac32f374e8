"""What processes of a run tell of their keys, and are told: nothing of it is secret.

Ray's calls are authenticated and not encrypted. So keys are made where they are used, and a key
that several processes must share passes sealed for one of them at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.errors import InvariantError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.cert_check import check_certificates
from geo_ray.transport.security.cert_store import files_of
from geo_ray.transport.security.own_certificate import OwnCertificate, SignedCertificate
from geo_ray.transport.security.secret_sealer import SecretReceiver
from geo_ray.transport.security.tls import TlsBytes, TlsSource

LAN_KEY = "lan"
WAN_KEY = "wan"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a process tells before it is given keys.

    Attributes:
        public: see `SecretReceiver.public`.
        request_pem: for a certificate of the run's CA; None if it needs none.
    """

    public: bytes
    request_pem: bytes | None = None


@dataclass(frozen=True, slots=True)
class BridgeKeys:
    """What a bridge is given.

    Attributes:
        wan: the key that all bridges of the run share, sealed.
        lan: the key of its region, sealed; None where nothing inside the region is connected.
        signed: its certificate, if it has asked for one.
    """

    wan: bytes
    lan: bytes | None
    signed: SignedCertificate | None


class BridgeSecrets:
    """The private keys of a process that talks to other regions.

    Args:
        region: its region.
        config: whether there is TLS, and where certificates lie.
    """

    def __init__(self, region: str, config: TransportConfig) -> None:
        self._region = region
        self._directory = config.certs
        self._has_tls = config.tls != "off"
        self._receiver = SecretReceiver()
        self._own = OwnCertificate(region) if wants_certificate(config) else None

    def introduce(self) -> Introduction:
        """Return what the driver must know."""
        request = None if self._own is None else self._own.request()
        return Introduction(self._receiver.public, request)

    def wan_key(self, keys: BridgeKeys) -> bytes:
        """Return the key of connections between regions."""
        return self._receiver.open(keys.wan, WAN_KEY)

    def lan_key(self, keys: BridgeKeys) -> bytes:
        """Return the key of connections inside the region."""
        if keys.lan is None:
            raise InvariantError(f"the bridge of region {self._region} was given no LAN key")
        return self._receiver.open(keys.lan, LAN_KEY)

    def certificate(self, signed: SignedCertificate | None) -> TlsSource | None:
        """Return the certificate to use: of the run's CA, else the one that lies on this host.

        Raises:
            CertificateError: the one on this host cannot be used, with TLS or without.
        """
        if self._own is None:
            if self._directory is None:
                return None
            here = Path(self._directory)
            if self._has_tls:  # also where all links turn out to be loopback
                check_certificates(here, (self._region,))
            return files_of(here, self._region)
        return None if signed is None else self._own.accept(signed)

    def renewed(self, signed: SignedCertificate) -> TlsBytes | None:
        """Return the certificate that answers a `renewal`."""
        return None if self._own is None else self._own.accept(signed)

    def renewal(self) -> bytes | None:
        """Return a request for the next certificate once it is time, else None."""
        return None if self._own is None else self._own.renewal()


def wants_certificate(config: TransportConfig) -> bool:
    """Whether bridges ask the run's own CA for certificates."""
    return config.tls != "off" and config.certs is None
