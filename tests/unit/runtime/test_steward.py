"""The steward: who may command it, what it ends, what it tells. Its processes are plain values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
from geo_ray.runtime.driver import supervisor
from geo_ray.runtime.driver.supervisor import StewardActor

from geo_ray.base.errors import InvariantError, LeaseLostError
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.runtime.launcher import ProcessOrder
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SecretReceiver

RUN = ("run-1", ("eu", "us"), TransportConfig())


class Process:
    """Stands for a handle."""

    def __init__(self, number: int) -> None:
        self._actor_id = number.to_bytes(4, "big")


class Processes:
    """Makes none."""

    def __init__(self) -> None:
        self.made: list[Process] = []

    def make(self, orders: Sequence[ProcessOrder]) -> list[Process]:
        made = [Process(len(self.made) + i) for i, _ in enumerate(orders)]
        self.made += made
        return made


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(supervisor, "head_answers", lambda: True)
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: found.append(handle))
    return found


@pytest.fixture
def steward(killed: list[Any]) -> StewardActor:
    made = StewardActor(patience_s=3600.0)
    made._processes = Processes()  # type: ignore[assignment]
    return made


def order(epoch: int, place: tuple[str, int] | None = None) -> ProcessOrder:
    kind: Any = "bridge" if place is None else "worker"
    return ProcessOrder(kind, (), 1.0, 0.0, None, place, epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        lambda s: s.attach(1),
        lambda s: s.hear(1),
        lambda s: s.begin(1, RUN),
        lambda s: s.note(1, None),
        lambda s: s.keep_only(1, []),
        lambda s: s.clear(1),
        lambda s: s.end(1),
        lambda s: s.make(1, [order(1)]),
        lambda s: s.place(1, [], 1.0),
        lambda s: s.remove(1, {}),
        lambda s: s.for_bridge(1, "eu", None),
        lambda s: s.for_server(1, "eu", None),
        lambda s: s.sign(1, "eu", b""),
    ],
)
def test_a_driver_that_was_overtaken_commands_nothing(
    steward: StewardActor, command: Callable[[StewardActor], object], killed: list[Any]
) -> None:
    steward.attach(1)
    steward.make(1, [order(1)])
    steward.attach(2)
    with pytest.raises(LeaseLostError, match="holder 2"):
        command(steward)
    assert not killed
    assert len(steward.make(2, [order(2)])) == 1


def test_what_the_next_driver_does_not_go_on_with_ends(
    steward: StewardActor, killed: list[Any]
) -> None:
    steward.attach(1)
    first, second, third = steward.make(1, [order(1), order(1, ("eu", 0)), order(4, ("eu", 0))])
    kept = steward.attach(2)
    assert kept.book is None
    assert (dict(kept.epochs), kept.newest_epoch) == ({("eu", 0): 4}, 4)
    steward.keep_only(2, [first, second])
    assert killed == [third]
    steward.clear(2)
    assert killed == [third, first, second]
    assert dict(steward.attach(2).epochs) == {("eu", 0): 4}, "no incarnation comes twice"


def test_keys_are_of_one_run_and_leave_it_sealed_only(steward: StewardActor) -> None:
    steward.attach(1)
    receiver = SecretReceiver()
    told = Introduction(receiver.public)
    with pytest.raises(InvariantError, match="before a run began"):
        steward.for_server(1, "eu", told)
    keys = []
    for _ in range(2):
        steward.begin(1, RUN)
        sealed = steward.for_server(1, "eu", told)
        keys.append(receiver.open(sealed, LAN_KEY))
        assert keys[-1] not in sealed
        assert receiver.open(steward.for_server(1, "eu", told), LAN_KEY) == keys[-1]
        assert receiver.open(steward.for_server(1, "us", told), LAN_KEY) != keys[-1]
        assert keys[-1] not in pickle.dumps(steward.attach(1))
    assert keys[0] != keys[1]
