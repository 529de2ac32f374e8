"""Contract of secret stores, for every cloud."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from geo_ray.base.errors import CloudError, ProviderRefusedError, ProviderUnreachableError
from geo_ray.cloud.secrets import KINDS, SecretStore, open_secrets
from tests.support.cloud_servers import LoopbackCloud, as_caller, shows_no_secret
from tests.support.cvm_server import CvmServer
from tests.support.ec2_frontend import Ec2Frontend

VALUE = "pa55-canary-ümläut\nsecond line"


class Kind:
    """Kind of a secret store, with its cloud."""

    def __init__(self, kind: str, place: str, endpoint: str | None) -> None:
        self.kind, self.place, self.endpoint = kind, place, endpoint

    def open(self) -> SecretStore:
        return open_secrets(self.kind, self.place, self.endpoint)


@pytest.fixture(params=KINDS)
def kind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    as_caller(monkeypatch, tmp_path)
    if request.param == "file":
        yield Kind("file", str(tmp_path / "secrets"), None)
    elif request.param == "tencent-ssm":
        with LoopbackCloud(CvmServer()) as cloud:
            yield Kind(request.param, "ap-shanghai", cloud.url)
    else:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            front = Ec2Frontend(f"http://{host}:{port}")
            front.reset()
            with LoopbackCloud(front) as cloud:
                yield Kind(request.param, "us-east-1", cloud.url)
        finally:
            server.stop()


def test_what_was_put_is_got(kind: Kind) -> None:
    kind.open().put("geo-ray-token", VALUE)
    assert kind.open().get("geo-ray-token") == VALUE


def test_the_newest_value_counts_however_often_it_changes(kind: Kind) -> None:
    store = kind.open()
    for number in range(12):  # more than versions that any cloud keeps for nothing
        store.put("geo-ray-token", f"value {number}")
        assert store.get("geo-ray-token") == f"value {number}"


def test_names_may_be_paths_where_the_cloud_has_them(kind: Kind) -> None:
    store = kind.open()
    if kind.kind == "tencent-ssm":
        with pytest.raises(ProviderRefusedError, match="geo-ray/a"):
            store.put("geo-ray/a", VALUE)
        return
    store.put("geo-ray/a", "1")
    store.put("geo-ray-a", "2")
    assert (store.get("geo-ray/a"), store.get("geo-ray-a")) == ("1", "2")


def test_what_is_not_there_is_named_and_may_be_deleted(kind: Kind) -> None:
    store = kind.open()
    with pytest.raises(ProviderRefusedError, match="has no secret geo-ray-none"):
        store.get("geo-ray-none")
    store.delete("geo-ray-none")


def test_a_deleted_name_may_be_used_again_at_once(kind: Kind) -> None:
    store = kind.open()
    store.put("geo-ray-token", "old")
    store.delete("geo-ray-token")
    with pytest.raises(ProviderRefusedError, match="has no secret"):
        store.get("geo-ray-token")
    store.put("geo-ray-token", "new")
    assert store.get("geo-ray-token") == "new"


def test_a_machine_prints_it_in_its_first_minute(kind: Kind) -> None:
    kind.open().put("geo-ray-token", VALUE)
    asked = [sys.executable, "-m", "geo_ray.cloud.secrets"]
    asked += ["--store", kind.kind, "--region", kind.place]
    asked += ["--endpoint", kind.endpoint] if kind.endpoint else []
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run([*asked, "geo-ray-token"], capture_output=True, env=environment)
    assert (done.returncode, done.stdout.decode()) == (0, VALUE)
    failed = subprocess.run([*asked, "none"], capture_output=True, env=environment)
    assert failed.returncode == 11 and b"has no secret none" in failed.stderr
    assert shows_no_secret(failed.stderr.decode())


def test_wrong_credentials_differ_from_no_answer(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.endpoint is None:
        pytest.skip("files have neither")
    with LoopbackCloud(lambda request: (_ for _ in ()).throw(OSError)) as gone:
        address = gone.url
    from geo_ray.cloud.secrets import ParameterSecrets, SecretsManagerSecrets, TencentSecrets

    dead: SecretStore = {
        "aws-ssm": lambda: ParameterSecrets("us-east-1", {"ssm": address}, attempts=1),
        "aws-secretsmanager": lambda: SecretsManagerSecrets(
            "us-east-1", {"secretsmanager": address}, attempts=1
        ),
        "tencent-ssm": lambda: TencentSecrets("ap-shanghai", address, attempts=1),
    }[kind.kind]()
    with pytest.raises(ProviderUnreachableError):
        dead.get("geo-ray-token")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-key")
    monkeypatch.setenv("TENCENTCLOUD_SECRET_KEY", "wrong-key")
    with pytest.raises(ProviderRefusedError) as refused:
        kind.open().put("geo-ray-token", VALUE)
    assert shows_no_secret(str(refused.value)) and VALUE not in str(refused.value)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "secrets"
    open_secrets("file", str(root)).put("geo-ray-token", VALUE)
    (file,) = root.iterdir()
    assert root.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    for name in ("", ".hidden", "a\0b"):
        with pytest.raises(ProviderRefusedError):
            open_secrets("file", str(root)).get(name)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CloudError, match="vault"):
        open_secrets("vault", "here")
