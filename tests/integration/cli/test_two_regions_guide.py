"""The tutorials, done as they say: every file saved, every command run, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray import open_run
from tests.support.pages import ROOT, Reader, blocks

GUIDE = "docs/tutorials/two-regions.md"
PORT = "docs/tutorials/port-a-training-script.md"


def steps(page: str = GUIDE) -> list[tuple[str, list[str]]]:
    """("name of a file" or "", its content or commands), in the order of the page."""
    found = []
    for block in blocks(page):
        is_shell = block.language == "bash"
        assert is_shell or block.language == "text" or block.saved_as, f"which file?\n{block.body}"
        if block.saved_as and not is_shell:
            found.append((block.saved_as, [block.body]))
        elif is_shell:
            found.append(("", block.commands))
    return found


def outputs() -> list[str]:
    """Lines that the page shows as printed."""
    shown = [b.body for b in blocks(GUIDE) if b.language == "text" and not b.saved_as]
    lines = [line for body in shown for line in body.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip() and "─" not in line]


def test_the_page_has_what_is_to_be_run() -> None:
    names = [name for name, _ in steps()]
    assert [name for name in names if name] == [
        "make_files.py", "churn.py", "prepare.yaml", "countries.txt", "site-eu-west.yaml",
        "churn.yaml", "predict.py",
    ]  # fmt: skip
    commands = " ".join(line for name, lines in steps() if not name for line in lines)
    for verb in ("inspect", "stats", "merge-stats", "shard", "merge", "check"):
        assert f"geo-ray data {verb} " in commands
    assert "geo-ray simulate" in commands
    assert len(outputs()) > 15


def test_the_guide_works_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    reader, printed = Reader(monkeypatch), []
    for name, lines in steps():
        if name:
            Path(name).write_text(lines[0])
            continue
        for command in lines:
            shown = reader.run(command)
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
    for name, lines in steps(PORT):
        if not name:
            commands += lines
            continue
        names.append(name)
        Path(name).write_text(lines[0])
        if name.endswith(".py"):
            compile(lines[0], name, "exec")
    assert names == [
        "make_data.py", "train_ddp.py", "digits_task.py", "ddp.yaml", "flower.yaml",
    ]  # fmt: skip
    skipped = [c for c in commands if c.startswith(("export ", "torchrun ", "geo-ray train "))]
    assert len(skipped) == 4
    for command in commands:
        if command not in skipped:
            Reader(monkeypatch).run(command)
    page = (ROOT / PORT).read_text()
    for name in ("ddp", "sma", "diloco", "flower"):
        accuracy = open_run(tmp_path / "runs" / name).summary.eval["accuracy"]
        digits = 4 if name in ("ddp", "flower") else 3
        assert f"{accuracy:.{digits}f}" in page


@pytest.mark.slow
def test_the_script_to_port_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lines in steps(PORT):
        if name:
            Path(name).write_text(lines[0])
    reader = Reader(monkeypatch)
    reader.run("python make_data.py")
    shown = reader.run("python -m torch.distributed.run --nproc-per-node=2 train_ddp.py")
    assert float(shown.split()[-1]) > 0.9
