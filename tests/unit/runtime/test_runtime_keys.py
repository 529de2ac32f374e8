"""How keys get to the processes of a run: nothing that passes between them is secret."""

from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import CertificateError, TransportError
from geo_ray.ray_cluster.keys import LAN_KEY, BridgeSecrets, RunKeys
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.certs import Authority, read_cert, read_key
from geo_ray.transport.security.process_keys import (
    OwnCertificate,
    SecretReceiver,
    SignedCertificate,
    seal_secret,
)
from geo_ray.transport.security.tls import TlsBytes

NOW = dt.datetime(2026, 11, 23, tzinfo=dt.UTC)


def test_only_the_process_that_it_is_sealed_for_can_open_a_secret() -> None:
    me, other = SecretReceiver(), SecretReceiver()
    sealed = seal_secret(b"s" * 32, me.public, "lan")
    assert me.open(sealed, "lan") == b"s" * 32
    assert seal_secret(b"s" * 32, me.public, "lan") != sealed
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for receiver, box, purpose in [
        (other, sealed, "lan"),
        (me, sealed, "wan"),
        (me, changed, "lan"),
        (me, b"", "lan"),
        (me, bytes(80), "lan"),
    ]:
        with pytest.raises(TransportError, match="not meant for this process"):
            receiver.open(box, purpose)


def test_messages_contain_no_keys() -> None:
    """Byte by byte: keys of the run, of its CA, of bridges and of processes."""
    config = TransportConfig()
    keys = RunKeys("run-1", ["eu", "us"], config)
    bridges = {region: BridgeSecrets(region, config) for region in ("eu", "us")}
    told = {region: bridge.introduce() for region, bridge in bridges.items()}
    given = {region: keys.for_bridge(region, told[region]) for region in bridges}
    certificates = {r: b.certificate(given[r].signed) for r, b in bridges.items()}
    passed = pickle.dumps([told, given])

    assert keys._authority is not None
    private: list[Any] = [keys._authority._key]
    for certificate in certificates.values():
        assert isinstance(certificate, TlsBytes)
        private.append(read_key(certificate.key_pem))
        assert certificate.key_pem not in passed
    assert b"PRIVATE KEY" not in passed
    for key in private:
        assert key.private_numbers().private_value.to_bytes(32, "big") not in passed
    for bridge in bridges.values():
        assert bridge._receiver._key.private_bytes_raw() not in passed
    wan = {bridge.wan_key(given[region]) for region, bridge in bridges.items()}
    lan = {bridge.lan_key(given[region]) for region, bridge in bridges.items()}
    assert len(wan) == 1 and len(lan) == 2 and not wan & lan  # a region's worker is no bridge
    for secret in wan | lan:
        assert secret not in passed

    for holder in (keys, *bridges.values(), keys._authority):
        with pytest.raises(TypeError):
            pickle.dumps(holder)


def test_a_bridge_gets_certificates_of_its_own_region_only() -> None:
    keys = RunKeys("run-1", ["eu", "us"], TransportConfig())
    eu = BridgeSecrets("eu", TransportConfig())
    with pytest.raises(CertificateError, match="asks for a certificate of"):
        keys.for_bridge("us", eu.introduce())
    made = eu.certificate(keys.for_bridge("eu", eu.introduce()).signed)
    assert isinstance(made, TlsBytes)
    stranger = OwnCertificate("eu")
    stranger.request()
    with pytest.raises(CertificateError, match="has not made"):
        stranger.accept(SignedCertificate(made.ca_pem, made.cert_pem))
    with pytest.raises(CertificateError, match="no request"):
        keys.sign("eu", b"nothing")


@pytest.mark.parametrize("options", [{"tls": "off"}, {}, {"tls": "off", "certs": "none"}])
def test_without_tls_or_with_certificates_of_ones_own_none_is_asked_for(
    options: dict[str, str], tmp_path: Path
) -> None:
    cert_store.init(tmp_path)
    cert_store.issue(tmp_path, "eu")
    config = TransportConfig.model_validate(options or {"certs": str(tmp_path)})
    keys, eu = RunKeys("run-1", ["eu"], config), BridgeSecrets("eu", config)
    told = eu.introduce()
    assert told.request_pem is None
    given = keys.for_bridge("eu", told)
    assert given.signed is None and eu.renewal() is None
    found = eu.certificate(given.signed)
    assert getattr(found, "cert", None) == (
        None if config.certs is None else f"{config.certs}/regions/eu/cert.pem"
    )
    assert given.lan is not None and eu._receiver.open(given.lan, LAN_KEY) == eu.lan_key(given)


def test_a_bridge_refuses_an_unusable_certificate_on_its_host(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        cert_store.init(tmp_path / name)
        cert_store.issue(tmp_path / name, "eu")
    eu = BridgeSecrets("eu", TransportConfig(certs=str(tmp_path / "ours")))
    assert eu.certificate(None) is not None
    for file in ("cert.pem", "key.pem"):
        stray = (tmp_path / "theirs/regions/eu" / file).read_bytes()
        (tmp_path / "ours/regions/eu" / file).write_bytes(stray)
    with pytest.raises(CertificateError, match=r"region 'eu'.*cert.pem.*is from another CA"):
        eu.certificate(None)


def test_a_certificate_is_renewed_at_half_of_its_life_with_another_key() -> None:
    authority, own = Authority.create("run", now=NOW), OwnCertificate("eu")

    def answered(request: bytes, now: dt.datetime) -> TlsBytes:
        pem = authority.sign("eu", request, 2.0, now)
        return own.accept(SignedCertificate(authority.cert_pem, pem))

    assert own.renewal(NOW) is None  # it has not asked yet
    first = answered(own.request(NOW), NOW)
    assert own.renewal(NOW + dt.timedelta(hours=23)) is None
    later = NOW + dt.timedelta(hours=25)
    request = own.renewal(later)
    assert request is not None and own.renewal(later) is None  # it waits for the answer
    assert own.renewal(later + dt.timedelta(minutes=2)) is not None  # which was lost
    second = answered(request, later)  # and comes all the same
    assert first.key_pem != second.key_pem
    assert read_cert(second.cert_pem).not_valid_after_utc == later + dt.timedelta(days=2)
    assert own.renewal(later) is None
