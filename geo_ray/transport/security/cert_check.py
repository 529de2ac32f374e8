"""Would the certificates of a deployment's regions be taken by each other? Looked at on disk.

A link between loopback addresses needs none, so that nothing else would tell that one is wrong.
"""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from geo_ray.errors import CertificateError
from geo_ray.transport.security.cert_store import ca_path, cas_of, files_of
from geo_ray.transport.security.certs import is_issued_by, read_cert
from geo_ray.transport.security.revocation import revoked_serials
from geo_ray.transport.security.tls import TlsFiles, client_context, region_uri


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
        directory: the deployment's, or what of it lies on this host.
        regions: whose certificates lie there.
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
    """Whose certificate is wrong, and why."""
    home = ca_path(directory)
    if home.exists():  # says which is the stranger; a bridge's host has no such file
        cas = cas_of(directory)
        for shown in held:
            if not any(is_issued_by(shown.cert, ca) for ca in cas):
                yield shown, f"is from another CA than {home}"
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
    """What region ``by`` would not take of ``shown``'s certificate; "" if it takes it."""
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
