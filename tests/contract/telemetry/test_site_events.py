"""What may happen to a site, and what every strategy makes of it: the others finish, and agree.

The training plane of the property tests, without its randomness: one site never reports, comes
late, leaves in the middle of a round, or is silent for a long time and returns.
"""

from __future__ import annotations

import pytest
import torch

from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.optimizers import Sgd
from tests.support.plane_support import Plane, Setup

SHORT = {
    "diloco_streaming": {"interval": 4, "fragments": 2, "tau": 1},
    "cocodc": {"interval": 4, "fragments": 2, "tau": 1, "utilization": 0.7},
    "decoupled": {"interval": 4, "fragments": 2},
    "hfa": {"k2": 2},
}
OTHERS, LATE = ("a", "b"), "c"


def plane_of(kind: str) -> Plane:
    cls = STRATEGIES[kind]
    options = SHORT.get(kind, {"interval": 2} if "interval" in cls.model_fields else {})
    return Plane(Setup(cls(**options), Sgd(lr=0.1), dict.fromkeys("abc", 1), "sync", 6, False))


def go_on(plane: Plane, without: str | None = None, events: int = 400) -> None:
    """Whatever can happen, oldest first, but nothing at one site."""
    for _ in range(events):
        possible = [e for e in plane._possible() if without is None or not about(plane, e, without)]
        if not possible:
            return
        possible[0]()
        plane.check()


def about(plane: Plane, event, name: str) -> bool:
    """Whether an event needs that site to be alive."""
    if event.func == plane.deliver_update:
        return plane.updates[event.args[0]].region == name
    if event.func == plane.deliver_reply:
        return plane.replies[event.args[0]].to == name
    return event.args[0] == name


def declare_dead(plane: Plane, name: str) -> None:
    plane.updates = [u for u in plane.updates if u.region != name]
    plane.replies = [r for r in plane.replies if r.to != name]
    plane._return(plane.averager.leave(name))
    for key in plane.taken:  # a round that this completes is handed in once more
        plane.taken[key] = min(1, plane.taken[key])
    del plane.regions[name]


def finish(plane: Plane) -> None:
    plane.drain()
    plane.check()
    params = [region.params_P for region in plane.regions.values()]
    assert all(torch.allclose(params[0], other_P, rtol=1e-5, atol=1e-5) for other_P in params[1:])
    assert all(region.server.version > 0 for region in plane.regions.values())


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_site_that_never_reports_is_declared_dead_and_the_others_finish(kind):
    plane = plane_of(kind)
    go_on(plane, without=LATE)
    assert LATE not in {region for region, _, _ in plane.taken}
    declare_dead(plane, LATE)
    finish(plane)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_site_that_joins_late_takes_part(kind):
    plane = plane_of(kind)
    go_on(plane, without=LATE, events=30)
    go_on(plane)
    finish(plane)
    assert LATE in {region for region, _, _ in plane.taken}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("events", [7, 12, 19, 25])
def test_a_site_that_leaves_in_mid_round_is_not_waited_for(kind, events):
    plane = plane_of(kind)
    go_on(plane, events=events)
    declare_dead(plane, LATE)
    finish(plane)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("events", [5, 11, 18])
def test_a_site_that_is_silent_for_long_goes_on_where_it_was(kind, events):
    plane = plane_of(kind)
    go_on(plane, events=events)
    go_on(plane, without=LATE)
    go_on(plane)
    finish(plane)
    assert set("abc") == {region for region, _, _ in plane.taken}
