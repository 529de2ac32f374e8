"""The process supervisor with cheap processes; tests/integration/ray_cluster has Ray's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_ray.base.errors import ClusterStartError
from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.ray_cluster.process_supervisor import descendants

# Ignores polite signals, and leaves a grandchild that has escaped into a session of its own.
_STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(300)
"""


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[SupervisedProcesses]:
    processes = SupervisedProcesses(tmp_path)
    yield processes
    processes.close()
    assert list(tmp_path.iterdir()) == []


def start_stubborn(kept: SupervisedProcesses) -> tuple[int, int]:
    told = kept.root / "pid"
    kept.start("a", [sys.executable, "-c", _STUBBORN, str(told)], dict(os.environ))
    assert eventually(lambda: told.is_file() and told.read_text().isdigit())
    kept.poll()
    return kept.pids["a"], int(told.read_text())


def test_escaped_and_stubborn_processes_end(kept: SupervisedProcesses) -> None:
    child, grandchild = start_stubborn(kept)
    assert not gone(child)
    assert not gone(grandchild)
    kept.close()
    assert gone(child)
    assert gone(grandchild)
    kept.close()  # harmless


def test_exit_codes_and_logs(kept: SupervisedProcesses) -> None:
    log = kept.start("b", [sys.executable, "-c", "print('said'); raise SystemExit(3)"], {})

    def ended() -> bool:
        kept.poll()
        return "b" in kept.exit_codes

    assert eventually(ended)
    assert kept.exit_codes["b"] == 3
    assert log.read_text() == "said\n"


def test_kill(kept: SupervisedProcesses) -> None:
    child, _ = start_stubborn(kept)
    kept.kill("a")
    kept.kill("unknown")
    assert eventually(lambda: gone(child))
    kept.poll()
    assert eventually(lambda: kept.poll() is None and kept.exit_codes.get("a") == -9)


def test_the_keeper_is_killed(tmp_path: Path) -> None:
    """Its children go with it; only files are left."""
    kept = SupervisedProcesses(tmp_path)
    kept.start("c", [sys.executable, "-c", "import time; time.sleep(300)"], {})
    assert eventually(lambda: kept.poll() is None and "c" in kept.pids)
    kept._supervisor.kill()
    assert eventually(lambda: gone(kept.pids["c"]))
    with pytest.raises(ClusterStartError, match="process supervisor ended"):
        kept.poll()
    kept.close()


def test_no_such_program(tmp_path: Path) -> None:
    kept = SupervisedProcesses(tmp_path)
    kept.start("d", ["/no/such/program"], {})
    with pytest.raises(ClusterStartError, match="/no/such/program"):
        eventually(lambda: kept.poll() is not None)
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ClusterStartError, match="No such file"):
        SupervisedProcesses(tmp_path / "missing")


def test_closed(tmp_path: Path) -> None:
    kept = SupervisedProcesses(tmp_path)
    kept.close()
    with pytest.raises(ClusterStartError, match="already down"):
        kept.start("e", ["true"], {})
    kept.poll()


def test_descendants() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True) as shell:
        assert eventually(lambda: len(descendants(shell.pid)) == 1)
        assert shell.pid in descendants(os.getpid())
        os.killpg(shell.pid, 9)


def test_a_supervised_process_is_restarted_unless_killed_by_command(
    kept: SupervisedProcesses,
) -> None:
    kept.start("node", [sys.executable, "-c", "import time; time.sleep(300)"], {})
    kept.keep("node")

    def lives_as_another_than(pid: int | None) -> bool:
        kept.poll()
        return kept.pids.get("node") != pid and "node" not in kept.exit_codes

    assert eventually(lambda: lives_as_another_than(None))
    first = kept.pids["node"]
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: lives_as_another_than(first))
    kept.kill("node")

    def has_ended() -> bool:
        kept.poll()
        return "node" in kept.exit_codes

    assert eventually(has_ended)
    time.sleep(1.5)  # longer than it takes to be started again
    assert has_ended()


def test_a_process_that_ended_before_keep_is_restarted(kept: SupervisedProcesses) -> None:
    log = kept.start("node", [sys.executable, "-c", "print('began')"], {})
    assert eventually(lambda: log.is_file() and log.read_text().count("began") == 1)
    kept.keep("node")
    assert eventually(lambda: log.read_text().count("began") >= 2)
