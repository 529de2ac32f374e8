"""The tutorials, done as they say: every file saved, every command run, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray import open_run
from geo_ray.cli.main import root

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "tutorials" / "two-regions.md"
PORT = ROOT / "docs" / "tutorials" / "port-a-training-script.md"

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path = GUIDE) -> list[tuple[str, str, str]]:
    """(language, name of the file that it is saved as or "", content), in the order of the page."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()].rstrip().rpartition("\n\n")[2]
        names = re.findall(r"\bas\s`([\w.-]+)`", before)
        kind, body = fence.groups()
        assert kind in ("bash", "text") or names, f"which file is this?\n{body}"
        found.append((kind, names[-1] if names and kind != "bash" else "", body))
    return found


def steps(page: Path = GUIDE) -> list[tuple[str, str]]:
    """("name of a file" or "", its content or shell commands), in the order of the page."""
    return [(name, body) for kind, name, body in blocks(page) if name or kind == "bash"]


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


def test_a_ported_script_trains_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but `geo-ray train` and torchrun (below)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names, commands = [], []
    for name, body in steps(PORT):
        if name:
            names.append(name)
            Path(name).write_text(body)
            if name.endswith(".py"):
                compile(body, name, "exec")
            continue
        commands += [shlex.split(line) for line in body.splitlines()]
    assert names == [
        "make_data.py", "train_ddp.py", "digits_task.py", "ddp.yaml", "flower.yaml",
    ]  # fmt: skip
    skipped = [each for each in commands if each[0] in ("export", "torchrun") or "train" in each]
    assert len(skipped) == 4
    for command in commands:
        if command not in skipped:
            run(command)
    page = PORT.read_text()
    for name in ("ddp", "sma", "diloco", "flower"):
        accuracy = open_run(tmp_path / "runs" / name).summary.eval["accuracy"]
        digits = 4 if name in ("ddp", "flower") else 3
        assert f"{accuracy:.{digits}f}" in page


@pytest.mark.slow
def test_the_script_to_port_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, body in steps(PORT):
        if name:
            Path(name).write_text(body)
    run(["python", "make_data.py"])
    shown = run(["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "train_ddp.py"])
    assert float(shown.split()[-1]) > 0.9
