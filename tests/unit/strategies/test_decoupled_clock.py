"""Each fragment of `decoupled` waits for its own time of grace."""

from __future__ import annotations

import torch

from geo_ray.strategies.decoupled import Decoupled
from geo_ray.strategies.state import AveragerState, Update

RULE = Decoupled(fragments=2, quorum=1, grace_s=1.0)
CUTS = ((0, 2), (2, 4), (0, 4))


def _center() -> AveragerState:
    return AveragerState(("a", "b", "c"), fragments=CUTS)


def _say(averager: AveragerState, region: str, fragment: int, now_s: float) -> list[str]:
    averager.now_s = now_s
    update = Update(region, torch.ones(2), 8, fragment=fragment, steps=1)
    return [reply.to for reply in RULE.on_update(averager, update)]


def _wake(averager: AveragerState, now_s: float) -> list[str]:
    averager.now_s, averager.wake_s = now_s, None
    return [reply.to for reply in RULE.on_wake(averager)]


def test_only_the_fragment_whose_grace_is_over_is_taken() -> None:
    averager = _center()
    assert _say(averager, "a", 0, 0.0) == [] and averager.wake_s == 1.0
    assert _say(averager, "b", 1, 0.5) == [] and averager.wake_s == 1.0
    assert _wake(averager, 1.0) == ["a"]
    assert averager.wake_s == 1.5 and set(averager.waiting) == {"b"}
    assert _wake(averager, 1.5) == ["b"] and averager.wake_s is None


def test_a_fragment_below_its_quorum_is_not_taken_with_another() -> None:
    rule = RULE.model_copy(update={"quorum": 2})
    averager = _center()
    updates = [
        Update(name, torch.ones(2), 8, fragment=fragment, steps=1)
        for name, fragment in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert [rule.on_update(averager, update) for update in updates[:2]] == [[], []]
    averager.members = ("a", "b", "c", "d")  # so that not everybody waits
    assert rule.on_update(averager, updates[2]) == []
    averager.now_s, averager.wake_s = 1.0, None
    assert {reply.to for reply in rule.on_wake(averager)} == {"a", "b"}
    assert set(averager.waiting) == {"c"} and averager.wake_s is None


def test_whoever_must_be_let_go_is_let_go_before_the_time() -> None:
    averager = _center()
    _say(averager, "a", 0, 0.0)
    _say(averager, "b", 1, 0.1)
    assert {reply.to for reply in RULE.on_release(averager)} == {"a", "b"}
    assert _wake(averager, 1.0) == [] and averager.wake_s is None
