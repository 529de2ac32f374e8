"""A slow actor does not delay the answers of others, and is lost after a while."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from geo_ray.base.errors import LeaseLostError
from geo_ray.ray_cluster.calls import Polls

LOST_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep_s(self, duration_s: float) -> None:
        self.time_s += duration_s


class Actor:
    """Stands for an actor's handle; a call's reference is the call itself, whose end is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []
        self.poll = self

    def remote(self, token: int = 0) -> Call:
        self.calls.append(Call(self.name, len(self.calls)))
        return self.calls[-1]


class Call:
    def __init__(self, name: str, number: int) -> None:
        self.value: Any = {"from": name, "number": number}
        self.is_done = True


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        assert num_returns == len(calls)
        return [c for c in calls if c.is_done], [c for c in calls if not c.is_done]

    def get(call: Call) -> Any:
        if isinstance(call.value, Exception):
            raise call.value
        return call.value

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


def test_a_slow_actor_is_called_once_and_answers_later() -> None:
    polls, quick, slow = Polls(LOST_S, Clock()), Actor("quick"), Actor("slow")
    handles = {("ps", "eu"): quick, ("bridge", "eu"): slow}
    slow.remote()
    slow.calls.clear()
    first = Call("slow", 0)
    first.is_done = False
    slow.remote = lambda token=0: first  # type: ignore[method-assign]
    for number in range(3):
        answers, lost = polls.ask(handles, 0.5)
        assert answers == {("ps", "eu"): {"from": "quick", "number": number}} and not lost
    first.is_done = True
    answers, lost = polls.ask(handles, 0.5)
    assert answers["bridge", "eu"] == {"from": "slow", "number": 0} and not lost
    assert list(answers) == list(handles)


def test_an_actor_without_an_answer_for_long_is_lost() -> None:
    clock, slow = Clock(), Actor("slow")
    polls, handles = Polls(LOST_S, clock), {("ps", "eu"): slow}
    call = Call("slow", 0)
    call.is_done = False
    slow.remote = lambda token=0: call  # type: ignore[method-assign]
    clock.time_s = 5.0
    assert polls.ask(handles, 0.5) == ({}, {})
    clock.time_s = 5.0 + LOST_S - 1.0
    assert polls.ask(handles, 0.5) == ({}, {})
    clock.time_s = 5.0 + LOST_S
    answers, lost = polls.ask(handles, 0.5)
    assert not answers and "60 s" in lost["ps", "eu"]


def test_a_dead_actor_is_lost_at_once() -> None:
    polls, dead = Polls(LOST_S, Clock()), Actor("dead")
    call = dead.remote()
    call.value = ray.exceptions.RayActorError()
    dead.remote = lambda token=0: call  # type: ignore[method-assign]
    answers, lost = polls.ask({("ps", "eu"): dead}, 0.5)
    assert not answers
    assert lost == {("ps", "eu"): "The actor experienced an error before finishing this task"}


def test_a_replaced_actor_is_called_again() -> None:
    polls, old, new = Polls(LOST_S, Clock()), Actor("old"), Actor("new")
    call = Call("old", 0)
    call.is_done = False
    old.remote = lambda token=0: call  # type: ignore[method-assign]
    assert polls.ask({("ps", "eu"): old}, 0.5) == ({}, {})
    call.is_done = True
    answers, _ = polls.ask({("ps", "eu"): new}, 0.5)
    assert answers == {("ps", "eu"): {"from": "new", "number": 0}}


def test_an_actor_that_obeys_another_run_actor_is_not_lost() -> None:
    polls, taken = Polls(LOST_S, Clock(), token=1), Actor("taken")
    call = Call("taken", 0)
    overtaken = LeaseLostError("the run was taken over")
    call.value = ray.exceptions.RayTaskError("poll", "", overtaken)
    taken.remote = lambda token: call  # type: ignore[method-assign]
    with pytest.raises(LeaseLostError, match="taken over"):
        polls.ask({("ps", "eu"): taken}, 0.5)
