"""A deployment's certificates on disk.

``DIR/ca.pem`` and ``DIR/ca.key`` stay with the operator of the deployment; ``DIR/regions/NAME``
with ``ca.pem``, ``cert.pem`` and ``key.pem`` goes to the host of that region's bridge.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from geo_ray.errors import CertificateError
from geo_ray.transport.security.certs import (
    CA_DAYS,
    REGION_DAYS,
    Authority,
    check_region,
    read_cert,
    read_key,
)
from geo_ray.transport.security.tls import TlsFiles
from geo_ray.util.atomic_file import PRIVATE, PUBLIC, write_atomic

_CA_CERT = "ca.pem"
_CA_KEY = "ca.key"
_REGIONS = "regions"
_SOON_DAYS = 30


@dataclass(frozen=True, slots=True)
class CertificateEntry:
    """One certificate of a deployment.

    Attributes:
        name: the region's, or "CA".
        path: its file.
        not_before: start of its validity.
        not_after: end of its validity.
        hosts: names and IPs that it mentions.
        problem: why it cannot be used, apart from its dates; or "".
    """

    name: str
    path: Path
    not_before: dt.datetime
    not_after: dt.datetime
    hosts: tuple[str, ...]
    problem: str

    def left_days(self, now: dt.datetime) -> float:
        """Days until it expires; negative if it has."""
        return (self.not_after - now).total_seconds() / 86400

    def is_usable(self, now: dt.datetime) -> bool:
        """Whether peers accept it."""
        return not self.problem and self.not_before <= now < self.not_after

    def state(self, now: dt.datetime) -> str:
        """``good``, ``renew soon``, or why it cannot be used."""
        if self.is_usable(now):
            return "renew soon" if self.left_days(now) < _SOON_DAYS else "good"
        return self.problem or ("EXPIRED" if now >= self.not_after else "not valid yet")


def init(directory: Path, days: float = CA_DAYS, *, force: bool = False) -> Authority:
    """Make the deployment's CA.

    Raises:
        CertificateError: there is one and ``force`` is off, or nothing can be written.
    """
    taken = [name for name in (_CA_KEY, _CA_CERT) if (directory / name).exists()]
    if taken and not force:
        raise CertificateError(
            f"{directory / taken[0]} exists already",
            fix="Renew it with `geo-ray certs renew --ca`; --force makes another CA, after which "
            "every region needs a new certificate.",
        )
    authority = Authority.create("geo-ray deployment CA", days)
    _make(directory)
    _write(directory / _CA_KEY, authority.key_pem, PRIVATE)
    _write(directory / _CA_CERT, authority.cert_pem, PUBLIC)
    return authority


def issue(
    directory: Path,
    region: str,
    days: float = REGION_DAYS,
    hosts: Sequence[str] = (),
    *,
    force: bool = False,
) -> TlsFiles:
    """Make a region's key and certificate.

    Raises:
        CertificateError: there is one and ``force`` is off, or nothing can be written.
    """
    check_region(region)
    authority = _authority(directory)
    home = directory / _REGIONS / region
    files = TlsFiles.in_directory(home)
    taken = [name for name in (files.key, files.cert) if Path(name).exists()]
    if taken and not force:
        raise CertificateError(
            f"{taken[0]} exists already",
            fix="Renew it with `geo-ray certs renew`, or add --force to replace the key as well.",
        )
    made = authority.issue(region, days, hosts)
    _make(home)
    _write(Path(files.key), made.key_pem, PRIVATE)
    _write(Path(files.ca), made.ca_pem, PUBLIC)
    _write(Path(files.cert), made.cert_pem, PUBLIC)
    return files


def renew(directory: Path, region: str, days: float = REGION_DAYS) -> TlsFiles:
    """Give a region's certificate new dates and keep its key, so that one rename does it.

    Raises:
        CertificateError: there is nothing to renew, or nothing can be written.
    """
    check_region(region)
    authority = _authority(directory)
    files = files_of(directory, region)
    old = read_cert(_read(Path(files.cert)))
    key = read_key(_read(Path(files.key)))
    made = authority.issue(region, days, _hosts(old), key=key)
    _write(Path(files.ca), made.ca_pem, PUBLIC)
    _write(Path(files.cert), made.cert_pem, PUBLIC)
    return files


def renew_ca(directory: Path, days: float = CA_DAYS) -> list[str]:
    """Give the CA new dates and keep its key; issued certificates stay valid.

    Returns:
        The regions whose copy of the CA's certificate was replaced.

    Raises:
        CertificateError: there is no CA, or nothing can be written.
    """
    authority = _authority(directory).renewed(days)
    _write(directory / _CA_CERT, authority.cert_pem, PUBLIC)
    names = regions_of(directory)
    for name in names:
        home = directory / _REGIONS / name
        _write(Path(TlsFiles.in_directory(home).ca), authority.cert_pem, PUBLIC)
    return names


def ca_path(directory: Path) -> Path:
    """Where `init` puts the CA's certificate."""
    return directory / _CA_CERT


def files_of(directory: Path, region: str) -> TlsFiles:
    """Return where `issue` puts a region's files."""
    return TlsFiles.in_directory(directory / _REGIONS / region)


def regions_of(directory: Path) -> list[str]:
    """Return the regions with a certificate in a deployment's directory, sorted."""
    return sorted(path.parent.name for path in (directory / _REGIONS).glob("*/cert.pem"))


def entries(directory: Path) -> list[CertificateEntry]:
    """Return every certificate of a deployment, the CA's first.

    Raises:
        CertificateError: a certificate cannot be read.
    """
    ca = read_cert(_read(directory / _CA_CERT))
    found = [_entry("CA", directory / _CA_CERT, ca, "")]
    for region in regions_of(directory):
        path = Path(TlsFiles.in_directory(directory / _REGIONS / region).cert)
        cert = read_cert(_read(path))
        found.append(_entry(region, path, cert, _problem(cert, ca)))
    return found


def _problem(cert: x509.Certificate, ca: x509.Certificate) -> str:
    try:
        cert.verify_directly_issued_by(ca)
    except Exception:  # a broken certificate may raise errors of several kinds
        return "from another CA"
    return ""


def _entry(name: str, path: Path, cert: x509.Certificate, problem: str) -> CertificateEntry:
    dates = cert.not_valid_before_utc, cert.not_valid_after_utc
    return CertificateEntry(name, path, *dates, tuple(_hosts(cert)), problem)


def _hosts(cert: x509.Certificate) -> list[str]:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    ips = [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *ips]


def _authority(directory: Path) -> Authority:
    if not (directory / _CA_KEY).exists():
        raise CertificateError(
            f"there is no CA in {directory}", fix="Make one with `geo-ray certs init DIR`."
        )
    return Authority.from_pem(_read(directory / _CA_CERT), _read(directory / _CA_KEY))


_UNWRITABLE = "Name a directory that you may write, on a disk with space."


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CertificateError(
            f"cannot make {directory}: {error.strerror or error}", fix=_UNWRITABLE
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"cannot read {path}: {error.strerror or error}",
            fix="Correct the path, or the permissions of the file.",
        ) from None


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        write_atomic(path, data, mode)
    except OSError as error:
        raise CertificateError(
            f"cannot write {path}: {error.strerror or error}", fix=_UNWRITABLE
        ) from None
