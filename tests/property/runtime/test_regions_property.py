"""Any history of events leaves the regions of a run in states that make sense."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.requests import MemberRequest
from geo_ray.runtime.regions import (
    LONGEST_S,
    Answer,
    AskToLeave,
    AveragerMoved,
    AveragerSeen,
    CallOff,
    DropRegion,
    Event,
    JoinEnded,
    Lose,
    MemberPolicy,
    MembershipState,
    MoveAverager,
    MoveWanted,
    Noticed,
    Region,
    RegionGone,
    Regions,
    Release,
    Requested,
    RunSituation,
    Start,
    TimePassed,
    ViewSeen,
)
from geo_ray.training.membership import View

NAMES = ("ap", "eu", "sa", "us")
HERE = (MembershipState.MEMBER, MembershipState.DRAINING)
names = st.sampled_from(NAMES)
verbs = st.sampled_from(("add", "drain", "remove"))


@cache
def policy_of(rejoin: bool) -> MemberPolicy:
    tree = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": [{"name": name} for name in NAMES],
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 1},
        "members": {"min": 1, "rejoin": rejoin, "absent": ["sa"]},
        "averager": {"region": "us", "standby": "eu"},
    }
    return MemberPolicy(Experiment.model_validate_json(json.dumps(tree)))


class World:
    """Processes and an averager that do what the actions say; what exists is known apart."""

    def __init__(self, rejoin: bool) -> None:
        self.policy = policy_of(rejoin)
        self.present = {"ap", "eu", "us"}
        self.regions = Regions(self.policy, sorted(self.present))
        self.starting: set[str] = set()
        self.view = View(tuple(sorted(self.present)))
        self.leader, self.standby = "us", "eu"
        self.now_s = 0.0
        self.is_ending = False
        self.wanted: dict[str, bool] = {}  # whether a user wants it, by the newest request

    def now(self) -> RunSituation:
        is_up = self.standby in self.present
        needed = frozenset() if is_up else frozenset({self.leader})
        return RunSituation(
            self.now_s,
            self.leader,
            self.standby,
            is_up,
            needed,
            self.is_ending,
            bool(self.starting),
        )

    def on(self, event: Event) -> None:
        for action in self.regions.next(event, self.now()):
            match action:
                case Answer(verb, region, _, None):
                    self.wanted[region] = verb == "add"
                case Start(region):
                    assert region not in self.present | self.starting
                    assert self.wanted.get(region, True), "nobody brings back who was sent away"
                    self.starting.add(region)
                case CallOff(region, _):
                    self.starting.remove(region)
                    self.on(JoinEnded(region, has_joined=False))
                case Lose(region, _):
                    self.lose(region)
                case DropRegion(region):
                    self.present.remove(region)
                case AskToLeave(region):
                    assert region in self.present
                    if region in self.view.members and len(self.view.members) > 1:
                        self.view = self.view.changed((), (region,))
                case MoveAverager(region):
                    assert region == self.leader and self.standby in self.present
                    self.move()
                case Release(region):
                    assert region not in self.present
                case _:
                    pass
        self.check()

    def lose(self, region: str) -> None:
        if region == self.leader:
            if self.standby not in self.present:
                return  # the run ends
            self.move()
        self.present.remove(region)
        if region in self.view.members:
            self.view = self.view.without(region)
        self.on(RegionGone(region))

    def move(self) -> None:
        self.leader, self.standby = self.standby, self.leader
        self.on(AveragerMoved())

    def end_join(self, region: str, *, has_joined: bool) -> None:
        if region not in self.starting:
            return
        self.starting.remove(region)
        if has_joined:
            self.present.add(region)
            if region not in self.view.members:
                self.view = self.view.changed((region,), ())
        self.on(JoinEnded(region, has_joined=has_joined))

    def check(self) -> None:
        for region in self.regions:
            self._check(region)

    def _check(self, region: Region) -> None:
        state = region.state
        assert region.is_starting <= (state is MembershipState.JOINING)
        assert region.is_on_notice <= (state is MembershipState.DRAINING)
        assert (state is MembershipState.LOST) <= region.is_lost
        assert (state is MembershipState.MEMBER) <= (not region.is_lost)
        assert region.is_leaving <= (state is MembershipState.DRAINING)
        comes = state is MembershipState.JOINING or region.backoff.due_s is not None
        if self.policy.brings_back and not self.is_ending:
            assert region.is_lost <= comes, "a lost region is always on its way, or due"
        if region.backoff.due_s is not None and state is MembershipState.LOST:
            assert region.backoff.due_s - self.now_s <= LONGEST_S

    def settle(self) -> None:
        """Check what only holds between events."""
        here = set(self.regions.in_state(*HERE))
        assert here == self.present
        starting = {region.name for region in self.regions if region.is_starting}
        assert starting == self.starting


steps = st.one_of(
    st.tuples(st.just("ask"), verbs, names),
    st.tuples(st.just("lose"), names),
    st.tuples(st.just("join"), names, st.booleans()),
    st.tuples(st.just("notice"), names, st.floats(-1.0, 120.0)),
    st.tuples(st.just("pass"), st.floats(0.0, 400.0)),
    st.tuples(st.just("look")),
    st.tuples(st.just("move")),
    st.tuples(st.just("end")),
)


@given(st.booleans(), st.lists(steps, max_size=40))
def test_regions_and_processes_agree_after_any_history(
    rejoin: bool, history: list[tuple[object, ...]]
) -> None:
    world = World(rejoin)
    for step in history:
        match step:
            case ("ask", verb, name):
                request = MemberRequest(verb=verb, region=name)  # type: ignore[arg-type]
                world.on(Requested(request, world.view))
            case ("lose", str(name)) if name in world.present and len(world.present) > 1:
                world.lose(name)
            case ("join", str(name), bool(has_joined)):
                world.end_join(name, has_joined=has_joined)
            case ("notice", str(name), float(left_s)):
                world.on(Noticed({name: left_s}))
            case ("pass", float(passed_s)):
                world.now_s += passed_s
                world.on(TimePassed())
                world.on(AveragerSeen())
            case ("look",):
                world.on(ViewSeen(world.view))
            case ("move",):
                world.on(MoveWanted())
                world.on(AveragerSeen())
            case ("end",):
                world.is_ending = True
            case _:
                pass
        world.settle()


@given(st.lists(st.tuples(names, st.booleans()), max_size=30))
def test_a_region_that_was_sent_away_comes_only_when_it_is_asked_to(
    history: list[tuple[str, bool]],
) -> None:
    world = World(rejoin=True)
    world.on(Requested(MemberRequest(verb="remove", region="ap")))
    for name, has_joined in history:
        if name in world.present and name != "ap" and len(world.present) > 1:
            world.lose(name)
        world.now_s += LONGEST_S
        world.on(TimePassed())
        world.on(ViewSeen(world.view))
        world.end_join(name, has_joined=has_joined)
        assert world.regions["ap"].state is MembershipState.ABSENT
        assert world.regions.away == {"ap"}
