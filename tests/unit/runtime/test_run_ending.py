"""The last steps of a run where a store or a disk takes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from geo_ray.base.errors import GeoRayError, InvariantError, RunDirectoryError, StoreError
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.requests import Interruption
from geo_ray.runtime import run_finish
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.run_finish import Retrying, _final_model
from geo_ray.runtime.server_actors import PrimaryActor, _ServingPrimary
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.training.parameters import digest
from tests.support.train_support import Phases


class Clock:
    """Time that passes while it is slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Trial:
    """A step that fails for a time."""

    def __init__(self, clock: Clock, until_s: float, error: GeoRayError) -> None:
        self.told: list[str] = []
        self.interruption = Interruption()
        self.tries = 0
        self._clock, self._until_s, self._error = clock, until_s, error

    def run(self, seconds: float) -> str:
        retrying = Retrying(seconds, Reporting(Phases(self.told), 0.0, self.interruption))
        return retrying.until_done("the model", self._step)

    def _step(self) -> str:
        self.tries += 1
        if self._clock.now_s < self._until_s:
            raise self._error
        return "done"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_finish, "time", clock)
    monkeypatch.setattr(Interruption, "wait", lambda _, longest_s: clock.sleep(longest_s))
    return clock


@pytest.mark.parametrize("error", [StoreError("no answer"), RunDirectoryError("disk full")])
def test_a_step_is_tried_again_by_duration(clock: Clock, error: GeoRayError) -> None:
    trial = Trial(clock, 250.0, error)
    assert trial.run(600.0) == "done"
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 4]
    assert trial.told[0] == f"retrying the model for 600 s: {error.message}"


def test_it_ends_when_the_time_is_over(clock: Clock) -> None:
    trial = Trial(clock, float("inf"), StoreError("no answer"))
    with pytest.raises(StoreError, match="no answer"):
        trial.run(100.0)
    assert clock.now_s == 200.0, "to the end of the time, and no longer"


def test_errors_are_neither_awaited_nor_repeated(clock: Clock) -> None:
    trial = Trial(clock, float("inf"), StoreError("no answer"))
    trial.interruption.set()
    with pytest.raises(StoreError):
        trial.run(600.0)
    broken = Trial(clock, float("inf"), InvariantError("a bug"))
    with pytest.raises(InvariantError):
        broken.run(600.0)
    assert (trial.tries, broken.tries, clock.slept) == (1, 1, [])


class Server:
    """A region's server in this process, asked as an actor is."""

    def __init__(self, params_P: torch.Tensor, buffers_B: torch.Tensor | None) -> None:
        model_buffers = None if buffers_B is None else SimpleNamespace(final_B=buffers_B)
        model = SimpleNamespace(whole_params=lambda: params_P)
        server = SimpleNamespace(model=model, model_buffers=model_buffers)
        self._actor: Any = object.__new__(PrimaryActor)
        shard: Any = SimpleNamespace(server=server)
        self._actor._served = _ServingPrimary(b"", None, shard, None, None)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *words: lambda: method(*words))


def called(refs: Mapping[Any, Callable[[], Any]], timeout_s: float) -> dict[Any, Any]:
    return {key: ref() for key, ref in refs.items()}


@pytest.mark.parametrize("is_store_away", [False, True])
def test_a_model_that_no_store_takes_comes_from_its_server(
    is_store_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params_P = torch.arange(1000, dtype=torch.float32)
    buffers_B = torch.arange(77, dtype=torch.uint8)
    servers = {"eu": Server(params_P + 1, None), "us": Server(params_P, buffers_B)}
    actors: Any = SimpleNamespace(leader=SimpleNamespace(region="us"), primaries=servers)
    tries: list[object] = []

    def refuse(*words: object) -> None:
        tries.append(words)
        raise StoreError("no answer")

    monkeypatch.setattr(run_finish, "collect", called)
    monkeypatch.setattr(run_finish, "_through", refuse)
    monkeypatch.setattr(run_finish, "_PIECE_BYTES", 300)
    told: list[str] = []
    retrying = Retrying(0.0, Reporting(Phases(told), 0.0), is_store_away=is_store_away)
    run = RunDirectory(tmp_path, tmp_path)
    tensors, digests = _final_model(actors, CheckpointPlaces("s3://bucket/run"), run, retrying)
    assert torch.equal(tensors["params"], params_P) and torch.equal(
        tensors["model_buffers"], buffers_B
    )
    assert digests == {"eu": digest(params_P + 1), "us": digest(params_P)}
    assert (len(tries), len(told)) == ((0, 0) if is_store_away else (1, 1))
