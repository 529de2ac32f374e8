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
    """Make the deployment's certificate authority (CA); keep its ``ca.key`` to yourself.

    Args:
        directory: where; made if it is not there.
        days: validity.
        force: replace a CA; every region needs a new certificate then.

    Returns:
        The CA's certificate.

    Raises:
        CertificateError: there is a CA already, or nothing can be written.
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
    """Make the key and the certificate of a region.

    Args:
        directory: the deployment's.
        region: its name.
        days: validity.
        hosts: names or IPs to mention; they are not checked.
        force: replace what the region has.

    Returns:
        The folder to be copied to the host of the region's bridge.

    Raises:
        CertificateError: the region has one already, there is no CA, or nothing can be written.
    """
    return Path(cert_store.issue(Path(directory), region, days, hosts, force=force).cert).parent


@dataclass(frozen=True, repr=False)
class CertificateList:
    """Certificates of a deployment, the CA's first.

    Attributes:
        entries: whose, from when to when, and what is wrong.
        at: when they were looked at.
    """

    entries: tuple[CertificateEntry, ...]
    at: dt.datetime

    @property
    def bad(self) -> tuple[CertificateEntry, ...]:
        """Those that cannot be used now."""
        return tuple(entry for entry in self.entries if not entry.is_usable(self.at))

    def table(self) -> Table:
        """A row per certificate."""
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
        return f"<Certificates: {len(self.bad)} of {len(self.entries)} cannot be used>"

    def _repr_html_(self) -> str:
        rows = [
            (row["certificate"], row["not_after"], f"{row['left_days']:.0f}", row["state"])
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], ("certificate", "expires", "days left", "state"), rows)


def certs(directory: FilePath) -> CertificateList:
    """List the certificates of a deployment and say which can be used.

    Raises:
        CertificateError: one cannot be read.
    """
    return CertificateList(tuple(cert_store.entries(Path(directory))), dt.datetime.now(dt.UTC))


def renew_certs(
    directory: FilePath, regions: Sequence[str] = (), *, days: float = REGION_DAYS
) -> Mapping[str, Path]:
    """Give certificates of regions new dates; their keys stay.

    Args:
        directory: the deployment's.
        regions: whose; none: all that are not revoked.
        days: validity.

    Returns:
        By region, the certificate to be copied to the host of its bridge.

    Raises:
        CertificateError: there is nothing to renew, one that is named is revoked, or nothing can
            be written.
    """
    place = Path(directory)
    names = regions or [
        name for name in cert_store.regions_of(place) if not cert_store.is_revoked(place, name)
    ]
    return {name: Path(cert_store.renew(place, name, days).cert) for name in names}


def revoke_cert(directory: FilePath, region: str) -> tuple[Path, ...]:
    """Shut a region out: no certificate counts that it was ever issued.

    Bridges notice within seconds of the list's arrival on their hosts, and end the links that they
    have with the region.

    Args:
        directory: the deployment's, with the CA's key.
        region: its name.

    Returns:
        The lists, to be copied to the hosts of the bridges.

    Raises:
        CertificateError: there is nothing to revoke, or nothing can be written.
    """
    return tuple(cert_store.revoke(Path(directory), region))


def rotate_ca(
    directory: FilePath, *, days: float = CA_DAYS, finish: bool = False
) -> tuple[str, ...]:
    """Replace the CA while runs go on: first both count, then only the new one.

    Args:
        directory: the deployment's.
        days: validity of the new CA.
        finish: end it: all regions have certificates of the new CA by now.

    Returns:
        The regions to whose bridge's host ``ca.pem`` is to be copied.

    Raises:
        CertificateError: there is no CA, it is too early, or nothing can be written.
    """
    place = Path(directory)
    names = cert_store.finish_rotation(place) if finish else cert_store.rotate_ca(place, days)
    return tuple(names)


def renew_ca(directory: FilePath, *, days: float = CA_DAYS) -> tuple[str, ...]:
    """Give the CA new dates; certificates that it issued stay valid.

    Args:
        directory: the deployment's.
        days: validity.

    Returns:
        The regions whose bridges need the new ``ca.pem``.

    Raises:
        CertificateError: there is no CA, or nothing can be written.
    """
    return tuple(cert_store.renew_ca(Path(directory), days))
