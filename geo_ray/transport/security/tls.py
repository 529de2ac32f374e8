"""Mutual TLS 1.3 between regions: contexts, and the identity of the other end.

A certificate names a region, not a host: regions move from address to address. A connection is
verified by the certificate's chain to the deployment's CA and by its region, which must be the one
that was dialed or that the peer claims to be (`expect_region`). Certificates are made in
`geo_ray.transport.security.certs`.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.errors import CertificateError, PeerRefusedError

URI_PREFIX: Final = "geo-ray://region/"
_SAME_CA: Final = "Give every region a certificate of its own, all of the same CA: `geo-ray certs`."
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (a fresh directory below it, mode 0700)
_MOST_PEM_BYTES: Final = 1024 * 1024


class TlsFiles(StrictModel):
    """The files of a region's certificate; `geo-ray certs issue` makes all three."""

    ca: str = Field(
        description="PEM file: the certificate of the deployment's CA; several while it is replaced"
    )
    cert: str = Field(description="PEM file: this region's certificate")
    key: str = Field(description="PEM file: the private key of that certificate")
    crl: str | None = Field(
        default=None, description="PEM file: what is revoked; one that is not there revokes nothing"
    )

    @classmethod
    def in_directory(cls, directory: Path) -> TlsFiles:
        """Return the files in a directory that `geo-ray certs issue` wrote for one region."""
        return cls(
            ca=str(directory / "ca.pem"),
            cert=str(directory / "cert.pem"),
            key=str(directory / "key.pem"),
            crl=str(directory / "crl.pem"),
        )

    def read(self) -> TlsBytes:
        """The contents of the files.

        Raises:
            CertificateError: one cannot be read.
        """
        crl_pem = b""
        if self.crl is not None and Path(self.crl).exists():
            crl_pem = _read(Path(self.crl))
        ca_pem, cert_pem, key_pem = (_read(Path(name)) for name in (self.ca, self.cert, self.key))
        return TlsBytes(ca_pem, cert_pem, key_pem, crl_pem)


@dataclass(frozen=True, slots=True)
class TlsBytes:
    """A region's certificate in memory. Never shows its key in a log or a traceback.

    Attributes:
        ca_pem: the certificates of the CAs.
        cert_pem: the region's certificate.
        key_pem: its private key.
        crl_pem: revocation lists; empty for none.
    """

    ca_pem: bytes = field(repr=False)
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    crl_pem: bytes = field(default=b"", repr=False)


TlsSource: TypeAlias = TlsFiles | TlsBytes


def server_context(source: TlsSource, material: TlsBytes | None = None) -> ssl.SSLContext:
    """A context for accepted sockets that asks every client for a certificate of the CA.

    Args:
        source: where certificate and key are.
        material: what was read from there; None reads it.

    Raises:
        CertificateError: a file cannot be read, or the key is not the certificate's.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, source, material)
    # No session is resumed: a region's connections live for hours, and tickets are bytes that a
    # client which only writes would never read.
    context.num_tickets = 0
    return context


def client_context(source: TlsSource, material: TlsBytes | None = None) -> ssl.SSLContext:
    """A context for dialed sockets that shows the region's certificate and checks the server's.

    Args:
        source: where certificate and key are.
        material: what was read from there; None reads it.

    Raises:
        CertificateError: a file cannot be read, or the key is not the certificate's.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, source, material)


def region_uri(region: str) -> str:
    """Return the subject alternative name of ``region``'s certificate."""
    return URI_PREFIX + quote(region, safe="")


def peer_region(sock: ssl.SSLSocket | ssl.SSLObject) -> str:
    """Return the region in the verified certificate of the other end, after the handshake.

    With TLS 1.3 a client's handshake ends before the server checks its certificate, so a refusal
    comes with the first read.

    Raises:
        PeerRefusedError: there is no certificate, or it does not name one region.
    """
    certificate = sock.getpeercert()
    if not certificate:
        raise PeerRefusedError("the peer showed no certificate that was verified", fix=_SAME_CA)
    names: list[str] = []
    for entry in certificate.get("subjectAltName", ()):
        kind, value = entry[0], entry[1]
        if kind == "URI" and isinstance(value, str) and value.startswith(URI_PREFIX):
            names.append(unquote(value.removeprefix(URI_PREFIX)))
    if len(names) != 1 or not names[0]:
        raise PeerRefusedError(
            f"the peer's certificate names {len(names)} regions instead of one", fix=_SAME_CA
        )
    return names[0]


def expect_region(sock: ssl.SSLSocket | ssl.SSLObject, region: str) -> None:
    """Refuse a peer whose certificate is not that of ``region``.

    Raises:
        PeerRefusedError: with both names.
    """
    found = peer_region(sock)
    if found != region:
        raise PeerRefusedError(
            f"the peer should be region {region!r}, but its certificate is that of {found!r}",
            fix="Check the address of the region, and which certificate its bridge was given.",
        )


def peer_serial(sock: ssl.SSLSocket | ssl.SSLObject) -> int:
    """Return the serial number of the other end's verified certificate, after the handshake."""
    certificate = sock.getpeercert() or {}
    return int(str(certificate.get("serialNumber", "0")), 16)


def _context(protocol: int, source: TlsSource, material: TlsBytes | None) -> ssl.SSLContext:
    if material is None:
        material = source.read() if isinstance(source, TlsFiles) else source
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the region is the identity, see expect_region
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    what = f"{source.cert} and {source.key}" if isinstance(source, TlsFiles) else "in memory"
    try:
        context.load_verify_locations(cadata=material.ca_pem.decode("ascii"))
        _load_chain(context, material)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "no PEM text"
        if reason == "KEY_VALUES_MISMATCH":
            reason = "the key does not belong to the certificate"
        raise CertificateError(f"the certificate ({what}) cannot be used: {reason}") from None
    except OSError as error:
        raise CertificateError(
            f"cannot hand the certificate to OpenSSL: {error}",
            fix=f"Free space in {_MEMORY} or in the directory for temporary files.",
        ) from None
    return context


def _load_chain(context: ssl.SSLContext, material: TlsBytes) -> None:
    """Load the chain from temporary files in memory, because OpenSSL takes files only."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    prefix = f"geo-ray-tls-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:  # mode 0700
        path = Path(name, "chain.pem")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(material.cert_pem.rstrip() + b"\n" + material.key_pem)
        context.load_cert_chain(path, password=_refuse_password)


def _refuse_password() -> str:
    raise ValueError("the private key is encrypted")  # else OpenSSL would ask on the terminal


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_PEM_BYTES + 1)
    except OSError as error:
        raise CertificateError(
            f"cannot read {path}: {error.strerror or error}",
            fix="Correct `transport.certs`, or the permissions of the file.",
        ) from None
    if len(data) > _MOST_PEM_BYTES:
        raise CertificateError(
            f"{path} is too large for a certificate or key", fix="Name the PEM file itself."
        )
    return data
