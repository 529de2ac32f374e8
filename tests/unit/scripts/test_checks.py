"""What `scripts/test` runs at the same time: outputs stay whole, failures and Ctrl-C are seen."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
WAIT_FOR = "wait() { while [ ! -e $1 ]; do sleep 0.05; done; }; "

QUEUE_LAYERS = ("unit", "property", "integration", "chaos")
Start = Callable[[dict[str, str], int], "subprocess.Popen[str]"]

# `scripts` is no package.
_spec = importlib.util.spec_from_file_location("checks", SCRIPTS / "checks.py")
assert _spec is not None
assert _spec.loader is not None
checks = importlib.util.module_from_spec(_spec)
sys.modules["checks"] = checks  # where its dataclasses look
_spec.loader.exec_module(checks)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def all_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts named shell commands in an empty directory, some at a time."""
    started: list[subprocess.Popen[str]] = []

    def start(commands: dict[str, str], at_a_time: int) -> subprocess.Popen[str]:
        named = {name: ["bash", "-c", WAIT_FOR + each] for name, each in commands.items()}
        code = (
            "import sys; from checks import Task, run_all; "
            f"tasks = [Task(name, each, 5) for name, each in {named!r}.items()]; "
            f"sys.exit(run_all(tasks, {at_a_time}))"
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
    commands = [task.command for task in checks.everything(slow=True)]
    tests = [command[3:] for command in commands if command[1:3] == ["-m", "pytest"]]
    assert all(path.endswith(".py") for paths in tests for path in paths), "nothing is left out"
    assert all(tests), "without arguments pytest runs everything"
    assert Counter(path for paths in tests for path in paths) == dict.fromkeys(all_files(), 1)


def test_every_pattern_of_a_part_takes_a_file() -> None:
    """A file that was moved is not left to another part unnoticed."""
    taken: dict[tuple[str, str], int] = {}
    for file in all_files():
        part = checks.part_of(file)
        for pattern in checks.PARTS[part]:
            taken[part, pattern] = taken.get((part, pattern), 0) + fnmatch(file, pattern)
    known = [(part, pattern) for part, patterns in checks.PARTS.items() for pattern in patterns]
    assert [pair for pair in known if not taken.get(pair)] == []


def test_a_feature_is_its_folders_in_all_layers() -> None:
    folders = checks.features()
    assert folders["queue"] == [f"tests/{layer}/scheduler/queue" for layer in QUEUE_LAYERS]
    given = checks.chosen(["queue", "scheduler", "-k", "sweep"])
    scheduler = sorted(f"tests/{layer}/scheduler" for layer in QUEUE_LAYERS)
    assert given == ["-m", "not slow", *scheduler, "-k", "sweep"]
    in_a_feature = {file for file in all_files() if file.split("/")[2] in folders}
    assert {file for file in all_files() if file not in in_a_feature} == {
        file for file in all_files() if file.startswith("tests/arch/")
    }


def test_other_arguments_go_to_pytest() -> None:
    for arguments in (["tests/arch", "-q"], ["-k", "queue"], [f"{__file__}::test_x"]):
        assert checks.chosen(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["quue"], 2), (["queue", "quue", "-q"], 2)]
)
def test_help_and_an_unknown_feature_list_the_features(
    arguments: list[str], status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checks.main(arguments) == status
    said = "".join(capfd.readouterr())
    assert " queue " in said
    assert " transport" in said


def test_parts_run_at_the_same_time_and_outputs_stay_whole(start: Start) -> None:
    """Each of two waits for the other, twice; the last begins when only one is left."""
    commands = {
        "left": "echo L1; touch l; wait r; echo L2",
        "right": "echo R1; touch r; wait l; echo R2; touch r2",
        "more": "[ -e r2 ] || wait r2; echo M",
        "nice": "[ -e r2 ] && nice; echo '== 1 passed =='",
    }
    process = start(commands, 2)
    out, _ = process.communicate()
    assert process.returncode == 0
    said, summary = out.split("---------- all parts\n")
    blocks = dict(block.split("\n", 1) for block in said.split("---------- ")[1:])
    assert blocks == {
        "left": "L1\nL2\n",
        "right": "R1\nR2\n",
        "more": "M\n",
        "nice": f"{os.nice(0) + 5}\n== 1 passed ==\n",
    }
    assert summary.count("ok ") == 4
    assert summary.endswith("== 1 passed ==\n")


def test_a_part_that_fails_is_named_last_and_the_others_run(start: Start) -> None:
    process = start({"bad": "echo why; exit 3", "next": "echo on", "good": "true"}, 1)
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
    commands = {name: cleans.format(name) for name in ("a", "b")}
    process = start(commands | {"never run": "touch never", "nor this": "touch never"}, 2)
    subprocess.run(["bash", "-c", WAIT_FOR + "wait a; wait b"], cwd=tmp_path, check=True)
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "gone-a", "gone-b"]
    assert out.count("cleaned\n") == 2


def test_the_slowest_files_of_all_parts_are_listed(start: Start) -> None:
    one = "echo 'CPU    12.5 s     3 tests tests/a.py'; echo 'CPU     9.0 s     1 tests tests/c.py'"
    other = "echo 'CPU   110.0 s    40 tests tests/b.py'"
    out, _ = start({"a": one, "b": other}, 2).communicate()
    said, _ = out.split("---------- all parts\n")
    listed = said.split("---------- files that took most CPU\n")[1].splitlines()
    assert [line.split()[-1] for line in listed] == ["tests/b.py", "tests/a.py", "tests/c.py"]


def test_skipped_tests_are_listed_before_the_parts(start: Start) -> None:
    skip = "printf '\\033[33mSKIPPED\\033[0m [2] tests/x.py:7: no browser\\n== 2 skipped ==\\n'"
    out, _ = start({"a": skip, "b": "true"}, 2).communicate()
    said, summary = out.split("---------- all parts\n")
    assert said.endswith("---------- skipped tests\n[2] tests/x.py:7: no browser\n")
    assert "SKIPPED" not in summary
