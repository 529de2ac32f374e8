"""Parts of random histories are kept as they are done, and what never ends is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks.membership import seed_parts
from benchmarks.membership.seed_parts import Part, PartsFile, cuts, run_part

DONE = Part(100, 50, {117: "ViolationError('seed 117')"}, {"ended": 2}, 1.5)


def test_who_goes_on_does_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "results" / "seeds.parts.jsonl"
    PartsFile(path).add(DONE)
    again = PartsFile(path)
    assert again.parts == {(100, 50): DONE}
    wanted = cuts(50, 120, 50)
    assert wanted == [(50, 50), (100, 50), (150, 20)]
    assert [part for part in wanted if part not in again.parts] == [(50, 50), (150, 20)]
    again.add(Part(50, 50))
    assert set(PartsFile(path).parts) == {(50, 50), (100, 50)}


def test_half_a_line_of_who_was_killed_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "seeds.parts.jsonl"
    PartsFile(path).add(DONE)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"first": 150, "cou')
    file = PartsFile(path)
    assert set(file.parts) == {(100, 50)}
    file.add(Part(150, 50))
    assert set(PartsFile(path).parts) == {(100, 50), (150, 50)}


def test_parts_of_other_code_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "seeds.parts.jsonl"
    PartsFile(path).add(DONE)
    head, *rest = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(head) | {"code": "0"}) + "\n" + "".join(rest), "utf-8")
    before = path.read_text("utf-8")
    with pytest.raises(SystemExit, match="other code"):
        PartsFile(path)
    assert path.read_text("utf-8") == before


def test_a_history_that_never_ends_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_round(history: object) -> None:
        while True:
            pass

    monkeypatch.setattr(seed_parts, "MOST_CPU_S", 0.2)
    monkeypatch.setattr("benchmarks.membership.histories.History.run", go_round)
    part = run_part(7, 2, tmp_path)
    assert set(part.violations) == {7, 8}
    assert all("has not ended" in what for what in part.violations.values())
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0.0
