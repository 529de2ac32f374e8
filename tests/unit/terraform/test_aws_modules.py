"""Modules and examples of AWS as Terraform itself checks them: no cloud is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.terraform_support import INFRA, Terraform, copied

MODULES = sorted(path.parent.parent for path in INFRA.rglob("*.tftest.hcl"))
EXAMPLES = sorted(
    path
    for path in (INFRA / "examples").iterdir()
    if "tencent" not in (path / "versions.tf").read_text()
)


def relative(path: Path) -> str:
    return str(path.relative_to(INFRA))


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_module_keeps_what_its_own_tests_say(module: Path, tmp_path: Path) -> None:
    terraform = Terraform(copied(tmp_path) / relative(module))
    terraform.init()
    assert "0 failed" in terraform.run("test", "-no-color")


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_is_valid(example: Path, tmp_path: Path) -> None:
    terraform = Terraform(copied(tmp_path) / relative(example))
    terraform.init()
    found = terraform.json("validate", "-json")
    assert found["valid"] and found["warning_count"] == 0, found["diagnostics"]


def test_there_are_some() -> None:
    assert len(MODULES) >= 3 and len(EXAMPLES) == 2
