"""A deployment's certificates while it goes on: what is revoked, and a CA that is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import CertificateError
from geo_ray.cli.certs import certs
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.certs import Authority, read_cert
from geo_ray.transport.security.tls import Credentials, TlsFiles, revoked_serials


def run(*arguments: object, error: type[Exception] | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(certs, [str(argument) for argument in arguments])
    if error is None:
        assert result.exit_code == code, result.output
    else:
        assert type(result.exception) is error, result.output
    return result


@pytest.fixture
def home(tmp_path: Path) -> Path:
    run("init", tmp_path)
    run("issue", "eu", "--dir", tmp_path)
    run("issue", "us", "--dir", tmp_path)
    return tmp_path


def serial(home: Path, region: str) -> int:
    return read_cert((home / "regions" / region / "cert.pem").read_bytes()).serial_number


def states(home: Path) -> dict[str, str]:
    found = cert_store.entries(home)
    return {entry.name: entry.state(entry.not_before) for entry in found}


def test_revoking_names_every_certificate_of_the_region(home: Path) -> None:
    first = serial(home, "eu")
    run("renew", "eu", "--dir", home)  # the earlier one stays valid, and so does its key
    second = serial(home, "eu")
    shown = run("revoke", "eu", "--dir", home).output.replace("\n", "")
    for region in ("eu", "us"):
        path = home / "regions" / region / "crl.pem"
        assert str(path) in shown
        assert revoked_serials(path.read_bytes(), (home / "ca.pem").read_bytes()) == {first, second}
    assert "REVOKED" in run("show", home, code=1).output
    assert serial(home, "us") not in {first, second}

    run("issue", "eu", "--dir", home, "--force")  # it may come back, with another key
    assert "REVOKED" not in run("show", home).output
    run("issue", "asia", "--dir", home)  # a new region is given the list, too
    run("revoke", "us", "--dir", home)
    listed = revoked_serials((home / "regions/asia/crl.pem").read_bytes(), _ca(home))
    assert listed == {first, second, serial(home, "us")}


def _ca(home: Path) -> bytes:
    return (home / "ca.pem").read_bytes()


def test_a_directory_of_an_earlier_release_can_revoke(home: Path) -> None:
    (home / "issued.jsonl").unlink()
    run("revoke", "eu", "--dir", home)
    assert revoked_serials((home / "crl.pem").read_bytes(), _ca(home)) == {serial(home, "eu")}
    run("revoke", "nowhere", "--dir", home, error=CertificateError)
    (home / "issued.jsonl").write_text("no json")
    run("revoke", "eu", "--dir", home, error=CertificateError)


def test_a_list_of_another_ca_or_a_broken_one_is_an_error(home: Path) -> None:
    files = TlsFiles.in_directory(home / "regions/eu")
    assert files.crl is not None
    Path(files.crl).write_bytes(Authority.create("another").crl([1]))
    with pytest.raises(CertificateError, match="not from this deployment"):
        Credentials(files)
    Path(files.crl).write_bytes(b"no list")
    with pytest.raises(CertificateError, match="no PEM text"):
        Credentials(files)
    run("init", home, "--force")
    run("issue", "eu", "--dir", home, "--force")
    Credentials(files)  # the list of the old CA went with it


def test_a_ca_is_replaced_while_certificates_of_both_count(home: Path) -> None:
    before = _ca(home)
    run("revoke", "us", "--dir", home)
    revoked = {serial(home, "us")}
    assert run("rotate", "--dir", home).output.splitlines()[0].endswith("eu, us")
    assert before in _ca(home) and _ca(home) != before
    assert (home / "regions/eu/ca.pem").read_bytes() == _ca(home)
    assert states(home)["eu"] == "renew: its CA is being replaced"
    run("show", home, code=1)  # us is revoked still
    run("rotate", "--dir", home, error=CertificateError)  # one at a time
    run("rotate", "--finish", "--dir", home, error=CertificateError)  # too early
    run("renew", "--ca", "--dir", home)  # dates of the new one; the old one stays trusted
    assert before in _ca(home)

    run("renew", "--dir", home)
    assert states(home)["eu"] == "good"
    run("rotate", "--finish", "--dir", home)
    assert before not in _ca(home)
    assert (home / "regions/us/ca.pem").read_bytes() == _ca(home)
    assert revoked == revoked_serials((home / "regions/eu/crl.pem").read_bytes(), _ca(home))
    Credentials(TlsFiles.in_directory(home / "regions/eu"))
    run("rotate", "--finish", "--dir", home, error=CertificateError)


def test_files_that_do_not_fit_together_leave_the_earlier_ones(home: Path) -> None:
    files = TlsFiles.in_directory(home / "regions/eu")
    used = Credentials(files)
    first = used.client
    used.refresh()
    assert used.client is first  # nothing has changed
    other = cert_store.files_of(home, "us")
    Path(files.cert).write_bytes(Path(other.cert).read_bytes())  # its key comes a moment later
    used.refresh()
    assert used.client is first
    Path(files.key).write_bytes(Path(other.key).read_bytes())
    used.refresh()
    assert used.client is not first


def test_a_revocation_is_permanent(home: Path) -> None:
    files = TlsFiles.in_directory(home / "regions/eu")
    used = Credentials(files)
    assert not used.revoked
    cert_store.revoke(home, "us")
    used.refresh()
    assert used.revoked == {serial(home, "us")}
    assert files.crl is not None
    Path(files.crl).unlink()
    used.refresh()
    assert used.revoked == {serial(home, "us")}


def test_revoked_certificates_get_no_new_dates(home: Path) -> None:
    run("revoke", "us", "--dir", home)
    before = serial(home, "us")
    refused = run("renew", "us", "--dir", home, error=CertificateError)
    assert f"issue us --dir {home} --force" in refused.exception.fix
    run("renew", "--dir", home)  # all others
    assert serial(home, "us") == before and states(home)["us"] == "REVOKED"
    # It does not stand in the way of a rotation either, and comes back with a new key.
    run("rotate", "--dir", home)
    run("renew", "--dir", home)
    run("rotate", "--finish", "--dir", home)
    run("issue", "us", "--dir", home, "--force")
    assert states(home)["us"] != "REVOKED" and serial(home, "us") != before
