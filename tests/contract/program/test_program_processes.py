"""What only processes can do: die, and be ended from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geo_ray.base.errors import NodeFailedError, NodeUnshippableError
from geo_ray.program.graph import ProgramNode
from geo_ray.program.run import run_program
from geo_ray.ray_cluster.process_supervisor import descendants
from tests.support import program_support as toys

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("region", "victim", "caller"),
    [
        ("eu", toys.Echo, toys.Survivor),
        ("us", toys.Done, toys.Survivor),
        ("eu", toys.Done, toys.Survivor),
        ("eu", toys.Echo, toys.Hasty),
    ],
)
def test_a_dead_node_is_restarted_and_its_caller_gets_an_error(
    region: str, victim: type, caller: type
) -> None:
    result = run_program(toys.mortal(1, region, victim, caller), "processes")
    lost, back = result.values["caller"]
    assert lost.startswith("NODE_LOST victim.die: lost the connection")
    assert back == "no error: 'back'"
    assert result.restarts == {"victim": 1}


def test_a_node_without_restarts_ends_the_program() -> None:
    with pytest.raises(NodeFailedError) as caught:
        run_program(toys.mortal(0), "processes")
    assert "the process of 'victim' ended with exit code 3" in caught.value.message
    assert "restarts.most = 0" in caught.value.message
    assert not descendants(os.getpid())


def test_a_failed_bridge_is_restarted() -> None:
    result = run_program(toys.wrecked(), "processes")
    assert result.values["wrecker"] == [1, "no error: 2"]


def test_a_bridge_that_dies_again_and_again_ends_the_program() -> None:
    with pytest.raises(NodeFailedError, match=r"the bridge of eu ended: .*exit code -9") as caught:
        run_program(toys.wrecked(toys.Fury), "processes")
    assert "its restarts = 3 in 60 s" in caught.value.message


def test_nothing_is_started_if_a_node_cannot_be_sent() -> None:
    program = toys.alone(ProgramNode("one", toys.Echo), ProgramNode("two", lambda: None))
    with pytest.raises(
        NodeUnshippableError, match="node 'two': a lambda cannot be imported by name"
    ):
        run_program(program, "processes")
    assert not descendants(os.getpid())


RUNS_ITSELF = """
import pathlib
import sys
from geo_ray.program.graph import NodeGroup, Program, ProgramNode
from geo_ray.program.run import run_program

class One:
    def run(self):
        print("hello")

program = Program("p", (NodeGroup("eu", (ProgramNode("one", One),)),))
if GUARD:
    run_program(program, on="processes", logs=pathlib.Path(sys.argv[1]))
"""


def test_a_file_that_runs_its_program_when_it_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "itself.py"
    argv = [sys.executable, str(file), str(tmp_path)]
    file.write_text(RUNS_ITSELF.replace("GUARD", "True"))
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NODE_UNSHIPPABLE" in done.stderr
    assert "runs its program while a node of it is imported" in done.stderr
    for log in tmp_path.glob("*.log"):
        log.unlink()
    file.write_text(RUNS_ITSELF.replace("GUARD", '__name__ == "__main__"'))
    subprocess.run(argv, cwd=ROOT, check=True)
    (log,) = tmp_path.glob("*.log")
    assert log.name.startswith("one.")
    assert log.read_text() == "hello\n"


WAITS = """
from geo_ray.program.clock import here
from geo_ray.program.graph import NodeGroup, Program, ProgramNode

class Waits:
    def run(self):
        open(PATH, "w").close()
        here().clock.sleep_s(600.0)

PATH = {path!r}
program = Program("waits", (NodeGroup("eu", (ProgramNode("waits", Waits),)),))
"""


@pytest.mark.parametrize(
    ("on", "how", "code"),
    [
        ("processes", signal.SIGINT, 130),
        ("processes", signal.SIGKILL, -9),
        ("threads", signal.SIGINT, 130),
    ],
)
def test_nothing_is_left_of_a_program_that_is_ended(
    tmp_path: Path, on: str, how: signal.Signals, code: int
) -> None:
    begun, file = tmp_path / "begun", tmp_path / "waits.py"
    file.write_text(WAITS.format(path=str(begun)))
    argv = [sys.executable, "-m", "geo_ray.cli.main", "program", str(file), "--on", on]
    with subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.02)
        below = descendants(process.pid)
        assert bool(below) == (on == "processes")
        process.send_signal(how)
        assert process.wait(60) == code
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        time.sleep(0.02)
    left = {path.name for path in tmp_path.iterdir()} - {"begun", "waits.py"}
    while left:  # the keeper removes its directory last
        time.sleep(0.02)
        left = {path.name for path in tmp_path.iterdir()} - {"begun", "waits.py"}
