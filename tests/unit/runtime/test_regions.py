"""What follows from one event for the regions of a run: their states, and the actions."""

from __future__ import annotations

import json

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.requests import MemberRequest, Verb
from geo_ray.runtime.regions import (
    AT_ONCE_S,
    Action,
    Answer,
    AskToLeave,
    AveragerMoved,
    AveragerSeen,
    CallOff,
    Drained,
    DropRegion,
    Event,
    JoinEnded,
    Lose,
    MemberPolicy,
    MembershipState,
    MoveAverager,
    Noticed,
    RegionGone,
    Regions,
    Release,
    ReportDead,
    Requested,
    RunSituation,
    Say,
    Start,
    TimePassed,
    ViewSeen,
)
from geo_ray.training.membership import View

ALL = View(("eu", "us"))


@pytest.fixture(scope="module")
def policy() -> MemberPolicy:
    tree = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": [{"name": name} for name in ("ap", "eu", "us")],
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 1},
        "members": {"min": 1, "absent": ["ap"]},
        "averager": {"region": "us", "standby": "eu"},
    }
    return MemberPolicy(Experiment.model_validate_json(json.dumps(tree)))


@pytest.fixture
def regions(policy: MemberPolicy) -> Regions:
    return Regions(policy, ("eu", "us"))


def after(regions: Regions, *events: Event, leader: str = "us", now_s: float = 0.0) -> list[Action]:
    """The actions that follow from the last event, without lines for the user."""
    actions: list[Action] = []
    for event in events:
        actions = regions.next(
            event, RunSituation(now_s, leader, "eu", is_standby_up=leader == "us")
        )
    return [each for each in actions if not isinstance(each, Say)]


def asked(verb: Verb, region: str) -> Requested:
    return Requested(MemberRequest(verb=verb, region=region, id="1"), ALL)


def test_a_region_is_started_once_the_averager_answers_and_trains_when_it_has_joined(
    regions: Regions,
) -> None:
    assert after(regions, asked("add", "ap")) == [Answer("add", "ap", "1")]
    assert regions["ap"].state is MembershipState.JOINING
    assert after(regions, ViewSeen(ALL)) == [Start("ap")]
    assert after(regions, ViewSeen(ALL)) == []
    assert after(regions, JoinEnded("ap", has_joined=True)) == []
    assert regions["ap"].state is MembershipState.MEMBER


def test_a_join_that_fails_leaves_the_region_as_it_was(regions: Regions) -> None:
    after(regions, asked("add", "ap"), ViewSeen(ALL), JoinEnded("ap", has_joined=False))
    assert regions["ap"].state is MembershipState.ABSENT and regions.lost == []
    after(regions, RegionGone("eu"), TimePassed(), ViewSeen(ALL))
    assert regions["eu"].state is MembershipState.JOINING and regions.lost == ["eu"]
    after(regions, JoinEnded("eu", has_joined=False))
    assert regions["eu"].state is MembershipState.LOST and regions["eu"].backoff.due_s == 10.0


def test_a_join_is_called_off(regions: Regions) -> None:
    after(regions, asked("add", "ap"), ViewSeen(ALL))
    actions = after(regions, asked("remove", "ap"))
    assert [type(each) for each in actions] == [Answer, CallOff]
    after(regions, JoinEnded("ap", has_joined=False))
    assert regions["ap"].state is MembershipState.ABSENT and regions.away == {"ap"}


def test_a_region_drains_until_it_has_left_and_its_workers_are_back(regions: Regions) -> None:
    assert after(regions, asked("drain", "eu"))[1:] == [AskToLeave("eu")]
    assert regions["eu"].is_leaving
    left = ALL.changed((), ("eu",))
    assert after(regions, ViewSeen(left, frozenset({"eu"}))) == []
    assert after(regions, ViewSeen(left)) == [DropRegion("eu"), Drained("eu", "asked")]
    assert regions["eu"].state is MembershipState.ABSENT and regions.awaited == []


def test_the_averager_moves_before_its_region_leaves(regions: Regions) -> None:
    assert after(regions, asked("drain", "us"))[1:] == []
    assert after(regions, AveragerSeen(), now_s=10.0) == [MoveAverager("us")]
    assert after(regions, AveragerSeen(), now_s=11.0) == [], "it is not asked each time"
    assert after(regions, AveragerSeen(), leader="eu") == [AskToLeave("us")]
    assert after(regions, AveragerMoved(), leader="us") == [
        Answer("drain", "us", refusal="the averager is in 'us' now")
    ]
    assert regions["us"].state is MembershipState.MEMBER


def test_a_region_with_a_notice_leaves_and_is_lost_before_its_machine_is_gone(
    regions: Regions,
) -> None:
    assert after(regions, Noticed({"eu": 60.0})) == [AskToLeave("eu")]
    (lose,) = after(regions, Noticed({"eu": AT_ONCE_S}))
    assert isinstance(lose, Lose) and lose.region == "eu"
    assert after(regions, RegionGone("eu", has_notice=True)) == [Release("eu"), ReportDead("eu")]
    assert regions["eu"].state is MembershipState.LOST and regions.awaited == ["eu"]


def test_a_region_that_left_for_a_notice_comes_back(regions: Regions) -> None:
    after(regions, Noticed({"eu": 60.0}))
    actions = after(regions, ViewSeen(ALL.changed((), ("eu",))))
    assert actions == [DropRegion("eu"), Release("eu"), Drained("eu", "notice")]
    after(regions, TimePassed())
    assert regions["eu"].state is MembershipState.JOINING and regions.away == frozenset()


@pytest.mark.parametrize("verb", ["drain", "remove"])
def test_a_region_that_is_lost_after_it_was_asked_to_leave_stays_away(
    regions: Regions, verb: Verb
) -> None:
    after(regions, asked(verb, "eu"), RegionGone("eu"))
    assert regions["eu"].state is MembershipState.ABSENT
    assert regions.away == {"eu"} and regions.lost == [] and regions["eu"].is_dead


def test_losses_are_reported_again_where_the_averager_has_moved(regions: Regions) -> None:
    assert after(regions, RegionGone("eu")) == [ReportDead("eu")]
    assert after(regions, AveragerMoved()) == [ReportDead("eu")]


def test_the_state_of_another_run_actor_is_restored(policy: MemberPolicy) -> None:
    regions = Regions(policy, ("us",))
    rows = {"eu": {"cursor": 4}}
    regions.restore(["eu"], ["ap"], rows, unawaited=["eu"], now_s=5.0)
    assert regions["eu"].state is MembershipState.LOST and regions["eu"].rows == {"cursor": 4}
    assert (regions.awaited, regions.away) == (["eu"], {"ap"})
    assert not regions["eu"].is_awaited and regions["eu"].backoff.due_s == 5.0


def test_an_impossible_event_is_refused(regions: Regions) -> None:
    with pytest.raises(InvariantError, match="Region of a run: 'join' is not possible while"):
        regions["ap"].move("join")
