"""An averager that is lost, cut off or slow, at every point: nothing is lost, nothing twice."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.sma import Sma
from tests.support.standby_support import REJOIN_S, TAKEOVER_S, Setup, World


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    kind = draw(st.sampled_from(["sum", "sum", "mean", "asgd", "ama", "sma", "bsp"]))
    interval = draw(st.integers(1, 3))
    wait = draw(st.sampled_from(["always", "when_busy", "never"]))
    strategy = {
        "sum": AsgdGa(interval=interval, wait=wait, combine="sum"),
        "mean": AsgdGa(interval=interval, wait=wait, combine="mean"),
        "asgd": Asgd(wait="always", combine="sum"),
        "ama": Ama(interval=interval),
        "sma": Sma(interval=interval),
        "bsp": Bsp(),
    }[kind]
    rounds = kind in ("sma", "bsp")
    return Setup(
        strategy,
        regions=draw(st.integers(2, 4)),
        steps=draw(st.integers(1, 6)),
        bound=0.0 if rounds else draw(st.sampled_from([0.0, 0.0, 1.0, 2.5, 100.0])),
        skips=strategy.traits.sends == "change" and not rounds and draw(st.booleans()),
        checkpoints=draw(st.booleans()),
    )


def shuffle(world: World, random: Random, events: int) -> None:
    """Some of everything that goes on all the time."""
    for _ in range(events):
        choices = []
        if world.movable():
            choices += [lambda: world.deliver(random.choice(world.movable()))] * 4
        if world.stepping():
            choices += [lambda: world.regions[random.choice(world.stepping())].step()] * 2
        if world.setup.checkpoints:
            choices.append(world.checkpoint) if random.random() < 0.1 else None
        choices.append(lambda: world.tick(random.choice([0.02, 0.1])))
        random.choice(choices)()
        world.check()


def pairs_of(world: World, name: str) -> list[frozenset[str]]:
    return [frozenset((name, other)) for other in world.names if other != name]


def cut_and_heal(
    setup: Setup, seed: int, events: int, cut: list[frozenset[str]], ticks: int
) -> World:
    random = Random(seed)
    world = World(setup, seed)
    shuffle(world, random, events)
    world.cut |= set(cut)
    for _ in range(ticks):
        shuffle(world, random, 5)
        world.tick(1.0)
    world.cut.clear()
    shuffle(world, random, 20)
    world.run_out()
    world.check_end()
    return world


@settings(max_examples=300, deadline=None)
@given(setups(), st.integers(0, 2**32), st.integers(0, 60), st.booleans())
@example(  # a checkpoint is given up between two final updates of one round
    setup=Setup(Sma(interval=2), regions=4, steps=1, bound=0.0, skips=False, checkpoints=True),
    seed=643,
    events=9,
    seen=False,
)
def test_the_averager_dies_at_any_point(setup: Setup, seed: int, events: int, seen: bool) -> None:
    random = Random(seed)
    world = World(setup, seed)
    shuffle(world, random, events)
    leader = world.names[0]
    world.kill(leader, random)
    if seen:
        shuffle(world, random, random.randint(0, 10))
        world.report_dead(leader)
    shuffle(world, random, random.randint(0, 30))
    world.run_out()
    world.check_end()
    what = [event.what for event in world.events]
    alive = world.survivors()
    assert alive == list(world.names[1:])
    if "failed_over" in what:
        assert {world.nodes[name].leader.region for name in alive} == {world.names[1]}


@settings(max_examples=300, deadline=None)
@given(setups(), st.integers(0, 2**32), st.integers(0, 60), st.data())
def test_links_are_cut_and_heal(setup: Setup, seed: int, events: int, data: st.DataObject) -> None:
    leader, *others = "abcdef"[: setup.regions]
    candidates = [frozenset((leader, other)) for other in others]
    cut = data.draw(st.lists(st.sampled_from(candidates), unique=True, min_size=1))
    ticks = data.draw(st.integers(0, int(TAKEOVER_S + REJOIN_S / 3)))
    world = cut_and_heal(setup, seed, events, cut, ticks)
    assert world.survivors() == list(world.names)  # everybody was waited for
    terms = {node.leader.term for node in world.nodes.values()}
    assert len(terms) == 1 and terms <= {1, 2}
    leaders = [name for name, node in world.nodes.items() if node.primary is not None]
    assert leaders == [world.names[max(terms) - 1]]


@settings(max_examples=300, deadline=None)
@given(setups(), st.integers(0, 2**32), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_host_after_host_dies_as_long_as_somebody_stands_by(
    setup: Setup, seed: int, events: list[int]
) -> None:
    random = Random(seed)
    world = World(setup, seed)
    killed = []
    for count in events:
        shuffle(world, random, count)
        host, standby = world.host(), world.successor()
        if host is None or standby is None:
            continue  # without one its loss is the run's end
        world.kill(host.region, random)
        killed.append(host.region)
        if random.random() < 0.5:
            world.report_dead(host.region)
            shuffle(world, random, random.randint(0, 60))
            continue
        # Nobody saw it: before the next dies it must be given up, or no majority would be left.
        for _ in range(int(TAKEOVER_S + REJOIN_S) + 3):
            world.tick(1.0)
            shuffle(world, random, 4)
    world.run_out()
    world.check_end()
    assert world.survivors() == [name for name in world.names if name not in killed]


def test_all_hosts_but_the_last_die_one_after_the_other() -> None:
    """Whoever is left has all that counted."""
    world = World(Setup(AsgdGa(interval=1, combine="sum"), 5, 40, 0.0), seed=3)
    random, hosts = Random(3), []
    for _ in range(4):
        while world.successor() is None:
            shuffle(world, random, 1)
        hosts.append(world.host().region)
        world.kill(hosts[-1], random)
        world.report_dead(hosts[-1])
    world.run_out()
    world.check_end()
    assert hosts[:2] == ["a", "b"] and len(set(hosts)) == 4
    assert world.host().leader.term == 5


@pytest.mark.parametrize(("steps", "seed", "events"), [(4, 156691, 26), (3, 78344, 24)])
def test_a_final_update_that_only_the_lost_averager_took_for_an_ordinary_one(
    steps: int, seed: int, events: int
) -> None:
    """For a checkpoint; its answer held more than the standby knew, and a newer one came."""
    strategy = AsgdGa(interval=1, wait="always", combine="sum")
    setup = Setup(strategy, regions=2, steps=steps, bound=1.0, skips=False, checkpoints=True)
    cut_and_heal(setup, seed, events, [frozenset("ab")], 4)


@pytest.mark.parametrize("bound", [0.0, 1.5])
@pytest.mark.parametrize(
    "strategy", [AsgdGa(interval=1, combine="sum"), Ama(interval=1), Sma(interval=1)]
)
def test_every_point_of_one_run(strategy, bound: float) -> None:
    """The averager's region dies after n events, for every n of a run."""
    if strategy.traits.in_rounds and bound:
        pytest.skip("rounds are always replicated first")
    events = 0
    while True:
        world = World(Setup(strategy, regions=3, steps=3, bound=bound), seed=7)
        random = Random(7)
        shuffle(world, random, events)
        over = all(region.phase == "done" for region in world.regions.values())
        world.kill("a", random)
        world.run_out()
        world.check_end()
        if over:
            break
        events += 1
    assert events > 30


def test_a_leader_that_is_cut_off_for_long_is_not_waited_for() -> None:
    world = World(Setup(AsgdGa(interval=1, combine="sum"), 3, 4, 0.0), seed=1)
    shuffle(world, Random(1), 20)
    world.cut |= set(pairs_of(world, "a"))
    for _ in range(int(TAKEOVER_S + REJOIN_S) + 2):
        world.tick(1.0)
        shuffle(world, Random(2), 10)
    world.cut.clear()
    world.run_out()
    world.check_end()
    assert world.regions["a"].phase == "failed"
    assert [event.what for event in world.events if event.what == "left"] == ["left"]


def test_only_the_link_between_leader_and_standby_is_cut() -> None:
    """The averager stays: the others still see it."""
    world = World(Setup(AsgdGa(interval=1, combine="sum"), 4, 4, 0.0), seed=1)
    world.cut.add(frozenset(("a", "b")))
    for _ in range(60):
        world.tick(1.0)
        shuffle(world, Random(2), 5)
    assert not world.events
    assert world.nodes["a"].primary is not None
    world.cut.clear()
    world.run_out()
    world.check_end()
