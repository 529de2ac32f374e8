"""Ctrl-C while the averager is being moved: the whole command, with a cluster of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from geo_ray.ray_cluster.process_supervisor import descendants
from tests.support.train_support import count, events_of, eventually, experiment_of, write_config

HUB, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
HUB_ADDRESS = b"127.0.0.3"  # of the first region's node; the head has the one before
STEPS = 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECTIONS: dict[str, Any] = {
    "regions": [{"name": name} for name in (HUB, STANDBY, THIRD)],
    "strategy": {"kind": "sma", "interval": 1},
    "train": {"steps": STEPS, "eval_every": 20, "step_timeout_s": 60},
    "emulate": {"step_s": 0.15},
    "checkpoint": {"every_s": 0.5},
    "averager": {"region": HUB, "standby": STANDBY, "failover_s": 1.0, "rejoin_s": 2.0},
}


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """An empty directory with a short name; pytest's are too long for sockets."""
    path = Path(f"/tmp/gs{os.getpid()}")
    path.mkdir()
    yield path
    path.rmdir()  # fails if anything is left


def command_of(pid: int) -> bytes:
    """Empty for one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def hubs_bridge(below: int) -> int:
    """Process id of the bridge of the averager's region."""
    nodes = [
        pid
        for pid in descendants(below)
        if (words := command_of(pid).split(b"\0"))[0].endswith(b"/raylet")
        and any(word.endswith(b"=" + HUB_ADDRESS) for word in words)
    ]
    (bridge,) = {
        pid
        for node in nodes
        for pid in descendants(node)
        if command_of(pid).startswith(b"ray::BridgeActor")
    }
    return bridge


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses on loopback at which processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def is_free(address: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended ones may linger
        with suppress(OSError):
            sock.bind(address)
            return True
    return False


def run_command(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "geo_ray.cli.main", *arguments, "--plain"],
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


@pytest.mark.parametrize("moment", ["region_lost", "averager_moved"])
def test_an_interrupt_during_a_failover_leaves_nothing_and_the_run_continues(
    short_tmp: Path, tmp_path: Path, moment: str
) -> None:
    """It comes when the averager is known to be gone, or when its standby has just taken over."""
    local = {"kind": "local", "temp_dir": str(short_tmp)}
    experiment = experiment_of(tmp_path, **SECTIONS | {"cluster": local})
    run_dir, log = Path(experiment.run.dir) / experiment.name, tmp_path / "said.log"

    def or_ended(happened: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: happened() or process.poll() is not None

    process = run_command(["train", str(write_config(tmp_path, experiment))], log)
    try:
        eventually(or_ended(lambda: count(run_dir, "checkpoint") >= 2), "two checkpoints")
        assert process.poll() is None, log.read_text()
        os.kill(hubs_bridge(process.pid), signal.SIGKILL)
        eventually(or_ended(lambda: count(run_dir, moment)), moment)
        assert process.poll() is None, log.read_text()
        started = descendants(process.pid)
        ports = listening(started)
        assert len(started) > 10 and len(ports) > 10
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(60)
    assert not any(short_tmp.iterdir())
    assert not [pid for pid in started if command_of(pid)]
    assert not [address for address in sorted(ports) if not is_free(address)]
    assert "Traceback" not in log.read_text()

    process = run_command(["train", "--resume", str(run_dir)], log)
    try:
        assert process.wait(200) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(60)
    (finished,) = [event for event in events_of(run_dir) if event.kind == "run_finished"]
    assert {STANDBY, THIRD} <= set(finished["digests"])
    assert len(set(finished["digests"].values())) == 1
