"""The commands of the page on the WAN lab, which name no lab: no other may be up meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.lab_support import needs_lab
from tests.support.pages import ROOT, Reader, commands

LAB = "docs/guides/wan-lab.md"


@needs_lab
@pytest.mark.timeout(1800)
@pytest.mark.slow  # a cluster of four nodes, in a lab
def test_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/guides/wan-lab.md`, section "Start a lab", with one region of the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    config = Path("configs/lab/train.yaml")
    tree = yaml.safe_load(config.read_text()) | {"regions": [{"name": "A"}], "train": {"steps": 4}}
    config.write_text(json.dumps(tree))
    reader = Reader(monkeypatch)
    up, *others = commands(LAB, "Start a lab")
    with reader.until_ctrl_c(up, r"lab \w+ is up"):
        ping, *others = others
        if shutil.which("ping") is not None:
            reader.run(ping)
        printed = [reader.run(command) for command in others]
    assert "cut" not in printed[-1] and "10.2.0.1" in printed[-1]
