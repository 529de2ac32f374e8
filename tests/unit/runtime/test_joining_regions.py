"""Joining regions, concurrently; decisions are the real ones, processes are missing."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from test_controller_failures import HOME, Run, _Absent
from test_controller_failures import log as log

from geo_ray.base.errors import RegionLostError
from geo_ray.runs.requests import MemberRequest, Verb
from geo_ray.runtime import joining
from geo_ray.runtime.joining import Joining
from geo_ray.telemetry.event_log import EventLog
from geo_ray.training.checkpoint_parts import TransferredState
from geo_ray.training.membership import View

NAMES = ("af", "asia", "eu", HOME)


class _Group:
    def __init__(self, region: str, calls: list[tuple[str, ...]]) -> None:
        self.bridges = {region: _Absent(calls, region)}
        self.bridge_addresses = {region: ((region, 1), (region, 2))}
        self.primaries = {region: _Absent(calls, f"{region}/ps")}
        self.placed: dict[str, Any] = {}
        self.shard_servers: dict[str, Any] = {region: []}
        self.workers: dict[Any, Any] = {}
        self.shard_addresses: dict[str, Any] = {}


class _Process(Joining):
    """A `Joining` whose processes come up when the test says so."""

    calls: list[tuple[str, ...]]
    made: dict[str, _Process]

    def bring_up(self, placed: Any, demand: Any) -> None:
        self._up = Future()
        self.made[self.region] = self

    def come_up(self) -> None:
        self._up.set_result(_Group(self.region, self.calls))  # type: ignore[arg-type]

    def begin_as(self, transferred: TransferredState) -> None:
        self._begun = Future()
        self.calls.append((self.region, "begin_as", transferred.donor))

    def train(self) -> None:
        assert self._begun is not None
        self._begun.set_result(10)

    def give_up(self) -> None:
        self.calls.append((self.region, "give_up"))


class Entrance:
    """A run whose averager has a view that follows the requests to it."""

    def __init__(self, path: Path, log: EventLog, patch: pytest.MonkeyPatch) -> None:
        sections = {
            "regions": [{"name": name} for name in NAMES],
            "members": {"min": 1, "absent": ["af"]},
        }
        self.run = Run(path, log, absent=["af", "eu"], **sections)
        actors = self.run.actors
        actors.bridge_addresses = {name: ((name, 1), (name, 2)) for name in actors.bridges}
        self.view = View(("asia", HOME))
        self.refuses = False
        patch.setattr(_Process, "calls", self.run.calls, raising=False)
        patch.setattr(_Process, "made", {}, raising=False)
        patch.setattr(joining, "Joining", _Process)
        patch.setattr(joining, "end_transfer", self._end_lending)
        actors.bridges[HOME].answers["change_members"] = self._change
        actors.bridges[HOME].answers["report_dead"] = self._leave
        actors.bridges[HOME].answers["begun"] = self._begun
        self.members = self.run.controller.members

    def _change(self, joins: tuple[str, ...], leaves: tuple[str, ...], donor: str) -> None:
        if not self.refuses:
            self.view = self.view.changed(joins, leaves, donor)

    def _leave(self, region: str, *_: object) -> None:
        if region in self.view.members:
            self.view = self.view.without(region)

    def _begun(self, region: str) -> None:
        self.view = self.view.begun(region)

    def _end_lending(self, _: Any, donor: str) -> None:
        self.run.calls.append((donor, "end_transfer"))

    def look(self, *asked: tuple[Verb, str]) -> None:
        requests = [MemberRequest(verb=verb, region=region) for verb, region in asked]
        self.members.requests = lambda: requests
        self.members.tick({("bridge", HOME): {"view": self.view}})

    def hand_over(self, donor: str = HOME) -> None:
        self.members.on_state_transferred(donor, {"parts": [], "step": 4, "round": 2})

    def of(self, kind: str) -> list[str]:
        return [str(event.fields["region"]) for event in self.run.events if event.kind == kind]


@pytest.fixture
def entrance(tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> Entrance:
    return Entrance(tmp_path, log, monkeypatch)


def test_none_waits_for_another_to_come_up_and_those_that_are_up_enter_together(
    entrance: Entrance,
) -> None:
    entrance.look(("add", "af"), ("add", "eu"))
    assert set(_Process.made) == {"af", "eu"}, "side by side"
    assert entrance.of("members_accepted") == entrance.of("region_joining") == ["af", "eu"]
    for name in ("eu", "af"):
        _Process.made[name].come_up()
    entrance.look()
    assert [call[2] for call in entrance.run.told("change_members")] == ["('af', 'eu')"]
    assert entrance.view.joining == ("af", "eu") and entrance.members.is_joining
    entrance.look()
    entrance.hand_over()
    assert sorted(entrance.run.told("begin_as")) == [
        ("af", "begin_as", HOME), ("eu", "begin_as", HOME)
    ]  # fmt: skip
    _Process.made["eu"].train()
    entrance.look()
    assert entrance.of("region_joined") == ["eu"] and not entrance.run.told("end_transfer")
    _Process.made["af"].train()
    entrance.look()
    assert entrance.of("region_joined") == ["eu", "af"] and not entrance.members.is_joining
    assert entrance.run.told("end_transfer") == [(HOME, "end_transfer")]
    assert set(entrance.run.actors.primaries) == set(NAMES) == set(entrance.view.members)
    assert not entrance.view.joining


def test_a_region_that_never_starts_blocks_no_other(entrance: Entrance) -> None:
    entrance.look(("add", "af"), ("add", "eu"))
    _Process.made["eu"].come_up()
    entrance.look()
    entrance.hand_over()
    _Process.made["eu"].train()
    entrance.look()
    assert entrance.of("region_joined") == ["eu"] and set(
        entrance.members._joining_regions._open
    ) == {"af"}
    _Process.made["af"]._up.set_exception(RegionLostError("no machine"))
    entrance.look()
    assert entrance.of("join_failed") == ["af"] and not entrance.run.told("report_dead")


def test_a_late_region_enters_at_the_next_barrier(entrance: Entrance) -> None:
    entrance.look(("add", "af"), ("add", "eu"))
    _Process.made["eu"].come_up()
    entrance.look()
    entrance.hand_over()
    _Process.made["af"].come_up()
    entrance.look()
    assert len(entrance.run.told("change_members")) == 1, "eu is on its way in"
    _Process.made["eu"].train()
    entrance.look()
    assert [call[2] for call in entrance.run.told("change_members")] == ["('eu',)", "('af',)"]


def test_of_two_that_enter_together_one_may_die(entrance: Entrance) -> None:
    entrance.look(("add", "af"), ("add", "eu"))
    for each in _Process.made.values():
        each.come_up()
    entrance.look()
    entrance.hand_over()
    begun = _Process.made["af"]._begun
    assert begun is not None
    begun.set_exception(RegionLostError("killed"))
    _Process.made["eu"].train()
    entrance.look()
    assert entrance.of("join_failed") == ["af"] and entrance.of("region_joined") == ["eu"]
    assert entrance.view.members == ("asia", "eu", HOME) and not entrance.view.joining


def test_requests_beyond_the_averager_s_capacity_are_repeated(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change was in progress; a request then has no effect."""
    entrance.refuses = True
    entrance.look(("add", "af"))
    _Process.made["af"].come_up()
    entrance.look()
    entrance.refuses = False
    entrance.look()
    assert "af" not in entrance.view.members
    monkeypatch.setattr(joining, "_ASK_S", 0.0)
    entrance.look()
    assert entrance.view.joining == ("af",)
    entrance.look()
    assert len(entrance.run.told("change_members")) == 2, "no more once it is a member"


@pytest.mark.parametrize("stage", ["coming up", "asked", "copied"])
def test_a_join_can_be_called_off(entrance: Entrance, stage: str) -> None:
    entrance.look(("add", "af"))
    if stage != "coming up":
        _Process.made["af"].come_up()
        entrance.look()
    if stage == "copied":
        entrance.hand_over()
    entrance.look(("remove", "af"))
    assert entrance.of("join_failed") == ["af"] and not entrance.of("members_refused")
    assert ("af", "give_up") in entrance.run.calls
    assert "af" not in entrance.view.members and not entrance.members.is_joining
    entrance.look(("add", "af"))
    assert set(entrance.members._joining_regions._open) == {"af"}, "and asked for again"


def test_a_bridge_that_is_replaced_as_it_hands_over_is_not_waited_for(entrance: Entrance) -> None:
    """The next region transfers nothing: the joining one would wait for a minute."""
    entrance.look(("add", "af"))
    _Process.made["af"].come_up()
    entrance.look()
    entrance.hand_over("asia")
    entrance.run.actors.bridges["asia"] = _Absent(entrance.run.calls, "asia")
    entrance.look()
    assert entrance.of("join_failed") == ["af"] and entrance.of("region_lost") == []


def test_joining_regions_dial_bridges_that_came_or_were_replaced(entrance: Entrance) -> None:
    """With a standby all regions are linked to all, joining ones to each other, too."""
    entrance.look(("add", "af"), ("add", "eu"))
    for each in _Process.made.values():
        each.come_up()
    entrance.look()
    dialled = {(call[0], call[2]) for call in entrance.run.told("connect")}
    assert dialled == {(a, b) for a in ("af", "eu") for b in ("asia", HOME)} | {("eu", "af")}
    entrance.run.calls.clear()
    entrance.run.actors.bridges["asia"] = _Absent(entrance.run.calls, "asia")
    entrance.look()
    assert sorted((call[0], call[2]) for call in entrance.run.told("connect")) == [
        ("af", "asia"), ("eu", "asia")
    ]  # fmt: skip
    assert sorted(call[2] for call in entrance.run.told("expect")) == ["af", "eu"]


def test_a_lost_donor_ends_the_joins_of_all_that_enter(entrance: Entrance) -> None:
    entrance.look(("add", "af"), ("add", "eu"))
    for each in _Process.made.values():
        each.come_up()
    entrance.look()
    entrance.look()
    entrance.view = entrance.view.changed((), (), "asia")
    entrance.members._joining_regions.note(entrance.view)
    entrance.run.polls.news = [({}, {("ps", "asia"): "killed"})]
    entrance.run.controller._poll()
    assert entrance.of("join_failed") == ["af", "eu"] and entrance.view.members == (HOME,)


def test_an_ending_run_does_not_wait_for_a_copy_forever(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint begins while a region is joining: it would end without one."""
    entrance.look(("add", "af"))
    _Process.made["af"].come_up()
    entrance.look()
    entrance.hand_over()
    entrance.run.controller.interrupted.set()
    entrance.run.controller._keep_time()
    entrance.look()
    assert not entrance.of("join_failed"), "it may be there soon"
    monkeypatch.setattr(joining, "_ENDING_S", -1.0)
    entrance.look()
    assert entrance.of("join_failed") == ["af"] and not entrance.view.joining


def test_a_training_region_is_a_member_even_if_the_run_ends(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_ENDING_S", -1.0)
    entrance.look(("add", "af"))
    _Process.made["af"].come_up()
    entrance.look()
    entrance.hand_over()
    _Process.made["af"].train()
    entrance.run.controller.interrupted.set()
    entrance.run.controller._keep_time()
    entrance.look()
    assert entrance.of("region_joined") == ["af"] and not entrance.of("join_failed")
