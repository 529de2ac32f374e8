"""The deployment's certificate authority, in memory: makes the certificates of regions.

ECDSA on P-256. The region is the identity: it stands in the subject alternative name as
``geo-ray://region/NAME``; common name and hosts are for people. Files are
`geo_ray.transport.security.cert_store`.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geo_ray.base.errors import CertificateError
from geo_ray.transport.security.tls import TlsBytes, make_crl, region_uri

CA_DAYS: Final = 3650
REGION_DAYS: Final = 365
_UNREADABLE: Final = (ValueError, UnsupportedAlgorithm)  # the latter of a curve that is not known
_BACKDATE = dt.timedelta(hours=1)  # hosts whose clocks are late take a fresh certificate too
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Authority:
    """A CA with its key, which must stay secret; distribute only what `issue` returns.

    Args:
        cert: the CA's certificate.
        key: its private key.

    Raises:
        CertificateError: the key is not the certificate's.
    """

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        if cert.public_key() != key.public_key():
            raise CertificateError(
                "the CA's key does not belong to its certificate",
                fix="Put the two files of one CA together, or make another: "
                "`geo-ray certs init DIR`.",
            )
        self.cert = cert
        self._key = key

    @classmethod
    def create(cls, name: str, days: float = CA_DAYS, now: dt.datetime | None = None) -> Authority:
        """Make a new CA.

        Args:
            name: common name, for people.
            days: days of validity from now on.
            now: None takes the machine's clock.
        """
        key = new_key()
        return cls(_ca_certificate(name, key, days, now), key)

    @classmethod
    def from_pem(cls, cert_pem: bytes, key_pem: bytes) -> Authority:
        """A CA that was saved.

        Raises:
            CertificateError: these are no PEM texts of a CA and its key.
        """
        return cls(read_cert(cert_pem), read_key(key_pem))

    @property
    def cert_pem(self) -> bytes:
        """The CA's certificate, which is public."""
        return self.cert.public_bytes(serialization.Encoding.PEM)

    def crl(self, serials: Iterable[int], now: dt.datetime | None = None) -> bytes:
        """Return a revocation list that names these serial numbers, as PEM text."""
        return make_crl(self.cert, self._key, serials, now or dt.datetime.now(dt.UTC))

    def signature(self, data: bytes) -> bytes:
        """Sign data with the CA's key; `is_signed_by` checks it."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    @property
    def key_pem(self) -> bytes:
        """The CA's private key."""
        return pem_of_key(self._key)

    def renewed(self, days: float = CA_DAYS, now: dt.datetime | None = None) -> Authority:
        """Return the same CA with new dates; certificates that it issued stay valid."""
        name = self.cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        return Authority(_ca_certificate(str(name), self._key, days, now), self._key)

    def issue(
        self,
        region: str,
        days: float = REGION_DAYS,
        hosts: Sequence[str] = (),
        now: dt.datetime | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> TlsBytes:
        """Issue a certificate for a region, for both ends of a connection.

        Args:
            region: its name.
            days: valid from now on, at most as long as the CA.
            hosts: names or IPs to mention; geo_ray does not check them.
            now: None takes the machine's clock.
            key: of the region; None makes one.

        Raises:
            CertificateError: the region's name cannot be used, or the CA has expired.
        """
        key = key or new_key()
        cert = self._certificate(region, key.public_key(), days, hosts, now)
        return TlsBytes(
            self.cert_pem, cert.public_bytes(serialization.Encoding.PEM), pem_of_key(key)
        )

    def sign(
        self,
        region: str,
        request_pem: bytes,
        days: float = REGION_DAYS,
        now: dt.datetime | None = None,
    ) -> bytes:
        """Issue a certificate for a key that stays where it was made.

        Args:
            region: the requesting region, as known to the caller; the request must name the same.
            request_pem: a request (CSR) as PEM text.
            days: as for `issue`.
            now: None takes the machine's clock.

        Returns:
            The certificate as PEM text.

        Raises:
            CertificateError: the request is broken, or of another region.
        """
        public = _requested_key(region, request_pem)
        cert = self._certificate(region, public, days, (), now)
        return cert.public_bytes(serialization.Encoding.PEM)

    def _certificate(
        self,
        region: str,
        public: ec.EllipticCurvePublicKey,
        days: float,
        hosts: Sequence[str],
        now: dt.datetime | None,
    ) -> x509.Certificate:
        check_region(region)
        began, ends = _period(days, now)
        if began >= self.cert.not_valid_after_utc:
            raise CertificateError(
                f"the CA has expired on {self.cert.not_valid_after_utc:%Y-%m-%d}",
                fix="Renew it with `geo-ray certs renew --ca --dir DIR`.",
            )
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(region_uri(region))]
        names += [_general_name(host) for host in hosts]
        builder = (
            _builder(region, public, began, min(ends, self.cert.not_valid_after_utc))
            .issuer_name(self.cert.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_ca=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        return builder.sign(self._key, hashes.SHA256())


def issue_for_run(
    run_id: str, regions: Sequence[str], days: float = REGION_DAYS
) -> dict[str, TlsBytes]:
    """Issue certificates for one run, under a CA whose key is dropped at once.

    For processes of one machine that receive their keys in private, such as benchmarks; bridges of
    a run request theirs with `geo_ray.transport.security.process_keys`.

    Returns:
        By region.

    Raises:
        CertificateError: a region's name cannot be used.
    """
    authority = Authority.create(f"geo-ray run {run_id}"[:64], days)
    return {region: authority.issue(region, days) for region in regions}


def check_region(region: str) -> None:
    """Refuse a name that cannot be a label value or a directory's name.

    Raises:
        CertificateError: it cannot be used.
    """
    if not _NAME.fullmatch(region):
        raise CertificateError(
            f"{region!r} cannot be a region's name",
            fix="Use 1 to 63 letters, digits, dots, dashes and underscores.",
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as unencrypted PEM text (PKCS 8)."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def read_cert(pem: bytes) -> x509.Certificate:
    """The first certificate of a PEM text.

    Raises:
        CertificateError: there is none.
    """
    try:
        cert = x509.load_pem_x509_certificate(pem)
        cert.public_key()  # read only now; it may be of a kind that this release does not know
        return cert
    except _UNREADABLE:
        raise CertificateError(
            "this is no PEM text of a certificate",
            fix="Restore the file, or issue it again: "
            "`geo-ray certs issue REGION --dir DIR --force`.",
        ) from None


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """An unencrypted elliptic-curve key from its PEM text.

    Raises:
        CertificateError: it is not such a key.
    """
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (*_UNREADABLE, TypeError):  # the message could quote the key
        raise CertificateError(
            "this is no PEM text of an unencrypted private key",
            fix="Decrypt the key, or issue it again: "
            "`geo-ray certs issue REGION --dir DIR --force`.",
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(
            "the private key is not one on an elliptic curve",
            fix="Use a key that `geo-ray certs` has made.",
        )
    return key


def _requested_key(region: str, request_pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(request_pem)
        is_whole = request.is_signature_valid
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public = request.public_key()
    except (*_UNREADABLE, x509.ExtensionNotFound):
        raise CertificateError(
            f"region {region} asks for a certificate with something that is no request",
            fix="Use the same release of geo_ray in every region.",
        ) from None
    asked = names.get_values_for_type(x509.UniformResourceIdentifier)
    if not is_whole or asked != [region_uri(region)]:
        raise CertificateError(f"region {region} asks for a certificate of {asked}")
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise CertificateError(f"region {region} asks for a certificate of a key of another kind")
    return public


def is_issued_by(cert: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether a CA has signed a certificate."""
    try:
        cert.verify_directly_issued_by(ca)
    except Exception:  # a broken certificate may raise errors of several kinds
        return False
    return True


def is_signed_by(data: bytes, signature: bytes, ca_pem: bytes) -> bool:
    """Return whether one of some CAs has signed data.

    Args:
        data: the data.
        signature: result of `Authority.signature`.
        ca_pem: certificates of the CAs as PEM text.
    """
    for ca in x509.load_pem_x509_certificates(ca_pem):
        key = ca.public_key()
        if isinstance(key, ec.EllipticCurvePublicKey):
            with suppress(InvalidSignature):
                key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
                return True
    return False


def _ca_certificate(
    name: str, key: ec.EllipticCurvePrivateKey, days: float, now: dt.datetime | None
) -> x509.Certificate:
    builder = _builder(name, key.public_key(), *_period(days, now))
    builder = builder.issuer_name(_name(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(is_ca=True), critical=True).sign(key, hashes.SHA256())


def _builder(
    name: str, public: ec.EllipticCurvePublicKey, began: dt.datetime, ends: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _period(days: float, now: dt.datetime | None) -> tuple[dt.datetime, dt.datetime]:
    now = now or dt.datetime.now(dt.UTC)
    if not 0 < days <= 36500:
        raise CertificateError(f"{days} days of validity are not possible", fix="Use 1 to 36500.")
    return now - _BACKDATE, now + dt.timedelta(days=days)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise CertificateError(
            f"{host!r} is neither a host's name nor an IP",
            fix="Write a name such as node-1.example.org or an address, without a port.",
        ) from None


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
