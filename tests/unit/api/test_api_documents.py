"""Run every example of docs/guides/python.md that needs no cluster, and both example scripts."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

import geo_ray

ROOT = Path(__file__).parents[3]


def blocks() -> list[str]:
    text = (ROOT / "docs" / "guides" / "python.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    cluster = ("geo_ray.train(", "geo_ray.tune(")
    simulated = [
        block for block in blocks() if not any(verb in block.split("#")[0] for verb in cluster)
    ]
    assert len(simulated) >= 9
    names: dict[str, object] = {"__name__": "notebook"}
    for block in simulated:
        exec(compile(block, "docs/guides/python.md", "exec"), names)
    assert (tmp_path / "model.pt").exists() and (tmp_path / "plan.json").exists()


def test_the_page_names_all_that_the_package_offers() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "guides" / "python.md").read_text()))
    assert [name for name in geo_ray.__all__ if name not in words] == []


def test_the_modules_that_the_reference_lists_define_the_names() -> None:
    text = (ROOT / "docs" / "reference" / "generated" / "python.md").read_text()
    table = text.split("| module | names | command |\n|---|---|---|\n")[1].split("\n\n")[0]
    listed = [re.findall(r"`([\w.]+)`", line) for line in table.splitlines()]
    missing = [
        f"{module}.{name}"
        for module, *names in listed
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []
    assert len(listed) > 30


@pytest.mark.parametrize(
    "name", ["first_run", pytest.param("choose_a_strategy", marks=pytest.mark.slow)]
)
def test_the_example_scripts_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "accuracy 0." in told
    assert ("CONFIG_INVALID" in told) == (name == "first_run")
