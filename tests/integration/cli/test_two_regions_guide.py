"""docs/tutorials/two-regions.md, done as it says: every file saved, every command run, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.cli.main import root

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "tutorials" / "two-regions.md"

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks() -> list[tuple[str, str, str]]:
    """(language, name of the file that it is saved as or "", content), in the order of the page."""
    text = GUIDE.read_text()
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()].rstrip().rpartition("\n\n")[2]
        names = re.findall(r"as `([\w.-]+)`", before)
        kind, body = fence.groups()
        assert kind in ("bash", "text") or names, f"which file is this?\n{body}"
        found.append((kind, names[-1] if names and kind != "bash" else "", body))
    return found


def steps() -> list[tuple[str, str]]:
    """("name of a file" or "", its content or shell commands), in the order of the page."""
    return [(name, body) for kind, name, body in blocks() if name or kind == "bash"]


def outputs() -> list[str]:
    """Lines that the page shows as printed."""
    shown = [body for kind, name, body in blocks() if kind == "text" and not name]
    lines = [line for body in shown for line in body.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip() and "─" not in line]


def test_the_page_has_what_is_to_be_run() -> None:
    names = [name for name, _ in steps()]
    assert [name for name in names if name] == [
        "make_files.py", "churn.py", "prepare.yaml", "countries.txt", "site-eu-west.yaml",
        "churn.yaml", "predict.py",
    ]  # fmt: skip
    commands = "".join(body for name, body in steps() if not name)
    for verb in ("inspect", "stats", "merge-stats", "shard", "merge", "check"):
        assert f"geo-ray data {verb} " in commands
    assert "geo-ray simulate" in commands
    assert len(outputs()) > 15


def run(command: list[str]) -> str:
    """What a command prints; `geo-ray` runs in this process, which has PyTorch loaded already."""
    if command[0] == "geo-ray":
        done = CliRunner().invoke(root, command[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
        return done.stdout
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:."}
    script = [sys.executable, *command[1:]]
    finished = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_guide_works_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    printed = []
    for name, body in steps():
        if name:
            Path(name).write_text(body)
            continue
        for command in body.replace("\\\n", " ").splitlines():
            shown = run(shlex.split(command))
            printed += [" ".join(line.split()) for line in shown.splitlines()]
    probabilities = [
        float(line.split()[-1]) for line in printed if line.startswith("probability of churn:")
    ]
    assert len(probabilities) == 3
    assert probabilities[0] > 0.8
    assert probabilities[1] < 0.2
    (abroad,) = [float(line.split()[-1]) for line in printed if line.startswith("in eu-west:")]
    assert abroad > 0.8
    missing = [line for line in outputs() if line not in printed]
    assert not missing
    rows_abroad = [path for path in tmp_path.rglob("*.json") if "us-east-0-1" in path.read_text()]
    assert not rows_abroad
