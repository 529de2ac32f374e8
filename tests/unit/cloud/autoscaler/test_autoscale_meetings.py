"""Interactions of rules: unreachable regions, pending demand, repeated actions, busy machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.cloud.autoscaler.node_group import CHEAPER
from geo_ray.cloud.autoscaler.observation import (
    LIFE,
    NOTICE,
    LabelWanted,
    PendingBundle,
    PendingGroup,
)
from geo_ray.cloud.autoscaler.state import PendingTermination, decode_memory, encode_memory
from geo_ray.cloud.autoscaler.target import REGION_LABEL
from tests.support.autoscale_support import (
    CONFIG,
    KNOWN,
    ON_DEMAND_A,
    SMALL,
    SPOT_A,
    SPOT_B,
    Scene,
    drains,
    ends,
    launches,
    region,
    scene,
    target,
    waiting,
    with_one_busy,
)

IDLE_LOOKS = int(CONFIG.calm.idle_s / 10)


def rented(found: Scene, looks: int) -> int:
    """Return the number of requested machines over iterations, including resent requests."""
    sent = [launch for decided in found.looks(looks) for launch in launches(decided)]
    return sum(launch.request.count for launch in sent)


def terminations(found: Scene, names: set[str]) -> list[PendingTermination]:
    return [
        each.termination
        for name, each in found.memory.instances.items()
        if name in names and each.termination
    ]


# ------------------------------------------------------------------ silence, without a plan


def test_an_outage_does_not_count_as_idle_time() -> None:
    found, busy, idle = with_one_busy()
    found.looks(3)
    found.unreachable = {"r-1"}
    assert not any(decided.actions for decided in found.looks(3 * IDLE_LOOKS))
    found.unreachable = set()
    assert not any(ends(decided) for decided in found.looks(IDLE_LOOKS - 4)), "it may have worked"
    assert {end.machine_id for decided in found.looks(4) for end in ends(decided)} == {idle}
    assert set(found.machines) == {busy}


def test_demand_placed_elsewhere_launches_nothing_after_an_outage() -> None:
    either = (LabelWanted(REGION_LABEL, ("r", "far")),)
    near = region(rows_per_s=0.0, kinds=(SMALL,))
    far = region(name="far", at="r-2", zones=("r-2a",), rows_per_s=0.0, kinds=(SMALL,))
    found = Scene(target(regions=(near, far)), KNOWN)
    found.usd |= {pool: 0.1 for pool in found.target.pools() if pool.region == "r-2"}
    found.pending = (PendingGroup((PendingBundle({"CPU": 4.0}, either),)),)
    found.deaf = {pool for pool in found.target.pools() if pool.region == "r-2"}
    (first,) = launches(found.look())
    assert first.region == "far"
    found.unreachable, found.deaf = {"r-2"}, set()
    (second,) = launches(found.look())
    assert second.region == "r"
    found.pending, found.busy = (), True
    found.looks(3)
    found.unreachable = set()
    assert rented(found, 2 * IDLE_LOOKS) == 0
    assert set(found.memory.pending_launches) == set()
    assert {machine.pool.region for machine in found.machines.values()} == {"r-1"}


def test_an_unreachable_region_is_updated_once_it_answers() -> None:
    found, busy = noticed()
    found.leaves.clear()
    found.unreachable = {"r-1"}
    assert not any(decided.actions for decided in found.looks(2))
    found.unreachable = set()
    assert [drain.machine_id for drain in drains(found.look())] == [busy]


# ------------------------------------------------------------------ drains, without a plan


def noticed() -> tuple[Scene, str]:
    """Return the name of a busy machine that is preempted in two minutes, with a notice."""
    found, busy, _ = with_one_busy()
    found.looks(IDLE_LOOKS + 2)
    found.machines[busy] = replace(found.machines[busy], ends_unix_s=found.now_s + 130)
    assert [drain.machine_id for drain in drains(found.look())] == [busy]
    return found, busy


def test_a_busy_machine_with_a_lost_notice_is_drained_again_and_replaced_once() -> None:
    found, busy = noticed()
    before = found.memory.instances[busy].termination
    found.leaves.clear()
    decided = found.look()
    assert before is not None
    assert [(d.machine_id, d.reason) for d in drains(decided)] == [(busy, NOTICE)]
    assert [d.until_unix_s for d in drains(decided)] == [before.deadline_unix_s]
    assert rented(found, 1) == 0
    assert len(found.machines) == 2


@pytest.mark.parametrize("anew", [False, True])
def test_a_machine_whose_successor_is_at_work_is_not_replaced_again(anew: bool) -> None:
    """Nor by the next autoscaler, which drains it again."""
    found, busy = noticed()
    (new,) = set(found.machines) - {busy}
    found.look()
    found.busy = {busy, new}
    if anew:
        found.memory = decode_memory(encode_memory(found.memory))
        found.memory.token += 1
        found.leaves.clear()
        assert [drain.machine_id for drain in drains(found.look())] == [busy]
    assert rented(found, 2) == 0


def test_a_life_that_ends_is_replaced_once_though_its_successor_works_at_once() -> None:
    found, busy, _ = with_one_busy()
    found.looks(IDLE_LOOKS + 2)
    found.now_s = (found.machines[busy].ends_unix_s or 0.0) - CONFIG.lead_s
    found.look()
    (new,) = set(found.machines) - {busy}
    found.busy = {busy, new}
    assert [(d.machine_id, d.reason) for d in drains(found.look())] == [(busy, LIFE)]
    assert rented(found, 2) == 0


def test_a_successor_that_is_lost_is_replaced_as_long_as_its_predecessor_works() -> None:
    found, busy = noticed()
    (new,) = set(found.machines) - {busy}
    found.look()
    found.busy = {busy, new}
    found.look()
    found.machines[new] = replace(found.machines[new], ends_unix_s=found.now_s + 130)
    assert rented(found, 1) == 2, "its own, and that of the first one, which works on"


def test_two_machines_are_not_replaced_by_one() -> None:
    slow = KNOWN.model_copy(update={"drain_s": 120.0})
    found = scene(waiting(2, CPU=4.0), region={"kinds": (SMALL,)}, config=slow)
    found.looks(2)
    old = set(found.machines)
    found.pending, found.busy = (), set(old)
    found.look()
    found.look()
    for name in old:
        found.machines[name] = replace(found.machines[name], ends_unix_s=found.now_s + 130)
    assert rented(found, 1) == 2
    one, other = sorted(set(found.machines) - old)
    found.unready = {other}
    found.look()
    found.busy = {*old, one}
    found.look()
    decided = found.look()
    assert not launches(decided)
    assert {each.successor for each in terminations(found, old)} == {one, None}
    found.unready = set()
    found.look()
    assert {each.successor for each in terminations(found, old)} == {one, other}


def test_the_end_of_a_plan_keeps_machines_to_be_replaced_but_not_drained_ones() -> None:
    for is_told in (False, True):
        found = Scene(busy=True)
        found.usd |= {SPOT_A: 0.3, SPOT_B: 0.9}
        found.looks(3)
        old = set(found.machines)
        found.now_s += CONFIG.calm.dwell_s
        found.usd |= {SPOT_A: 0.9, SPOT_B: 0.1}
        found.look()
        new = set(found.machines) - old
        assert new, "cheaper ones"
        if is_told:
            found.looks(1)
            assert set(found.leaves) == old
            found.leaves.clear()
        else:
            found.unready = new
            found.look()
            assert {each.reason for each in terminations(found, old)} == {CHEAPER}
            found.unready = set()
        found.target = target(regions=(region(rows_per_s=0.0),))
        assert {drain.machine_id for drain in drains(found.look())} == (old if is_told else set())
        found.looks(6)
        assert set(found.machines) == (new if is_told else new | old)


# ------------------------------------------------------------------ requests, and what is packed


def unheard() -> tuple[Scene, str]:
    """Return a busy machine, and the id of a request without a machine."""
    found, _, _ = with_one_busy()
    found.looks(IDLE_LOOKS + 2)
    found.deaf = {SPOT_A, SPOT_B, ON_DEMAND_A}
    found.pending = (waiting(CPU=4.0),)
    (launch,) = launches(found.look())
    return found, launch.request.request_id


def test_an_unneeded_request_is_withdrawn_while_other_machines_work() -> None:
    found, request = unheard()
    found.pending = ()
    assert rented(found, IDLE_LOOKS - 2) == 0
    assert request in found.memory.pending_launches, "it may wait again"
    assert rented(found, 3) == 0
    assert request not in found.memory.pending_launches


def test_a_request_that_something_waits_for_again_is_sent_again_and_no_other_is_made() -> None:
    found, request = unheard()
    found.pending = ()
    found.looks(6)
    found.pending = (waiting(CPU=4.0),)
    found.deaf = set()
    (again,) = launches(found.look())
    assert again.request.request_id == request
    assert len(found.machines) == 2


def test_of_two_requests_the_one_that_is_needed_is_sent_again() -> None:
    found, request = unheard()
    found.pending = (waiting(2, CPU=4.0),)
    (other,) = launches(found.look())
    found.pending = (waiting(CPU=4.0),)
    sent = {each.request.request_id for decided in found.looks(8) for each in launches(decided)}
    assert sent == {request}
    found.looks(IDLE_LOOKS)
    assert other.request.request_id not in found.memory.pending_launches


def test_nothing_is_packed_on_a_request_that_was_called_off() -> None:
    found, request = unheard()
    found.pending = ()
    found.looks(IDLE_LOOKS + 1)
    found.pending, found.deaf = (waiting(CPU=4.0),), set()
    (launch,) = launches(found.look())
    assert launch.request.request_id != request
    assert len(found.machines) == 2
