"""Mutual TLS 1.3 between regions: contexts, peer identity, revocation, and reloading of files.

A certificate names a region, not a host, because regions move between addresses. A connection is
verified by the certificate's chain to the deployment's CA and by its region, which must be the
one that was dialed or that the peer claims to be (`expect_region`). `Credentials` reloads the
files when they change. Serial numbers are random, so one revocation list (CRL) serves a
deployment also while its CA is replaced. Certificates are made in
`geo_ray.transport.security.certs`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import logging
import os
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from geo_ray.base.errors import CertificateError, PeerRefusedError
from geo_ray.base.model import StrictModel
from geo_ray.base.output import RateLimitedLog

URI_PREFIX: Final = "geo-ray://region/"
RANK_MARK: Final = "#"
"""Separates region and rank in the name of an endpoint; names of regions do not contain it."""
_SAME_CA: Final = "Give every region its own certificate, all of the same CA: `geo-ray certs`."
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
        source: location of certificate and key.
        material: the content read from there; None reads it.

    Raises:
        CertificateError: a file cannot be read, or the key is not the certificate's.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, source, material)
    # No session resumption: a region's connections last for hours, and a client that only writes
    # would never read the tickets.
    context.num_tickets = 0
    return context


def client_context(source: TlsSource, material: TlsBytes | None = None) -> ssl.SSLContext:
    """A context for dialed sockets that shows the region's certificate and checks the server's.

    Args:
        source: location of certificate and key.
        material: the content read from there; None reads it.

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

    The processes of a region that joined have names such as ``eu-west#3`` and one certificate.

    Raises:
        PeerRefusedError: with both names.
    """
    found = peer_region(sock)
    if found != region.partition(RANK_MARK)[0]:
        raise PeerRefusedError(
            f"the peer should be region {region!r}, but its certificate is that of {found!r}",
            fix="Check the address of the region, and which certificate its bridge was given.",
        )


def peer_serial(sock: ssl.SSLSocket | ssl.SSLObject) -> int:
    """Return the serial number of the other end's verified certificate, after the handshake."""
    certificate = sock.getpeercert() or {}
    return int(str(certificate.get("serialNumber", "0")), 16)


class _Socket(ssl.SSLSocket):
    """Closes itself when the connection turns out to be lost as it is wrapped.

    `SSLContext.wrap_socket` takes the file descriptor over and does not close it in this case. It
    would stay open for as long as somebody keeps the error.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except OSError:
            if self._sslobj is None:  # type: ignore[attr-defined]  # not wrapped yet
                self.close()
            raise


def _context(protocol: int, source: TlsSource, material: TlsBytes | None) -> ssl.SSLContext:
    if material is None:
        material = source.read() if isinstance(source, TlsFiles) else source
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _Socket
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
        error: error of a handshake, or of the first read after it, as TLS 1.3 reports to a client.
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


_LOGGER = logging.getLogger(__name__)
_ABSENT: Final = (0, 0, 0)


class Credentials:
    """Contexts for both ends of TLS, and revocations; any thread may call.

    A revocation stays in effect while the process lives, even if the list changes.

    Args:
        source: certificate, key, CAs and list.

    Raises:
        CertificateError: they cannot be used.
    """

    def __init__(self, source: TlsSource) -> None:
        self._quiet = RateLimitedLog(_LOGGER)
        self._lock = threading.Lock()  # one at a time loads
        self.revoked: frozenset[int] = frozenset()
        self.use(source)

    def use(self, source: TlsSource) -> None:
        """Use these from the next handshake on.

        Raises:
            CertificateError: they cannot be used; the earlier ones stay.
        """
        with self._lock:
            self._load(source, _stamps(source))

    def refresh(self) -> None:
        """Reload the files if one has changed; the earlier ones stay while these do not match.

        Files that are copied one after the other may not match for a moment.
        """
        with self._lock:
            stamps = _stamps(self._source)
            if stamps == self._stamps:
                return
            try:
                self._load(self._source, stamps)
            except CertificateError as error:
                self._quiet.warning("refresh", f"the earlier certificate stays: {error.message}")
            else:
                _LOGGER.info("certificate, CAs and revocation list were read again")

    def _load(self, source: TlsSource, stamps: list[tuple[int, int, int]]) -> None:
        material = source.read() if isinstance(source, TlsFiles) else source
        revoked = revoked_serials(material.crl_pem, material.ca_pem)
        client, server = client_context(source, material), server_context(source, material)
        self.client: ssl.SSLContext = client
        self.server: ssl.SSLContext = server
        self.revoked = self.revoked | revoked
        self._source, self._stamps = source, stamps


def _stamps(source: TlsSource) -> list[tuple[int, int, int]]:
    """Return stamps that detect changed files; taken before they are read."""
    if not isinstance(source, TlsFiles):
        return []
    return [_stamp(Path(name)) for name in (source.ca, source.cert, source.key, source.crl) if name]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return _ABSENT
    return found.st_mtime_ns, found.st_size, found.st_ino


TlsMode: TypeAlias = Literal["auto", "required", "off"]

_LAST_READ_S: Final = 0.5
_LAST_READS: Final = 16
_TLS_RECORD: Final = b"\x16"  # how every TLS handshake begins


class Encryption:
    """Turns sockets into TLS sockets if the mode requires TLS.

    Args:
        mode: ``auto`` requires TLS unless the other end has a loopback address; ``required``
            always; ``off`` never.
        source: this region's certificate, if there is one.
    """

    def __init__(self, mode: TlsMode, source: TlsSource | None) -> None:
        self._mode = mode
        self._credentials: Credentials | None = None
        if source is not None:
            self.use(source)

    def use(self, source: TlsSource) -> None:
        """Use another certificate from the next handshake on.

        Raises:
            CertificateError: it cannot be used; the earlier one stays.
        """
        if self._mode == "off":
            return
        if self._credentials is None:
            self._credentials = Credentials(source)
        else:
            self._credentials.use(source)

    def refresh(self) -> None:
        """Read the certificate's files again if they have changed."""
        if self._credentials is not None:
            self._credentials.refresh()

    def is_revoked(self, serial: int) -> bool:
        """Return whether a certificate is revoked."""
        return self._credentials is not None and serial in self._credentials.revoked

    def dialed(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use after `connect`, with the same timeout.

        `shake_hands` comes next.

        Raises:
            PeerRefusedError: TLS is required and there is no certificate here.
            OSError: the connection was lost.
        """
        if not self._is_wanted(sock):
            return sock
        if self._credentials is None:
            raise PeerRefusedError(
                f"this region has no certificate, but {self._why()}",
                fix="Make one with `geo-ray certs`, or set `transport.tls: off` in a private "
                "network.",
            )
        return self._credentials.client.wrap_socket(sock, do_handshake_on_connect=False)

    def accepted(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use after `accept`, depending on whether the other end begins TLS.

        `shake_hands` comes next.

        Raises:
            PeerRefusedError: the other end does not meet this one's requirements.
            OSError: the connection was lost.
        """
        if self._mode == "off":
            return sock
        begins_tls = sock.recv(1, socket.MSG_PEEK) == _TLS_RECORD
        if not begins_tls:
            if self._is_wanted(sock):
                raise PeerRefusedError(
                    f"the peer connects without TLS, but {self._why()}",
                    fix="Set `transport.tls` to the same in every region.",
                )
            return sock
        if self._credentials is None:
            raise PeerRefusedError(
                "the peer wants TLS, but this region has no certificate",
                fix="Make one with `geo-ray certs`, or set `transport.tls` to the same in every "
                "region.",
            )
        return self._credentials.server.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )

    @staticmethod
    def shake_hands(sock: socket.socket) -> None:
        """TLS's own handshake; plain sockets have none.

        Raises:
            PeerRefusedError: it failed.
            OSError: the connection was lost.
        """
        if isinstance(sock, ssl.SSLSocket):
            peer = str(sock.getpeername()[0])
            try:
                sock.do_handshake()
            except ssl.SSLError as error:
                _let_read(sock)
                raise refusal(error, peer) from None

    def expect(self, sock: socket.socket, region: str) -> None:
        """Refuse a TLS peer whose certificate is not that of ``region``, or is revoked.

        Plain peers pass.

        Raises:
            PeerRefusedError: with both names, or that it was revoked.
        """
        if isinstance(sock, ssl.SSLSocket):
            expect_region(sock, region)
            if self.is_revoked(peer_serial(sock)):
                raise revoked(region)

    def _is_wanted(self, sock: socket.socket) -> bool:
        if self._mode == "auto":
            return not _is_loopback(str(sock.getpeername()[0]))
        return self._mode == "required"

    def _why(self) -> str:
        required = self._mode == "required"
        return "`transport.tls` is required" if required else "its address is not loopback"


def revoked(region: str) -> PeerRefusedError:
    """Return the error for a region whose certificate is revoked."""
    return PeerRefusedError(
        f"the certificate of region {region} was revoked",
        fix="Issue another one, if the region is to come back: `geo-ray certs issue REGION "
        "--dir DIR --force`.",
    )


def _let_read(sock: socket.socket) -> None:
    """Let the other end read the refusal, which closing with unread bytes would discard."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.settimeout(_LAST_READ_S)
        for _ in range(_LAST_READS):  # a limit, however much the peer sends
            if not socket.socket.recv(sock, 4096):
                return


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.split("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
