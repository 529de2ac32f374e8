"""Checkpoints of served runs, whose averager's process has several threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import geo_ray
from geo_ray.base.errors import RegionLostError
from geo_ray.runtime import served_checkpoints
from geo_ray.runtime.served_checkpoints import ServedCheckpoints
from geo_ray.storage.checkpoint import CheckpointStore

CONFIG: dict[str, Any] = {
    "name": "served",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco"},
    "train": {"steps": 4},
}


class Server:
    """A process in which a checkpoint ends only when the caller waits for it."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self.save: int | None = None
        self.holders: tuple[Any, ...] = ()
        self.is_lost = is_lost
        self.actor = SimpleNamespace(
            end_save=SimpleNamespace(remote=lambda checkpoint: lambda: self._end(checkpoint))
        )

    def _end(self, checkpoint: int) -> None:
        if self.is_lost:
            raise RegionLostError("its process died")
        if self.save == checkpoint:
            self.save = None

    def ask(self, call: str, *arguments: Any) -> Any:
        assert call == "begin_save"
        if self.save is not None:
            return None
        self.save = int(arguments[0])
        return self.save


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(refs: Mapping[Any, Callable[[], Any]], timeout_s: float) -> dict[Any, Any]:
        return {key: call() for key, call in refs.items()}

    monkeypatch.setattr(served_checkpoints, "collect", collect)


def test_the_last_checkpoint_begins_after_the_one_before_has_ended(tmp_path: Path) -> None:
    """Calls of an actor with several threads are executed in any order."""
    server = Server()
    store = CheckpointStore(tmp_path)
    made = ServedCheckpoints(store, geo_ray.load_config(CONFIG), server, 1)
    assert made.begin_last()
    first = server.save
    (failed,) = made.poll({"id": first, "stage": "failed", "failed": {}}, 1, trains=False)
    assert failed["kind"] == "checkpoint_failed" and server.save == first
    assert made.begin_last() and server.save is not None


def test_a_lost_server_does_not_keep_the_last_checkpoint_from_beginning(tmp_path: Path) -> None:
    server = Server()
    made = ServedCheckpoints(CheckpointStore(tmp_path), geo_ray.load_config(CONFIG), server, 1)
    assert made.begin_last()
    made.poll({"id": server.save, "stage": "failed", "failed": {}}, 1, trains=False)
    server.is_lost, server.save = True, None  # its standby has no checkpoint in progress
    assert made.begin_last()
