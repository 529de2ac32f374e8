"""Certificates of a deployment: `init_certs`, `issue_cert`, `certs`, `renew_certs`, `renew_ca`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.api.config import FilePath
from geo_ray.api.display import Table
from geo_ray.base.notebooks import html_view
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.cert_store import CertificateEntry
from geo_ray.transport.security.certs import CA_DAYS, REGION_DAYS


def init_certs(directory: FilePath, *, days: float = CA_DAYS, force: bool = False) -> Path:
    """Create the certificate authority (CA) of a deployment; keep its ``ca.key`` private.

    Args:
        directory: directory of the deployment; created if missing.
        days: validity.
        force: replace an existing CA; every region then needs a new certificate.

    Returns:
        Path of the CA certificate.

    Raises:
        CertificateError: a CA exists already, or a file cannot be written.
    """
    cert_store.init(Path(directory), days, force=force)
    return cert_store.ca_path(Path(directory))


def issue_cert(
    directory: FilePath,
    region: str,
    *,
    days: float = REGION_DAYS,
    hosts: Sequence[str] = (),
    force: bool = False,
) -> Path:
    """Create the key and certificate of a region.

    Args:
        directory: directory of the deployment.
        region: name of the region.
        days: validity.
        hosts: host names or IPs in the certificate; informative only.
        force: replace an existing key and certificate.

    Returns:
        The folder to copy to the host of the region's bridge.

    Raises:
        CertificateError: the region has a certificate, the CA is missing, or a file cannot be
            written.
    """
    return Path(cert_store.issue(Path(directory), region, days, hosts, force=force).cert).parent


@dataclass(frozen=True, repr=False)
class CertificateList:
    """Certificates of a deployment, the CA's first.

    Attributes:
        entries: owner, validity and defect of each certificate.
        at: time of the check.
    """

    entries: tuple[CertificateEntry, ...]
    at: dt.datetime

    @property
    def bad(self) -> tuple[CertificateEntry, ...]:
        """Certificates that are not valid now."""
        return tuple(entry for entry in self.entries if not entry.is_usable(self.at))

    def table(self) -> Table:
        """Return a row per certificate."""
        rows = [
            {
                "certificate": entry.name,
                "not_before": f"{entry.not_before:%Y-%m-%d}",
                "not_after": f"{entry.not_after:%Y-%m-%d}",
                "left_days": entry.left_days(self.at),
                "state": entry.state(self.at),
                "hosts": " ".join(entry.hosts),
            }
            for entry in self.entries
        ]
        return Table(rows)

    def __repr__(self) -> str:
        return f"<Certificates: {len(self.bad)} of {len(self.entries)} not valid>"

    def _repr_html_(self) -> str:
        rows = [
            (row["certificate"], row["not_after"], f"{row['left_days']:.0f}", row["state"])
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], ("certificate", "expires", "days left", "state"), rows)


def certs(directory: FilePath) -> CertificateList:
    """List the certificates of a deployment and their validity.

    Raises:
        CertificateError: a certificate cannot be read.
    """
    return CertificateList(tuple(cert_store.entries(Path(directory))), dt.datetime.now(dt.UTC))


def renew_certs(
    directory: FilePath, regions: Sequence[str] = (), *, days: float = REGION_DAYS
) -> Mapping[str, Path]:
    """Renew certificates of regions; their keys do not change.

    Args:
        directory: directory of the deployment.
        regions: names of the regions; empty: all regions that are not revoked.
        days: validity.

    Returns:
        By region, the certificate to copy to the host of its bridge.

    Raises:
        CertificateError: no certificate exists, a named one is revoked, or a file cannot be
            written.
    """
    place = Path(directory)
    names = regions or [
        name for name in cert_store.regions_of(place) if not cert_store.is_revoked(place, name)
    ]
    return {name: Path(cert_store.renew(place, name, days).cert) for name in names}


def revoke_cert(directory: FilePath, region: str) -> tuple[Path, ...]:
    """Revoke all certificates of a region.

    Bridges apply the revocation within seconds after the list arrives on their hosts, and close
    their links to the region.

    Args:
        directory: directory of the deployment, with the CA's key.
        region: name of the region.

    Returns:
        The revocation lists to copy to the hosts of the bridges.

    Raises:
        CertificateError: there is no certificate, or a file cannot be written.
    """
    return tuple(cert_store.revoke(Path(directory), region))


def rotate_ca(
    directory: FilePath, *, days: float = CA_DAYS, finish: bool = False
) -> tuple[str, ...]:
    """Replace the CA of active runs: first both CAs are valid, then only the new one.

    Args:
        directory: directory of the deployment.
        days: validity of the new CA.
        finish: finish the rotation, after all regions have certificates of the new CA.

    Returns:
        The regions whose bridge hosts need the new ``ca.pem``.

    Raises:
        CertificateError: there is no CA, it is too early to finish, or a file cannot be written.
    """
    place = Path(directory)
    names = cert_store.finish_rotation(place) if finish else cert_store.rotate_ca(place, days)
    return tuple(names)


def renew_ca(directory: FilePath, *, days: float = CA_DAYS) -> tuple[str, ...]:
    """Renew the CA; certificates that it issued stay valid.

    Args:
        directory: directory of the deployment.
        days: validity.

    Returns:
        The regions whose bridges need the new ``ca.pem``.

    Raises:
        CertificateError: there is no CA, or a file cannot be written.
    """
    return tuple(cert_store.renew_ca(Path(directory), days))
