"""AWS modules and examples, checked by Terraform without a cloud."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import hcl2
import pytest

from tests.support.terraform_support import INFRA, Terraform, aws_provider, copied

MODULES = sorted(path.parent.parent for path in INFRA.rglob("*.tftest.hcl"))
EXAMPLES = sorted(
    path
    for path in (INFRA / "examples").iterdir()
    if "tencent" not in (path / "versions.tf").read_text()
)


def relative(path: Path) -> str:
    return str(path.relative_to(INFRA))


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with aws_provider(tmp_path_factory.mktemp("provider")) as environment:
        yield environment


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_module_keeps_what_its_own_tests_say(
    module: Path, tmp_path: Path, provider: Mapping[str, str]
) -> None:
    terraform = Terraform(copied(tmp_path) / relative(module), provider)
    terraform.init()
    assert "0 failed" in terraform.run("test", "-no-color")


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_is_valid(example: Path, tmp_path: Path, provider: Mapping[str, str]) -> None:
    terraform = Terraform(copied(tmp_path) / relative(example), provider)
    terraform.init()
    found = terraform.json("validate", "-json")
    assert found["valid"] and found["warning_count"] == 0, found["diagnostics"]


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_a_peering_joins_the_networks_of_its_regions(example: Path) -> None:
    with (example / "main.tf").open() as file:
        modules = hcl2.load(file)["module"]
    names = set()
    for name, body in ((n.strip('"'), b) for each in modules for n, b in each.items()):
        if not body["source"].strip('"').endswith("/peering"):
            continue
        told = {
            str(key).strip("${}"): str(at).strip("${}") for key, at in body["providers"].items()
        }
        for end in ("from", "to"):
            region = told[f"aws.{end}"].removeprefix("aws.")
            assert body[end] == f"${{module.{region}.network}}", name
        names.add(name)
    regions = {each["alias"].strip('"') for each in provided(example)}
    assert len(names) == len(regions) * (len(regions) - 1) // 2


def provided(example: Path) -> list[dict[str, str]]:
    with (example / "providers.tf").open() as file:
        return [body for each in hcl2.load(file)["provider"] for body in each.values()]


def test_there_are_some() -> None:
    assert len(MODULES) >= 3 and len(EXAMPLES) == 2
