"""The states of a run's actors, and what they hold in each."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.runtime.actor import ActorState, RunActor
from geo_ray.runtime.spec import RunSpec

SPEC = RunSpec("{}", "", "", "", "run")


class Actor(RunActor[str, list[str]]):
    """Loads a word, serves with a list, and notes what it closes."""

    def __init__(self) -> None:
        super().__init__(SPEC, "eu")
        self.closed: list[object] = []

    def _release(self, served: list[str] | None) -> None:
        self.closed.append(served)


def test_an_actor_is_loaded_serves_and_closes() -> None:
    actor = Actor()
    assert actor._state is ActorState.CREATED and actor._is_starting
    actor._load("word")
    assert actor._loaded == "word" and actor._is_starting
    actor._serve(["socket"])
    assert actor._serving == ["socket"] and not actor._is_starting
    actor.close()
    actor.close()
    assert actor._state is ActorState.CLOSED
    assert actor.closed == [["socket"], None]


def test_missing_contents_of_an_actor_are_reported_with_its_state() -> None:
    actor = Actor()
    with pytest.raises(InvariantError, match=r"'eu' has loaded nothing: it is created"):
        _ = actor._loaded
    actor._load("word")
    with pytest.raises(InvariantError, match="Actor of region 'eu' does not serve: it is loaded"):
        _ = actor._serving


def test_a_halted_worker_is_loaded_again() -> None:
    actor = Actor()
    actor._load("word")
    actor._serve(["socket"])
    actor._halt()
    assert actor._serving == ["socket"], "its driver may still ask"
    actor._load("another")
    actor._serve([])
    assert actor._state is ActorState.SERVING


@pytest.mark.parametrize("calls", [["_serve"], ["close", "_load"], ["_halt", "_serve"]])
def test_calls_out_of_order_are_refused_and_change_nothing(calls: list[str]) -> None:
    actor = Actor()
    for name in calls[:-1]:
        getattr(actor, name)()
    before = actor._state
    with pytest.raises(InvariantError, match="is not possible while"):
        getattr(actor, calls[-1])([])
    assert actor._state is before and actor._served is None


def test_an_actor_that_never_served_closes() -> None:
    actor = Actor()
    actor.close()
    assert actor.closed == [None]
