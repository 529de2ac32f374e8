"""Ray's messages about a dead node go to a file or the log, not to the terminal."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker

from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import RAY_MESSAGES, _note_message, keep_logs

DUMP = "Raylet is terminated. Last 20 lines of the Raylet logs:\n    state\n    more state\n"


class BridgeAnswer:
    """A subscriber to Ray's channel of errors on which there is one message."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped

    def subscribe(self) -> None:
        pass

    def poll(self) -> tuple[None, dict[str, Any]]:
        self._stopped.set()
        return None, {"job_id": None, "type": "raylet_died", "error_message": DUMP}


class Driver:
    """As much of Ray's worker as its listener asks for."""

    def __init__(self, stopped: threading.Event) -> None:
        self.gcs_error_subscriber = BridgeAnswer(stopped)
        self.current_job_id = worker.JobID.nil()


def listen() -> None:
    """Run Ray's own listener until it has handled the message."""
    listener: Any = worker.listen_error_messages
    stopped = threading.Event()
    listener(Driver(stopped), stopped)


def test_rays_listener_gives_messages_to_us_and_prints_them_again_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken: list[str] = []
    with ray_internals.messages_to(taken.append):
        listen()
    assert taken == [DUMP]
    assert capsys.readouterr() == ("", "")
    listen()
    assert "state" in capsys.readouterr().out  # so it is what Ray does by itself


def test_a_local_clusters_messages_lie_with_the_logs(tmp_path: Path) -> None:
    _note_message(tmp_path / RAY_MESSAGES, DUMP)
    _note_message(tmp_path / RAY_MESSAGES, "another")
    (kept,) = keep_logs(tmp_path, tmp_path / "logs")
    assert kept.read_text() == DUMP + "another\n"


def test_of_other_clusters_the_log_has_the_first_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _note_message(None, DUMP)
    assert caplog.messages == [f"Ray says: {DUMP.splitlines()[0]}"]
