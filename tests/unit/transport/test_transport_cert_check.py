"""Certificates that another region would not take are named before anything uses them."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from geo_ray.base.errors import CertificateError
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.cert_store import check_certificates

REGIONS = ("eu", "us")
LATER = dt.datetime.now(dt.UTC) + dt.timedelta(days=400)


def deployment(home: Path) -> Path:
    cert_store.init(home)
    for region in REGIONS:
        cert_store.issue(home, region)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return deployment(tmp_path / "certs")


def test_whole_deployments_pass_also_while_their_ca_is_replaced(home: Path) -> None:
    check_certificates(home, REGIONS)
    cert_store.rotate_ca(home)
    check_certificates(home, REGIONS)
    cert_store.renew(home, "eu")
    check_certificates(home, REGIONS)
    cert_store.renew(home, "us")
    cert_store.finish_rotation(home)
    check_certificates(home, REGIONS)


def of_another_ca(home: Path) -> None:
    """Only one folder of another deployment: whole in itself."""
    other = deployment(home.parent / "other")
    shutil.rmtree(home / "regions/us")
    shutil.copytree(other / "regions/us", home / "regions/us")


def other_certificate(home: Path) -> None:
    other = deployment(home.parent / "other")
    for file in ("cert.pem", "key.pem"):
        shutil.copy(other / "regions/us" / file, home / "regions/us" / file)


def of_another_region(home: Path) -> None:
    for file in ("cert.pem", "key.pem"):
        shutil.copy(home / "regions/eu" / file, home / "regions/us" / file)


def with_a_key_of_another(home: Path) -> None:
    shutil.copy(home / "regions/eu/key.pem", home / "regions/us/key.pem")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (of_another_ca, "is from another CA than"),
        (other_certificate, "is from another CA than"),
        (of_another_region, "is that of another region"),
        (with_a_key_of_another, "the key does not belong to the certificate"),
        (lambda home: cert_store.revoke(home, "us"), "was revoked"),
        (lambda home: (home / "regions/us/cert.pem").unlink(), "cannot read"),
        (lambda home: cert_store.issue(home, "us", 0.001, force=True), "has expired on"),
        (lambda home: (home / "regions/us/ca.pem").write_text("no PEM"), "cannot be used"),
    ],
)
def test_errors_are_reported_with_region_and_file(
    spoil: Callable[[Path], object], said: str, home: Path
) -> None:
    spoil(home)
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    with pytest.raises(CertificateError) as caught:
        check_certificates(home, REGIONS, soon)
    message = caught.value.message
    assert said in message and "region 'us'" in message and f"{home}/regions/us/" in message
    assert f"certs issue us --dir {home} --force" in caught.value.fix


def test_a_strange_folder_is_found_where_there_is_no_ca_of_the_deployment(home: Path) -> None:
    (home / "ca.pem").unlink()
    check_certificates(home, REGIONS)
    of_another_ca(home)
    check_certificates(home, ("us",))  # whole in itself
    with pytest.raises(CertificateError, match=r"is from another CA than .*regions/us/ca.pem"):
        check_certificates(home, REGIONS)


def test_dates_count(home: Path) -> None:
    with pytest.raises(CertificateError, match=r"region 'eu'.*has expired on"):
        check_certificates(home, REGIONS, LATER)
    with pytest.raises(CertificateError, match="is not valid before"):
        check_certificates(home, REGIONS, LATER - dt.timedelta(days=800))


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_host_with_a_late_clock_accepts_fresh_certificates(home: Path, minutes: int) -> None:
    check_certificates(home, REGIONS, dt.datetime.now(dt.UTC) + dt.timedelta(minutes=minutes))
