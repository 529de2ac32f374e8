"""docs/guides/two-regions.md, done as it says: every file saved, every command run, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "two-regions.md"

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
SHOWN = re.compile(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", re.M)


def steps() -> list[tuple[str, str]]:
    """("name of a file" or "", its content or shell commands), in the order of the page."""
    text = GUIDE.read_text()
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()].rstrip().rpartition("\n\n")[2]
        kind, body = fence.groups()
        if kind == "sh":
            found.append(("", body))
        else:
            names = re.findall(r"as `([\w.]+)`", before)
            assert names, f"which file is this?\n{body}"
            found.append((names[-1], body))
    return found


def outputs() -> list[str]:
    """Lines that the page shows as printed, without code."""
    prose = FENCE.sub("", GUIDE.read_text())
    lines = [line for block in SHOWN.findall(prose) for line in block.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip() and "─" not in line]


def test_the_page_has_what_is_to_be_run() -> None:
    names = [name for name, _ in steps()]
    assert [name for name in names if name] == [
        "make_files.py", "churn.py", "prepare.yaml", "countries.txt", "churn.yaml", "predict.py",
    ]  # fmt: skip
    commands = "".join(body for name, body in steps() if not name)
    for verb in ("inspect", "stats", "merge-stats", "shard", "merge", "check"):
        assert f"geo-ray data {verb} " in commands
    assert "geo-ray simulate" in commands
    assert len(outputs()) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_works_to_the_letter(tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, arguments in (("geo-ray", "-m geo_ray.cli.main"), ("python", "")):
        shim = bin_dir / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        shim.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    here = tmp_path / "here"
    here.mkdir()
    printed = []
    for name, body in steps():
        if name:
            (here / name).write_text(body)
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", body], cwd=here, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
        printed += [" ".join(line.split()) for line in done.stdout.splitlines()]
    chances = [float(line.split()[-1]) for line in printed if line.startswith("churns with")]
    assert len(chances) == 3
    assert chances[0] > 0.8
    assert chances[1] < 0.2
    missing = [line for line in outputs() if line not in printed]
    assert not missing
    rows_abroad = [path for path in here.rglob("*.json") if "us-east-0-1" in path.read_text()]
    assert not rows_abroad
