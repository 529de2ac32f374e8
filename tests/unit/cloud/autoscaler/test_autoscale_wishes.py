"""Decisions are executed, even if the iteration, the autoscaler or the target changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_run_work import PLAN, finish, new_run

from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.autoscaler.actor import AutoscaleOrder, AutoscalerActor
from geo_ray.cloud.autoscaler.journal import (
    TARGET_OVERRIDE_KEY,
    TargetOverride,
    read_target_override,
    write_target_override,
)
from geo_ray.cloud.autoscaler.run_work import NamedRun
from geo_ray.storage.conditional_store import LocalConditionalStore
from tests.support.autoscale_support import (
    CONFIG,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    target,
)

NOTHING = target(regions=(region(rows_per_s=0.0),))


# ------------------------------------------------------------------ drains


def leaving() -> Scene:
    """Return a scene in which all three machines leave and no drain has reached a node."""
    scene = Scene(busy=True)
    scene.looks(3)
    scene.is_released = True
    assert len(drains(scene.look())) == 3
    scene.leaves.clear()
    return scene


def test_a_drain_that_did_not_come_is_repeated_and_takes_no_longer() -> None:
    scene = leaving()
    until_s = {
        each.termination.deadline_unix_s
        for each in scene.memory.instances.values()
        if each.termination
    }
    decided = scene.look()
    assert {each.until_unix_s for each in drains(decided)} == until_s
    assert not ends(decided)
    assert not drains(scene.look()), "it has come now"
    assert len(ends(scene.look())) == 3


def test_the_next_autoscaler_drains_what_the_one_before_was_to_and_lets_it_end_its_work() -> None:
    scene = leaving()
    scene.memory.token += 1
    decided = scene.look(after_s=1000.0)  # nobody looked for long
    assert len(drains(decided)) == 3
    assert {each.until_unix_s for each in drains(decided)} == {scene.now_s + CONFIG.drain_s}
    assert not ends(decided), "it has its time to leave"
    assert not drains(scene.look())
    assert len(ends(scene.look(after_s=CONFIG.drain_s))) == 3


def test_a_machine_that_cannot_be_drained_ends_all_the_same() -> None:
    scene = leaving()
    for _ in range(2):
        scene.look()
        scene.leaves.clear()
    scene.look()
    assert not scene.machines


# ------------------------------------------------------------------ launches


def test_a_target_that_wants_nothing_for_a_moment_forgets_no_launch() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    wanted, scene.target = scene.target, NOTHING
    assert not any(scene.look().actions for _ in range(6)), "nor is it sent again meanwhile"
    scene.target = wanted
    scene.deaf.clear()
    (again,) = launches(scene.look())
    assert again.request == launch.request
    scene.looks(5)
    assert len(scene.machines) == 3
    assert {each.request_id for each in scene.machines.values()} == {launch.request.request_id}


def test_machines_that_come_while_nothing_is_wanted_are_idle_for_a_while_before_they_end() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    scene.target = NOTHING
    scene.look()
    scene.deaf.clear()
    scene._do(launch)
    assert not any(scene.look().actions for _ in range(5))
    assert len(scene.machines) == 3
    scene.looks(int(CONFIG.calm.idle_s / 10) + 2)
    assert not scene.machines


def test_a_launch_that_stays_unwanted_is_called_off_after_a_while() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    scene.target = NOTHING
    scene.looks(int(CONFIG.calm.idle_s / 10) + 2)
    assert not scene.memory.pending_launches
    scene._do(launch)
    assert scene.machines == {}, "nobody answers yet"
    scene.deaf.clear()
    scene._do(launch)
    assert len(ends(scene.look())) == 3


def test_a_launch_for_a_region_that_the_target_has_no_more_is_not_sent_again() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    scene.target = target(regions=(region(name="other", at="r-2", zones=("r-2a",)),))
    scene.usd |= dict.fromkeys(scene.target.pools(), 0.5)
    looks = int(CONFIG.calm.idle_s / 10) + 2
    sent = [each.request for decided in scene.looks(looks) for each in launches(decided)]
    assert {each.labels["ray.io/availability-region"] for each in sent} == {"other"}
    assert launch.request.request_id not in scene.memory.pending_launches


def test_a_launch_of_a_head_whose_clock_was_ahead_is_sent_again() -> None:
    scene = Scene(deaf={SPOT_A, SPOT_B})
    (launch,) = launches(scene.look())
    scene.deaf.clear()
    (again,) = launches(scene.look(after_s=-3600.0))
    assert again.request == launch.request
    assert len(scene.machines) == 3


# ------------------------------------------------------------------ what it was told


def test_an_override_survives_a_restart(tmp_path: Path) -> None:
    store, other = LocalConditionalStore(tmp_path), target(budget_usd=3.0)
    assert read_target_override(store, 1) == TargetOverride(1)
    write_target_override(store, 1, lambda told: replace(told, target=other))
    found = read_target_override(store, 1)
    assert (found.target, found.is_over) == (other, False)
    write_target_override(store, 1, lambda told: replace(told, is_over=True))
    found = read_target_override(store, 1)
    assert (found.target, found.is_over) == (other, True)
    before = store.read(TARGET_OVERRIDE_KEY)
    write_target_override(store, 1, lambda told: replace(told, target=other))
    assert store.read(TARGET_OVERRIDE_KEY) == before, "the same again writes nothing"


def test_a_cluster_keeps_its_budget_whatever_else_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue's targets have no budget, and the next actor keeps the one of this one."""
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    store, first = LocalConditionalStore(tmp_path), target(budget_usd=3.0)
    fields: Any = ("demo", None, store, CONFIG, first)
    order = AutoscaleOrder(*fields)
    queues = replace(target(), deadline_unix_s=77.0)

    def known() -> tuple[float | None, float | None]:
        found = read_target_override(store, 1).target
        assert found is not None
        return found.budget_usd, found.deadline_unix_s

    actor = AutoscalerActor(order)
    actor.allow(3.0)
    assert read_target_override(store, 1).target is None, "nothing has changed"
    actor.follow(queues)
    assert known() == (3.0, 77.0)
    actor = AutoscalerActor(order)  # the one before died
    actor.allow(5.0)
    assert known() == (5.0, 77.0)
    actor.follow(queues)
    assert known() == (5.0, 77.0)
    actor.follow(replace(queues, budget_usd=1.0))
    assert known() == (1.0, 77.0)
    AutoscalerActor(order).allow(None)
    assert known() == (None, 77.0)


def test_what_is_followed_is_needed_though_the_run_of_the_cluster_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue may use the cluster of a finished run, with other actors afterwards."""
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    store = LocalConditionalStore(tmp_path)
    run = NamedRun(tmp_path / "runs" / "trial", PLAN)
    fields: Any = ("demo", None, store, CONFIG, target(budget_usd=3.0), run)
    finish(new_run(tmp_path))
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    actor.allow(4.0)
    assert actor._work.left_s() == 0.0
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    actor._recall()
    assert actor._work.left_s() == 0.0, "another budget is nothing that is followed"
    actor.follow(target())
    assert actor._work.left_s() is None
    actor.allow(5.0)
    assert actor._work.left_s() is None
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    actor._recall()
    assert actor._work.left_s() is None
    actor.release()
    assert actor._work.left_s() == 0.0


class Failing(LocalConditionalStore):
    """A directory that refuses some writes, or lets another process write first."""

    refusals = 0
    first: Callable[[], None] | None = None

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        if self.refusals:
            self.refusals -= 1
            raise RunDirectoryError("no answer")
        first, self.first = self.first, None
        if first is not None:
            first()
        return super().write(key, data, expected)


def test_a_failed_budget_write_is_repeated_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    store = Failing(tmp_path)
    fields: Any = ("demo", None, store, CONFIG, target(budget_usd=3.0))
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    store.refusals = 1
    with pytest.raises(RunDirectoryError, match="no answer"):
        actor.allow(5.0)
    actor.allow(5.0)
    found = read_target_override(store, 1).target
    assert found is not None and found.budget_usd == 5.0


def test_a_budget_and_a_target_set_concurrently_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four concurrent calls succeed, and the queue's target has no budget."""
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    store = Failing(tmp_path)
    fields: Any = ("demo", None, store, CONFIG, target(budget_usd=3.0))
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    allows = threading.Thread(target=actor.allow, args=(5.0,))

    def meanwhile() -> None:  # the queue's target is about to be written
        allows.start()
        allows.join(0.2)

    store.first = meanwhile
    actor.follow(replace(target(), deadline_unix_s=77.0))
    allows.join()
    found = read_target_override(store, 1).target
    assert found is not None
    assert (found.budget_usd, found.deadline_unix_s) == (5.0, 77.0)


def test_a_recreated_cluster_has_no_target_override(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    write_target_override(store, 1, lambda told: replace(told, is_over=True))
    assert not read_target_override(store, 2).is_over
    write_target_override(store, 2, lambda told: replace(told, target=target()))
    assert read_target_override(store, 2) == TargetOverride(2, target(), number=2)


def test_concurrent_overrides_are_both_applied(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    calls = 0

    def change(told: TargetOverride) -> TargetOverride:
        nonlocal calls
        calls += 1
        if calls == 1:  # somebody else, in between
            write_target_override(store, 1, lambda other: replace(other, is_over=True))
        return replace(told, target=target())

    write_target_override(store, 1, change)
    assert (read_target_override(store, 1).target, read_target_override(store, 1).is_over) == (
        target(),
        True,
    )


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"made": 1, "target": {"regions": 3}}', b"\xff"]
)
def test_an_invalid_override_is_ignored_and_overwritten(tmp_path: Path, data: bytes) -> None:
    store, notes = LocalConditionalStore(tmp_path), list[str]()
    (tmp_path / TARGET_OVERRIDE_KEY).write_bytes(data)
    assert read_target_override(store, 1, notes.append) == TargetOverride(1)
    (note,) = notes
    assert TARGET_OVERRIDE_KEY in note
    write_target_override(store, 1, lambda told: replace(told, is_over=True))
    assert read_target_override(store, 1).is_over


def test_of_an_earlier_cluster_nothing_needs_to_make_sense(tmp_path: Path) -> None:
    store, notes = LocalConditionalStore(tmp_path), list[str]()
    (tmp_path / TARGET_OVERRIDE_KEY).write_bytes(b'{"made": 1, "goal": {}, "number": 7}')
    assert read_target_override(store, 2, notes.append) == TargetOverride(2, number=7)
    assert not notes


def test_an_invalid_target_override_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    store = LocalConditionalStore(tmp_path)
    (tmp_path / TARGET_OVERRIDE_KEY).write_bytes(b"{")
    fields: Any = ("demo", None, store, CONFIG, target(budget_usd=3.0))
    actor = AutoscalerActor(AutoscaleOrder(*fields))
    actor.allow(4.0)
    assert any(TARGET_OVERRIDE_KEY in each for each in actor._lost)
    found = read_target_override(store, 1).target
    assert found is not None and found.budget_usd == 4.0
    actor.release()
    assert read_target_override(store, 1).is_over


def test_what_is_too_long_is_refused(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    endless = target(regions=(region(zones=tuple(f"zone-{n}" for n in range(100_000))),))
    with pytest.raises(RunDirectoryError, match="too long"):
        write_target_override(store, 1, lambda told: replace(told, target=endless))
