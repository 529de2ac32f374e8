"""What `scripts/test` runs at the same time: outputs stay whole, failures and Ctrl-C are seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
WAIT_FOR = "wait() { while [ ! -e $1 ]; do sleep 0.05; done; }; "

Lanes = Sequence[dict[str, str]]
Start = Callable[[Sequence[Lanes]], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts phases of lanes of named shell commands in an empty directory."""
    started: list[subprocess.Popen[str]] = []

    def start(phases: Sequence[Lanes]) -> subprocess.Popen[str]:
        named = [
            [{n: ["bash", "-c", WAIT_FOR + c] for n, c in lane.items()} for lane in phase]
            for phase in phases
        ]
        code = (
            "import sys; from checks import Lane, run_all; "
            f"sys.exit(run_all([[Lane(lane, nice=5) for lane in phase] for phase in {named!r}]))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def test_every_test_file_is_in_one_part() -> None:
    code = (
        "import json, checks; "
        "print(json.dumps([lane.commands for p in checks.everything(slow=True) for lane in p]))"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    times = Counter[str]()
    for lane in json.loads(said.stdout):
        for command in lane.values():
            if command[1:3] != ["-m", "pytest"]:
                continue
            chosen = [word for word in command[3:] if not word.startswith("--")]
            left_out = [word.partition("=")[2] for word in command if "--ignore-glob=" in word]
            assert chosen, "without arguments pytest runs everything"
            for path in sorted(ROOT.glob("tests/**/test_*.py")):
                file = str(path.relative_to(ROOT))
                if any(file == name or file.startswith(f"{name}/") for name in chosen):
                    times[file] += not any(fnmatch(file, pattern) for pattern in left_out)
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")}
    assert times == dict.fromkeys(files, 1)


def test_lanes_run_at_the_same_time_and_outputs_stay_whole(start: Start) -> None:
    """Each of two waits for the other, twice; the second phase waits for the first."""
    left = {"left": "echo L1; touch l; wait r; echo L2", "more": "[ -e r2 ] || wait r2; echo M"}
    right = {"right": "echo R1; touch r; wait l; echo R2; touch r2"}
    process = start([[left, right], [{"nice": "[ -e r2 ] && nice; echo '== 1 passed =='"}]])
    out, _ = process.communicate()
    assert process.returncode == 0
    said, summary = out.split("---------- all parts\n")
    blocks = dict(block.split("\n", 1) for block in said.split("---------- ")[1:])
    assert blocks == {
        "left": "L1\nL2\n",
        "right": "R1\nR2\n",
        "more": "M\n",
        "nice": "5\n== 1 passed ==\n",
    }
    assert summary.count("ok ") == 4
    assert summary.endswith("== 1 passed ==\n")


def test_a_part_that_fails_is_named_last_and_the_others_run(start: Start) -> None:
    process = start([[{"bad": "echo why; exit 3", "next": "echo on"}], [{"good": "true"}]])
    out, _ = process.communicate()
    assert process.returncode == 1
    lines = out.splitlines()
    assert "on" in lines
    assert lines[-1].startswith("FAILED (exit status 3) bad:")
    assert sum(line.startswith("FAILED") for line in lines) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_all_parts_clean_up(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    cleans = "trap 'echo cleaned; touch gone-{0}; exit 9' INT; touch {0}; wait never"
    lanes = [{name: cleans.format(name), "never run": "touch never"} for name in ("a", "b")]
    process = start([lanes, [{"nor this": "touch never"}]])
    subprocess.run(["bash", "-c", WAIT_FOR + "wait a; wait b"], cwd=tmp_path, check=True)
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "gone-a", "gone-b"]
    assert out.count("cleaned\n") == 2


def test_skipped_tests_are_listed_before_the_parts(start: Start) -> None:
    skip = "printf '\\033[33mSKIPPED\\033[0m [2] tests/x.py:7: no browser\\n== 2 skipped ==\\n'"
    out, _ = start([[{"a": skip}, {"b": "true"}]]).communicate()
    said, summary = out.split("---------- all parts\n")
    assert said.endswith("---------- skipped tests\n[2] tests/x.py:7: no browser\n")
    assert "SKIPPED" not in summary
