"""A deployment's certificates on disk, and the check that its regions would accept each other.

``DIR/ca.pem`` and ``DIR/ca.key`` stay with the operator of the deployment; ``DIR/regions/NAME``
with ``ca.pem``, ``cert.pem`` and ``key.pem`` goes to the host of that region's bridge, as does
``crl.pem`` once a certificate is revoked. ``DIR/issued.jsonl`` has one line per certificate: a
renewal leaves the earlier one valid, so both are revoked together.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from geo_ray.base.errors import CertificateError
from geo_ray.base.files import PRIVATE, PUBLIC, write_atomic
from geo_ray.transport.security.certs import (
    CA_DAYS,
    REGION_DAYS,
    Authority,
    check_region,
    is_issued_by,
    read_cert,
    read_key,
)
from geo_ray.transport.security.tls import TlsFiles, client_context, region_uri, revoked_serials

_CA_CERT = "ca.pem"
_CA_KEY = "ca.key"
_REGIONS = "regions"
_CRL = "crl.pem"
_ISSUED = "issued.jsonl"
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
        is_of_old_ca: whether the CA that issued it is being replaced.
    """

    name: str
    path: Path
    not_before: dt.datetime
    not_after: dt.datetime
    hosts: tuple[str, ...]
    problem: str
    is_of_old_ca: bool = False

    def left_days(self, now: dt.datetime) -> float:
        """Days until it expires; negative if it has."""
        return (self.not_after - now).total_seconds() / 86400

    def is_usable(self, now: dt.datetime) -> bool:
        """Whether peers accept it."""
        return not self.problem and self.not_before <= now < self.not_after

    def state(self, now: dt.datetime) -> str:
        """``good``, ``renew soon``, or why it cannot be used."""
        if self.is_usable(now):
            if self.is_of_old_ca:
                return "renew: its CA is being replaced"
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
            fix=f"Renew it with `geo-ray certs renew --ca {_dir(directory)}`; --force makes "
            "another CA, after which every region needs a new certificate.",
        )
    authority = Authority.create("geo-ray deployment CA", days)
    _make(directory)
    _write(directory / _CA_KEY, authority.key_pem, PRIVATE)
    _write(directory / _CA_CERT, authority.cert_pem, PUBLIC)
    (directory / _CRL).unlink(missing_ok=True)  # of a CA that was replaced
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
    folder = directory / _REGIONS / region
    files = TlsFiles.in_directory(folder)
    taken = [name for name in (files.key, files.cert) if Path(name).exists()]
    if taken and not force:
        raise CertificateError(
            f"{taken[0]} exists already",
            fix=f"Renew it with `geo-ray certs renew {region} {_dir(directory)}`, or add --force "
            "to replace the key as well.",
        )
    made = authority.issue(region, days, hosts)
    _make(folder)
    _note_issued(directory, region, made.cert_pem)  # before it can be used
    _write(Path(files.key), made.key_pem, PRIVATE)
    _copy_public(directory, region)
    _write(Path(files.cert), made.cert_pem, PUBLIC)
    return files


def renew(directory: Path, region: str, days: float = REGION_DAYS) -> TlsFiles:
    """Give a region's certificate new dates and keep its key, so that one rename does it.

    Raises:
        CertificateError: there is nothing to renew, it is revoked, or nothing can be written.
    """
    check_region(region)
    authority = _authority(directory)
    files = files_of(directory, region)
    old = read_cert(_read(Path(files.cert)))
    if is_revoked(directory, region):
        raise CertificateError(
            f"the certificate of region {region!r} is revoked: with new dates its key would count",
            fix="Give it a new key, if it may come back: "
            f"`geo-ray certs issue {region} {_dir(directory)} --force`.",
        )
    key = read_key(_read(Path(files.key)))
    made = authority.issue(region, days, _hosts(old), key=key)
    _note_issued(directory, region, made.cert_pem)
    _copy_public(directory, region)
    _write(Path(files.cert), made.cert_pem, PUBLIC)
    return files


def revoke(directory: Path, region: str) -> list[Path]:
    """Revoke every certificate that a region was ever issued; it may get another one afterwards.

    Returns:
        The lists to copy to the hosts of bridges.

    Raises:
        CertificateError: there is nothing to revoke, or nothing can be written.
    """
    check_region(region)
    authority = _authority(directory)
    serials = _issued_to(directory, region)
    path = Path(files_of(directory, region).cert)
    if path.exists():  # perhaps older than the list of what was issued
        serials.add(read_cert(_read(path)).serial_number)
    if not serials:
        raise CertificateError(
            f"no certificate of region {region!r} is known in {directory}",
            fix=f"See `geo-ray certs show {_dir(directory)}` for the regions that have one.",
        )
    _write(directory / _CRL, authority.crl(serials | _revoked(directory)), PUBLIC)
    return [_copy_public(directory, name) / _CRL for name in regions_of(directory)]


def is_revoked(directory: Path, region: str) -> bool:
    """Return whether the region's present certificate is revoked."""
    path = Path(files_of(directory, region).cert)
    return path.exists() and read_cert(_read(path)).serial_number in _revoked(directory)


def rotate_ca(directory: Path, days: float = CA_DAYS) -> list[str]:
    """Add a second CA: certificates of both are valid, new ones are issued by the second.

    Returns:
        The regions whose copy of the CAs' certificates was replaced.

    Raises:
        CertificateError: there is no CA, two are there already, or nothing can be written.
    """
    old = _authority(directory)
    if len(cas_of(directory)) > 1:
        raise CertificateError(
            "the CA is being replaced already",
            fix=f"Renew all regions, `geo-ray certs renew {_dir(directory)}`, then end it with "
            f"`geo-ray certs rotate --finish {_dir(directory)}`.",
        )
    new = Authority.create("geo-ray deployment CA", days)
    _write(directory / _CA_CERT, new.cert_pem + old.cert_pem, PUBLIC)
    _write(directory / _CA_KEY, new.key_pem, PRIVATE)
    return _copy_to_all(directory)


def finish_rotation(directory: Path) -> list[str]:
    """Trust the new CA only.

    Returns:
        The regions whose copy of the CAs' certificates was replaced.

    Raises:
        CertificateError: a region still has a certificate of the old one, or there is only one CA.
    """
    authority, cas = _authority(directory), cas_of(directory)
    if len(cas) < 2:
        raise CertificateError(
            f"there is only one CA in {directory}",
            fix=f"Begin with `geo-ray certs rotate {_dir(directory)}`.",
        )
    late = [
        entry.name
        for entry in entries(directory)
        if entry.path.name == "cert.pem" and entry.is_of_old_ca
        if not is_revoked(directory, entry.name)
    ]
    if late:
        raise CertificateError(
            f"these regions have certificates of the old CA: {', '.join(late)}",
            fix=f"Renew them with `geo-ray certs renew {' '.join(late)} {_dir(directory)}`, and "
            "copy the certificates to their hosts.",
        )
    if revoked := _revoked(directory):  # the old CA's signature will not count
        _write(directory / _CRL, authority.crl(revoked), PUBLIC)
    _write(directory / _CA_CERT, authority.cert_pem, PUBLIC)
    return _copy_to_all(directory)


def renew_ca(directory: Path, days: float = CA_DAYS) -> list[str]:
    """Give the CA new dates and keep its key; issued certificates stay valid.

    Returns:
        The regions whose copy of the CA's certificate was replaced.

    Raises:
        CertificateError: there is no CA, or nothing can be written.
    """
    authority = _authority(directory).renewed(days)
    _, *others = cas_of(directory)
    pems = [other.public_bytes(serialization.Encoding.PEM) for other in others]
    _write(directory / _CA_CERT, b"".join([authority.cert_pem, *pems]), PUBLIC)
    return _copy_to_all(directory)


def ca_path(directory: Path) -> Path:
    """Where `init` puts the CA's certificate."""
    return directory / _CA_CERT


def files_of(directory: Path, region: str) -> TlsFiles:
    """Return where `issue` puts a region's files."""
    return TlsFiles.in_directory(directory / _REGIONS / region)


def regions_of(directory: Path) -> list[str]:
    """Return the regions with a certificate in a deployment's directory, sorted."""
    return sorted(path.parent.name for path in (directory / _REGIONS).glob("*/cert.pem"))


def cas_of(directory: Path) -> list[x509.Certificate]:
    """Return the valid CAs, the issuing one first.

    Raises:
        CertificateError: they cannot be read.
    """
    pem = _read(directory / _CA_CERT)
    read_cert(pem)  # says what is wrong
    return x509.load_pem_x509_certificates(pem)


def entries(directory: Path) -> list[CertificateEntry]:
    """Return every certificate of a deployment, the CA's first.

    Raises:
        CertificateError: a certificate cannot be read.
    """
    ca, *old = cas_of(directory)
    found = [_entry("CA", directory / _CA_CERT, ca, "")]
    found += [_entry("old CA", directory / _CA_CERT, each, "") for each in old]
    revoked = _revoked(directory)
    for region in regions_of(directory):
        path = Path(TlsFiles.in_directory(directory / _REGIONS / region).cert)
        cert = read_cert(_read(path))
        of_old_ca = any(is_issued_by(cert, each) for each in old)
        problem = "" if of_old_ca or is_issued_by(cert, ca) else "from another CA"
        problem = "REVOKED" if cert.serial_number in revoked else problem
        found.append(_entry(region, path, cert, problem, of_old_ca=of_old_ca))
    return found


def _entry(
    name: str, path: Path, cert: x509.Certificate, problem: str, *, of_old_ca: bool = False
) -> CertificateEntry:
    dates = cert.not_valid_before_utc, cert.not_valid_after_utc
    return CertificateEntry(name, path, *dates, tuple(_hosts(cert)), problem, of_old_ca)


def _revoked(directory: Path) -> set[int]:
    path = directory / _CRL
    if not path.exists():
        return set()
    return set(revoked_serials(_read(path), _read(directory / _CA_CERT)))


def _copy_public(directory: Path, region: str) -> Path:
    """Give a region the CAs' certificates and the revocation list; returns its directory."""
    folder = directory / _REGIONS / region
    if (directory / _CRL).exists():
        _write(folder / _CRL, _read(directory / _CRL), PUBLIC)
    else:
        (folder / _CRL).unlink(missing_ok=True)  # of a CA that was replaced by force
    _write(folder / _CA_CERT, _read(directory / _CA_CERT), PUBLIC)
    return folder


def _copy_to_all(directory: Path) -> list[str]:
    names = regions_of(directory)
    for name in names:
        _copy_public(directory, name)
    return names


def _note_issued(directory: Path, region: str, cert_pem: bytes) -> None:
    cert = read_cert(cert_pem)
    line = {
        "region": region,
        "serial": f"{cert.serial_number:x}",
        "not_after": cert.not_valid_after_utc.isoformat(),
    }
    path = directory / _ISSUED
    before = _read(path) if path.exists() else b""
    _write(path, before + json.dumps(line).encode() + b"\n", PUBLIC)


def _issued_to(directory: Path, region: str) -> set[int]:
    path = directory / _ISSUED
    if not path.exists():  # the directory is of an earlier release
        return set()
    try:
        lines = [json.loads(line) for line in _read(path).splitlines()]
        return {int(line["serial"], 16) for line in lines if line["region"] == region}
    except (ValueError, KeyError, TypeError):
        raise CertificateError(
            f"{path} cannot be read", fix="Restore it: it says which certificates were issued."
        ) from None


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
            f"there is no CA in {directory}",
            fix=f"Name another directory, or make one with `geo-ray certs init {_dir(directory)}`.",
        )
    return Authority.from_pem(_read(directory / _CA_CERT), _read(directory / _CA_KEY))


def _dir(directory: Path) -> str:
    """The option that names a deployment, to be copied and typed."""
    return f"--dir {shlex.quote(str(directory))}"


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


@dataclass(frozen=True, slots=True)
class _Held:
    """What one region shows and trusts."""

    region: str
    files: TlsFiles
    cert: x509.Certificate
    cas: tuple[x509.Certificate, ...]
    revoked: frozenset[int]


def check_certificates(
    directory: Path, regions: Sequence[str], now: dt.datetime | None = None
) -> None:
    """Refuse certificates that one of the regions would not take from another.

    Args:
        directory: the deployment's directory, or the part of it on this host.
        regions: regions with certificates there.
        now: None takes the machine's clock.

    Raises:
        CertificateError: naming the region, the file, and what is wrong.
    """
    now = now or dt.datetime.now(dt.UTC)
    held = [_held(directory, region) for region in regions]
    for shown, problem in _problems(directory, held, now):
        raise CertificateError(
            f"the certificate of region {shown.region!r} ({shown.files.cert}) {problem}",
            fix=_fix(directory, shown.region),
        )


def _problems(
    directory: Path, held: Sequence[_Held], now: dt.datetime
) -> Iterator[tuple[_Held, str]]:
    """Return the regions with invalid certificates, with reasons."""
    folder = ca_path(directory)
    if folder.exists():  # identifies the foreign one; a bridge's host has no such file
        cas = cas_of(directory)
        for shown in held:
            if not any(is_issued_by(shown.cert, ca) for ca in cas):
                yield shown, f"is from another CA than {folder}"
    for shown in held:
        for by in held:
            if problem := _problem(shown, by, now):
                yield shown, problem


def _held(directory: Path, region: str) -> _Held:
    files = files_of(directory, region)
    try:
        material = files.read()
        client_context(files, material)  # fits the key, and is what OpenSSL takes
        return _Held(
            region,
            files,
            read_cert(material.cert_pem),
            tuple(x509.load_pem_x509_certificates(material.ca_pem)),
            revoked_serials(material.crl_pem, material.ca_pem),
        )
    except CertificateError as error:
        raise CertificateError(
            f"the certificate of region {region!r}: {error.message}",
            fix=_fix(directory, region),
        ) from None


def _problem(shown: _Held, by: _Held, now: dt.datetime) -> str:
    """Return why region ``by`` would refuse ``shown``'s certificate; "" if it accepts it."""
    issuers = [ca for ca in by.cas if is_issued_by(shown.cert, ca)]
    if not issuers:
        return f"is from another CA than {by.files.ca}"
    if shown.cert.serial_number in by.revoked:
        return f"was revoked ({by.files.crl})"
    if not _names(shown.cert, shown.region):
        return "is that of another region"
    if now < shown.cert.not_valid_before_utc:
        return f"is not valid before {shown.cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    if now >= shown.cert.not_valid_after_utc:
        return f"has expired on {shown.cert.not_valid_after_utc:%Y-%m-%d}"
    if all(now >= ca.not_valid_after_utc for ca in issuers):
        return f"is of a CA that has expired ({by.files.ca})"
    return ""


def _names(cert: x509.Certificate, region: str) -> bool:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    uri = region_uri(region)
    return uri in names.get_values_for_type(x509.UniformResourceIdentifier)


def _fix(directory: Path, region: str) -> str:
    where = f"--dir {shlex.quote(str(directory))}"
    return (
        f"See `geo-ray certs show {where}` on the host that has the CA; issue it with "
        f"`geo-ray certs issue {region} {where} --force`, or renew it."
    )
