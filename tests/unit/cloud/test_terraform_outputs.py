"""Terraform outputs: valid stacks, and a separate message for each mistake."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import TerraformOutputsError
from geo_ray.base.load import load_tree
from geo_ray.base.yaml import parse_yaml
from geo_ray.cli.main import root
from geo_ray.cloud.terraform import aws_config, read_stack, tencent_config
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import load_plan

ROOT = Path(__file__).parents[3]
MACHINES = [{"type": "g5.xlarge", "cap": 4, "markets": ["on_demand", "spot"]}]


def stack() -> dict[str, Any]:
    aws = {"store": "aws-secretsmanager", "region": "eu-central-1", "token": "geo-ray/x/token"}
    tencent = {"store": "tencent-ssm", "region": "ap-singapore", "token": "geo-ray-x-token"}
    off = {"tls_certificate": None, "tls_key": None, "tls_ca": None}
    return {
        "version": 1,
        "stack": "x",
        "cluster": "y",
        "head": {"region": "eu", "address": "10.21.128.10:6379", "machine": "i-0abc"},
        "secrets": {"aws": aws | off, "tencent": tencent | off},
        "runs": "s3://x-runs-1/runs?region=eu-central-1",
        "places": {
            "eu": {
                "cloud": "aws",
                "at": "eu-central-1",
                "machines": MACHINES,
                "server": "m5.2xlarge",
                "data": "s3://x-data-1?region=eu-central-1",
                "pools": {"a": {"type": "t", "market": "spot", "role": "worker", "count": 2}},
                "groups": {"a": "x-a-1"},
                "aws": {
                    "image_id": "ami-0abc",
                    "subnets": {"eu-central-1a": "subnet-1"},
                    "security_group_ids": ["sg-1"],
                    "instance_profile": "x-nodes-eu",
                    "volume_gb": 100,
                    "root_device": "/dev/sda1",
                },
                "tencent": None,
            },
            "sg": {
                "cloud": "tencent",
                "at": "ap-singapore",
                "machines": [{"type": "GN7.2XLARGE32", "cap": 2, "markets": ["on_demand"]}],
                "server": None,
                "data": None,
                "pools": {},
                "groups": {},
                "aws": None,
                "tencent": {
                    "image_id": "img-1",
                    "vpc_id": "vpc-1",
                    "subnets": {"ap-singapore-3": "subnet-9"},
                    "security_group_ids": ["sg-9"],
                    "role": "x-nodes-sg",
                    "disk_gb": 100,
                },
            },
        },
    }


def written(path: Path, held: Any, *, whole: bool = True) -> Path:
    file = path / "outputs.json"
    output = {"geo_ray": {"sensitive": False, "type": "dynamic", "value": held}}
    file.write_text(json.dumps(output if whole else held))
    return file


def test_the_file_of_a_state_is_read_as_well(tmp_path: Path) -> None:
    printed = read_stack(written(tmp_path, stack()))
    state = {
        "version": 4,
        "terraform_version": "1.11.4",
        "outputs": {"geo_ray": {"value": stack(), "type": "dynamic"}},
        "resources": [{"mode": "managed"}],
    }
    file = tmp_path / "terraform.tfstate"
    file.write_text(json.dumps(state))
    assert read_stack(file) == printed
    file.write_text(json.dumps(state | {"outputs": {}}))
    with pytest.raises(TerraformOutputsError, match="nothing was applied"):
        read_stack(file)


@pytest.mark.parametrize("whole", [True, False], ids=["output -json", "output -json geo_ray"])
def test_a_stack_gives_the_providers_their_places(tmp_path: Path, whole: bool) -> None:
    read = read_stack(written(tmp_path, stack(), whole=whole))
    aws, tencent = aws_config(read), tencent_config(read)
    assert aws is not None and tencent is not None
    assert set(aws.places) == {"eu-central-1"} and set(tencent.places) == {"ap-singapore"}
    assert aws.places["eu-central-1"].instance_profile == "x-nodes-eu"
    assert tencent.places["ap-singapore"].subnets == {"ap-singapore-3": "subnet-9"}
    for config, token, region in (
        (aws, "geo-ray/x/token", "eu-central-1"),
        (tencent, "geo-ray-x-token", "ap-singapore"),
    ):
        join = config.join
        assert join is not None and join.address == "10.21.128.10:6379"
        assert (join.token_secret, join.secrets_region) == (token, region)
        assert join.tls_key_secret is None


def test_a_stack_of_one_cloud_has_no_other(tmp_path: Path) -> None:
    one = stack()
    del one["places"]["sg"]
    one["secrets"]["tencent"] = None
    read = read_stack(written(tmp_path, one))
    assert tencent_config(read) is None and aws_config(read) is not None


def changed(**paths: Any) -> dict[str, Any]:
    tree = stack()
    for path, value in paths.items():
        *way, last = path.split("__")
        at = tree
        for step in way:
            at = at[step]
        at[last] = value
    return tree


WRONG = {
    "version": (changed(version=2), "version"),
    "unknown key": (changed(more=1), "more"),
    "head elsewhere": (changed(head__region="us"), "not a region of the stack"),
    "no address": (changed(head__address="10.0.0.1"), "address"),
    "no secrets": (changed(secrets__tencent=None), "no secrets"),
    "a shell": (changed(secrets__aws__token="x; reboot"), "token"),
    "wrong cloud": (changed(places__sg__cloud="aws"), "requires cloud"),
    "one region twice": (
        changed(places__us=stack()["places"]["eu"]),
        "two regions are in the same cloud region",
    ),
    "no place": (changed(places={}), "places"),
    "image": (changed(places__eu__aws__image_id="img-1"), "image_id"),
    "head without a type": (changed(clusters="s3://x/c"), "no `type`"),
    "a folder for a shell": (changed(clusters="s3://x/c'; reboot"), "clusters"),
    "a name for a shell": (changed(cluster="y; reboot"), "cluster"),
    "cap": (changed(places__eu__machines=[{"type": "t", "cap": -1}]), "cap"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    tree, words = WRONG[name]
    with pytest.raises(TerraformOutputsError, match="is not valid") as caught:
        read_stack(written(tmp_path, tree))
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "nothing was applied"),
        ("[]", "nothing was applied"),
        ("[1]", "no output geo_ray"),
        ('{"other": {"value": 1}}', "no output geo_ray"),
        ('{"geo_ray": 3}', "no output geo_ray"),
    ],
)
def test_an_invalid_file_is_reported(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "outputs.json"
    file.write_text(text)
    with pytest.raises(TerraformOutputsError, match=words):
        read_stack(file)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TerraformOutputsError, match="cannot be read: No such file"):
        read_stack(tmp_path / "nothing.json")


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """Create a program with a name and a script."""
    file = tmp_path / "program"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    monkeypatch.setenv("GEO_RAY_TERRAFORM", str(file))
    directory = tmp_path / "stack"
    directory.mkdir()
    return directory


def test_a_directory_is_asked_through_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, stack())
    directory = program(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/words; cat {file}')
    assert read_stack(directory).cluster == "y"
    assert (tmp_path / "words").read_text().split()[0] == f"-chdir={directory}"


def test_what_the_program_refuses_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "echo '│ Error: Backend initialization required' >&2; exit 1"
    directory = program(tmp_path, monkeypatch, text)
    with pytest.raises(TerraformOutputsError, match="Backend initialization required"):
        read_stack(directory)


def test_a_missing_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEO_RAY_TERRAFORM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TerraformOutputsError, match="terraform is not installed") as caught:
        read_stack(tmp_path)
    assert "GEO_RAY_TERRAFORM" in caught.value.fix
    monkeypatch.setenv("GEO_RAY_TERRAFORM", str(tmp_path / "none"))
    with pytest.raises(TerraformOutputsError, match="cannot be run"):
        read_stack(tmp_path)


# ------------------------------------------------------------------ the verbs


def test_the_inventory_is_part_of_a_configuration(tmp_path: Path) -> None:
    """The printed inventory can be loaded, and lists the available machines."""
    file = written(tmp_path, stack())
    shown = CliRunner().invoke(root, ["inventory", "--from-terraform", str(file)])
    assert shown.exit_code == 0, shown.output
    tree = parse_yaml(shown.output, "").value
    assert isinstance(tree, dict)
    changes = [f"{key}={json.dumps(value)}" for key, value in tree.items()]
    regions = '[{"name": "eu", "workers": 1}, {"name": "sg", "workers": 1}]'
    loaded = load_tree(
        ROOT / "configs" / "quickstart.yaml",
        [f"regions={regions}", "averager={region: eu}", *changes],
        Experiment,
    )
    assert loaded.plan is not None
    (kind,) = loaded.plan.regions["eu"].machines
    assert (kind.type, kind.cap, kind.markets) == ("g5.xlarge", 4, ("on_demand", "spot"))
    assert loaded.plan.regions["sg"].cloud == "tencent"
    assert loaded.run.dir == stack()["runs"]


def test_the_inventory_as_json_is_all_that_the_stack_says(tmp_path: Path) -> None:
    file = written(tmp_path, stack())
    shown = CliRunner().invoke(root, ["inventory", "--from-terraform", str(file), "--json"])
    again = tmp_path / "again.json"
    again.write_text(shown.output)
    assert read_stack(again) == read_stack(file)


def test_a_plan_as_variables_has_the_machines_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs" / "planned.yaml")
    words = ["--set", "task.options={size: 0.1M}", "--out", "p.json", "--out-tfvars", "w.json"]
    made = CliRunner().invoke(root, ["plan", config, *words])
    assert made.exit_code == 0, made.output
    assert "written  w.json" in made.output
    workers = json.loads((tmp_path / "w.json").read_text())["workers"]
    plan = load_plan(tmp_path / "p.json")
    assert set(workers) == {region.region for region in plan.regions}
    for region in plan.regions:
        pools = list(workers[region.region].values())
        # Counted one by one, as a person would from the plan's table.
        planned = Counter(
            (each.type, each.market) for each in region.machines for _ in range(each.count)
        )
        rented = {(p["type"], p["market"]): p["count"] for p in pools if p["role"] == "worker"}
        assert rented == dict(planned)
        servers = [p for p in pools if p["role"] == "server"]
        assert [p["type"] for p in servers] == ([region.server] if region.server else [])
        assert all(p["count"] == 1 and p["market"] == "on_demand" for p in servers)
