from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from geo_ray.base.errors import RayUnreachableError
from geo_ray.ray_cluster.connect import find_address
from geo_ray.ray_cluster.settings import (
    driver_environment,
    existing_driver_environment,
    local_node_environment,
    worker_environment,
)


def test_nodes_do_not_see_the_users_ray_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("MINE", "1")
    env = local_node_environment(Path("/x/token"))
    assert "RAY_ADDRESS" not in env
    assert env["MINE"] == "1"
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == "/x/token"


def test_worker_environment() -> None:
    assert worker_environment(environ={})["OMP_NUM_THREADS"] == "1"
    assert worker_environment({"OMP_NUM_THREADS": "4", "A": "b"}, {})["OMP_NUM_THREADS"] == "4"
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": {"A": "c"}}})}
    assert "A" not in worker_environment({"A": "b"}, job)
    for empty in ("", "{}", '{"runtime_env": null}', '{"runtime_env": {}}'):
        assert worker_environment({"A": "b"}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": empty})["A"] == "b"


def test_driver_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    before = dict(os.environ)
    changes = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/x"}
    with pytest.raises(KeyError), driver_environment(changes):
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == "/x"
        raise KeyError
    assert dict(os.environ) == before


def test_authentication_of_an_existing_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert existing_driver_environment({}) == {"RAY_AUTH_MODE": "disabled"}
    assert existing_driver_environment({"RAY_AUTH_TOKEN": "t"}) == {"RAY_AUTH_MODE": "token"}
    assert existing_driver_environment({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert existing_driver_environment({}) == {"RAY_AUTH_MODE": "token"}


def test_address_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_address("auto") == "10.0.0.1:6379"
    assert find_address("head.example:7000") == "head.example:7000"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.2:6379\n")
    assert find_address("auto") == "10.0.0.2:6379"


@pytest.mark.parametrize("address", ["", "head", "ray://head:10001", "http://head:8265", "head:x"])
def test_bad_address(address: str) -> None:
    with pytest.raises(RayUnreachableError, match="not the address of a Ray head"):
        find_address(address)


def test_actors_of_a_local_cluster_inherit_their_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    node = local_node_environment(tmp_path / "token")
    assert worker_environment(environ={}).items() <= node.items()
