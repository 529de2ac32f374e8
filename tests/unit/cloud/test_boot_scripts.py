"""Terraform's machines boot like launched machines; needs no provider."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from geo_ray.cloud.boot_script import boot_script
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.provider import LaunchRequest, Market, Pool
from geo_ray.experiment.provider import NodeJoin
from tests.support.terraform_support import INFRA, Terraform, terraform_program

LABELS = {
    "ray.io/availability-region": "eu-west",
    "ray.io/node-group": "g5.xlarge",
    "ray.io/market-type": "spot",
    "geo-ray/role": "worker",
}
TLS = {"tls_certificate": "geo-ray/x/cert", "tls_key": "geo-ray/x/key", "tls_ca": "geo-ray/x/ca"}
PEER = {"public_key": base64.b64encode(bytes(32)).decode(), "address": "192.0.2.7"}

STATE = "s3://x-runs-1/clusters/x?region=eu-central-1"

CASES = {
    "aws": ("aws", "aws-secretsmanager", {}),
    "aws_tls": ("aws", "aws-ssm", TLS),
    "tencent": ("tencent", "tencent-ssm", {}),
    "tencent_tls": ("tencent", "tencent-ssm", TLS),
}


def join_of(store: str, tls: dict[str, str]) -> dict[str, str]:
    return {
        "address": "10.20.128.10:6379",
        "store": store,
        "region": "eu-central-1",
        "token": "geo-ray/x/token",
        "python": "/opt/geo_ray/bin/python",
        **tls,
    }


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return every script of the modules, from one run of Terraform."""
    terraform_program()
    modules = {
        name: {
            "source": str(INFRA / "modules" / "boot"),
            "cloud": cloud,
            "labels": LABELS,
            "join": join_of(store, tls),
        }
        for name, (cloud, store, tls) in CASES.items()
    }
    modules["head"] = {
        "source": str(INFRA / "modules" / "boot"),
        "cloud": "aws",
        "labels": LABELS | {"geo-ray/role": "head"},
        "join": join_of("aws-secretsmanager", {}),
        "state_device": "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol0123",
    }
    for cloud, keys in (("aws", None), ("tencent", "geo-ray/x/keys")):
        modules[f"head_{cloud}_serves"] = modules["head"] | {
            "cloud": cloud,
            "join": join_of(f"{cloud}-ssm", {}),
            "serves": {"state": STATE, "keys_secret": keys},
        }
    modules |= {
        f"tunnel_{cloud}": {
            "source": str(INFRA / "modules" / "tunnel"),
            "cloud": cloud,
            "secret": {"store": f"{cloud}-ssm", "region": "here", "name": "key"},
            "peers": [{**PEER, "cidr": "10.30.0.0/16"}, {**PEER, "cidr": "10.31.0.0/16"}],
        }
        for cloud in ("aws", "tencent")
    }
    directory = tmp_path_factory.mktemp("boot")
    outputs = {name: {"value": f"${{module.{name}.script}}"} for name in modules}
    (directory / "main.tf.json").write_text(json.dumps({"module": modules, "output": outputs}))
    terraform = Terraform(directory)
    terraform.init(providers=False)
    terraform.run("apply", "-auto-approve", "-input=false", "-no-color")
    return {name: held["value"] for name, held in terraform.json("output", "-json").items()}


@pytest.mark.parametrize("name", CASES)
def test_a_node_of_terraform_boots_as_a_rented_one(scripts: dict[str, str], name: str) -> None:
    cloud, store, tls = CASES[name]
    pool = Pool("eu-central-1", None, "g5.xlarge", Market.SPOT)
    join = NodeJoin(
        address="10.20.128.10:6379",
        token_secret="geo-ray/x/token",
        secrets_region="eu-central-1",
        **{f"{key}_secret": value for key, value in tls.items()},
    )
    request = LaunchRequest("r", "c", pool, 1, LABELS)
    assert scripts[name] == boot_script(request, join, cloud, store)  # type: ignore[arg-type]


def test_a_head_begins_like_a_node_and_keeps_its_state(scripts: dict[str, str]) -> None:
    node, head = scripts["aws"], scripts["head"]
    begin = node[: node.index("systemd-run")]
    assert head.startswith(begin)
    rest = head.removeprefix(begin)
    assert "--head --port=6379 --num-cpus=0" in rest
    assert "--dashboard-host=127.0.0.1" in rest
    assert "RAY_gcs_storage=rocksdb" in rest
    assert "vol0123" in rest
    assert rest.index("mount /dev") < rest.index("chown -R geo-ray: /var/lib/geo_ray")
    assert rest.index("chown") < rest.index("systemd-run")


def test_no_unit_runs_as_root(scripts: dict[str, str]) -> None:
    for name in (*CASES, *HEADS):
        units = [line for line in scripts[name].splitlines() if line.startswith("systemd-run")]
        assert units and all(" --uid=geo-ray " in unit for unit in units), name


def test_a_head_serves_the_cluster_that_is_written_where_it_looks(scripts: dict[str, str]) -> None:
    assert "geo_ray.cloud.cluster.serve" not in scripts["head"]
    serve = f"-m geo_ray.cloud.cluster.serve --stays '{STATE}'\n"
    for cloud, has_keys in (("aws", False), ("tencent", True)):
        script = scripts[f"head_{cloud}_serves"]
        assert script.endswith(serve)
        assert script.index("--head --port") < script.index(serve)
        assert ("AWS_SHARED_CREDENTIALS_FILE=/run/geo_ray/" in script) == has_keys
        assert "RAY_USE_TLS=0" in script, "a file of credentials is no certificate"
    # Where `geo-ray up` writes it.
    assert ClusterState.below("s3://x-runs-1/clusters?region=eu-central-1", "x").uri == STATE


HEADS = ("head", "head_aws_serves", "head_tencent_serves")


@pytest.mark.parametrize("name", [*CASES, *HEADS, "tunnel_aws", "tunnel_tencent"])
def test_scripts_are_ones_that_a_shell_understands(
    scripts: dict[str, str], name: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.sh"
    script.write_text(scripts[name])
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert scripts[name].startswith("#!/bin/bash\n")
    assert len(scripts[name]) < 16384  # the most that EC2 takes


def test_a_tunnel_has_each_peer(scripts: dict[str, str]) -> None:
    for cidr in ("10.30.0.0/16", "10.31.0.0/16"):
        assert f"endpoint 192.0.2.7:51820 allowed-ips {cidr}" in scripts["tunnel_aws"]
    assert "METADATA" in scripts["tunnel_tencent"]
    assert "METADATA" not in scripts["tunnel_aws"]


def test_what_a_shell_would_run_is_refused(tmp_path: Path) -> None:
    wrong = [
        {"join": {"token": "x; reboot"}},
        {"join": {"address": "$(id):6379"}},
        {"join": {"python": "/bin/x y"}},
        {"serves": {"state": "s3://x/c'; reboot; '"}},
        {"serves": {"state": STATE, "keys_secret": "x; reboot"}},
    ]
    for number, held in enumerate(wrong):
        module = {
            "source": str(INFRA / "modules" / "boot"),
            "cloud": "aws",
            "labels": LABELS,
            "join": join_of("aws-ssm", {}) | held.pop("join", {}),
            "state_device": "/dev/vdb",
            **held,
        }
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "main.tf.json").write_text(json.dumps({"module": {"x": module}}))
        terraform = Terraform(directory)
        terraform.init(providers=False)
        with pytest.raises(AssertionError, match="Invalid value for variable"):
            terraform.run("plan", "-input=false", "-no-color")


def test_files_are_formatted() -> None:
    Terraform(INFRA).run("fmt", "-check", "-recursive", "-no-color")
