"""Each fragment of `decoupled` waits for its own time of grace."""

from __future__ import annotations

import torch

from geo_ray.strategies.base import AveragerState, Update
from geo_ray.strategies.decoupled import Decoupled

RULE = Decoupled(fragments=2, quorum=1, grace_s=1.0)
CUTS = ((0, 2), (2, 4), (0, 4))


def _hub() -> AveragerState:
    return AveragerState(("a", "b", "c"), fragments=CUTS)


def _say(hub: AveragerState, region: str, fragment: int, now_s: float) -> list[str]:
    hub.now_s = now_s
    update = Update(region, 1, 1, 0, 8, torch.ones(2), False, fragment, steps=1)
    return [reply.to for reply in RULE.on_update(hub, update)]


def _wake(hub: AveragerState, now_s: float) -> list[str]:
    hub.now_s, hub.wake_s = now_s, None
    return [reply.to for reply in RULE.on_wake(hub)]


def test_only_the_fragment_whose_grace_is_over_is_taken() -> None:
    hub = _hub()
    assert _say(hub, "a", 0, 0.0) == [] and hub.wake_s == 1.0
    assert _say(hub, "b", 1, 0.5) == [] and hub.wake_s == 1.0
    assert _wake(hub, 1.0) == ["a"]
    assert hub.wake_s == 1.5 and set(hub.waiting) == {"b"}
    assert _wake(hub, 1.5) == ["b"] and hub.wake_s is None


def test_a_fragment_below_its_quorum_is_not_taken_with_another() -> None:
    rule = RULE.model_copy(update={"quorum": 2})
    hub = _hub()
    updates = [
        Update(name, 1, 1, 0, 8, torch.ones(2), False, fragment, steps=1)
        for name, fragment in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert [rule.on_update(hub, update) for update in updates[:2]] == [[], []]
    hub.members = ("a", "b", "c", "d")  # so that not everybody waits
    assert rule.on_update(hub, updates[2]) == []
    hub.now_s, hub.wake_s = 1.0, None
    assert {reply.to for reply in rule.on_wake(hub)} == {"a", "b"}
    assert set(hub.waiting) == {"c"} and hub.wake_s is None


def test_whoever_must_be_let_go_is_let_go_before_the_time() -> None:
    hub = _hub()
    _say(hub, "a", 0, 0.0)
    _say(hub, "b", 1, 0.1)
    assert {reply.to for reply in RULE.on_release(hub)} == {"a", "b"}
    assert _wake(hub, 1.0) == [] and hub.wake_s is None
