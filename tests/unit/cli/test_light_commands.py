"""Commands that only read a run, or leave a request in it, answer at once: they import little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from geo_ray.cli import main
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from tests.support.job_support import experiment

HEAVY = ("torch", "ray", "numpy", "pyarrow", "pandas", "boto3")
COMMANDS = """
import json, sys
from click.testing import CliRunner
from geo_ray.cli.main import root

said = {}
for command in (["status"], ["members"], ["checkpoints"], ["stop"], ["members", "drain", "eu"]):
    verb, *rest = command
    done = CliRunner().invoke(root, [verb, sys.argv[1], *rest])
    said[" ".join(command)] = done.output + str(done.exception or "")
print(json.dumps([said, sorted(sys.modules)]))
"""


def ended_run(tmp_path: Path) -> RunDirectory:
    """A run that has ended, with a checkpoint and a plan to follow."""
    run = directory.create(experiment(f"run.dir={tmp_path / 'runs'}"), tmp_path)
    with EventLog(run.path / EVENTS_FILE) as log:
        log.write(
            *("run_started", 0.0),
            **{"run": "trial", "digest": "d", "strategy": "sma", "regions": ["eu", "us"]},
            **{"task": "digits", "seed": 0, "simulated": False, "averager": "eu"},
            **{"steps": {"eu": 10, "us": 10}},
        )
    store = CheckpointStore(run.checkpoints)
    part = write_part(store.begin(0), "eu-ps0", {"params": torch.zeros(2)}, {})
    manifest = CheckpointManifest(
        id=0, step=4, created="2026-01-02T03:04:05", config_digest="0" * 64, parts=(part,)
    )
    store.commit(0, manifest)
    return run


def test_they_import_neither_pytorch_nor_ray(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(run.path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    said, loaded = json.loads(done.stdout)
    assert "cut off" in said["status"] and "checkpoint 0 at step 4" in said["status"], said
    assert "eu" in said["members"] and "member" in said["members"], said
    assert "2026-01-02 03:04" in said["checkpoints"] and "healthy" in said["checkpoints"], said
    assert "nothing to stop" in said["stop"], said
    assert "nothing was requested" in said["members drain eu"], said
    assert not set(HEAVY) & set(loaded)


WITHOUT_PYTORCH = """
import sys
from click.testing import CliRunner
from geo_ray.cli.main import root

listed = CliRunner().invoke(root, ["--help"]).output
print("help imports", *[name for name in sys.modules if name in ("rich", "pydantic")])
for words in (["queue", "list", "q"], ["data", "check", "m.json"], ["data", "merge", "m.json"]):
    end = ["--out", "n.json"] if "merge" in words else []
    print(" ".join(words), repr(CliRunner().invoke(root, [*words, *end]).exception))
print("torch" in sys.modules)
"""


def test_queues_and_manifests_are_read_without_pytorch_and_the_list_of_commands_without_any(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTORCH],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    *said, has_torch = done.stdout.splitlines()
    assert said[0] == "help imports"
    assert (
        "QueueMissingError" in said[1] and "no manifest" in said[2] and "no manifest" in said[3]
    ), said
    assert has_torch == "False"


@pytest.mark.parametrize("name", main._COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each(name: str) -> None:
    command = main.root.get_command(click.Context(main.root), name)
    assert command is not None
    assert command.get_short_help_str(200) == main._COMMANDS[name]


ENDING = """
import atexit, sys, threading, time
from geo_ray.cli.main import main

class Slow:
    def __del__(self):
        print("torn down")

def late():
    time.sleep(0.1)
    atexit.register(print, "handler ran")  # as what a command imports does
    print("thread ended")

sys.slow = Slow()
threading.Thread(target=late).start()
sys.argv = ["geo-ray", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["--version"], 0), (["status", "nowhere"], 8), (["nothing"], 2)]
)
def test_a_command_ends_without_tearing_the_interpreter_down(
    words: list[str], code: int, tmp_path: Path
) -> None:
    """Threads are joined and exit handlers run; only the destruction of objects is left out."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    said = done.stdout.splitlines()
    assert "thread ended" in said and "handler ran" in said and "torn down" not in said
