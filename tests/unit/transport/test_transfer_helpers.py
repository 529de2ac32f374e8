"""Sums at helper regions: which are worth it, and what becomes of those that do not come."""

from __future__ import annotations

import pytest

from geo_ray.transport.uploads import (
    Dissolve,
    Drop,
    Gather,
    Grant,
    HelperScheduler,
    Take,
    TransfersConfig,
    UploadPath,
    UploadRequest,
    part_of,
    plan_groups,
)

MB = 1_000_000
NAMES = "abcdef"


def ask(region: str, seq: int = 1, **more) -> UploadRequest:
    return UploadRequest(region, 1, seq, 10 * MB, 0, **more)


def helped(**options) -> HelperScheduler:
    line = HelperScheduler(TransfersConfig(averager_mbps=80.0, aggregate=True, **options), "hub")
    line.line.rates.paths |= dict.fromkeys(NAMES, 800.0)
    line.into_mbps |= dict.fromkeys(NAMES, 800.0)
    return line


def road(busy_s: float = 0.0, between_s: float = 0.1, direct_s: float = 1.0) -> UploadPath:
    return UploadPath(
        "hub", busy_s, 80.0, lambda src, dst, size: direct_s if dst == "hub" else between_s
    )


def gathered(line: HelperScheduler) -> Gather:
    """a is on its way until 1.0; at the latest moment the next three are told to sum."""
    assert line.ask(0.0, 0, ask("a")) == [Grant(ask("a"))]
    assert not [d for name in "bcd" for d in line.ask(0.0, 0, ask(name))]
    due_s = line.next_deadline_s()
    assert due_s == pytest.approx(0.8)
    (gather,) = line.tick(due_s, 0)
    assert isinstance(gather, Gather) and {a.region for a in gather.asks} == set("bcd")
    return gather


# ---------------------------------------------------------------- what is worth it


def test_one_alone_is_not_summed() -> None:
    assert plan_groups([ask("a")], road()) == ()


def test_while_the_averager_is_busy_all_that_wait_are_summed() -> None:
    line = [ask(name) for name in "abcd"]
    (group,) = plan_groups(line, road(busy_s=5.0))
    assert group.asks == tuple(line) and group.helper in "abcd"


def test_the_first_goes_straight_if_the_averager_is_idle() -> None:
    line = [ask(name) for name in "abcd"]
    (group,) = plan_groups(line, road())
    assert group.asks == tuple(line[1:])


def test_groups_grow_only_as_long_as_they_are_ready_in_time() -> None:
    line = [ask(name) for name in NAMES]
    groups = plan_groups(line, road(between_s=0.9))
    assert groups and all(len(group.asks) < 5 for group in groups)


def test_nothing_is_summed_where_the_way_to_the_helper_is_no_better() -> None:
    assert plan_groups([ask("a"), ask("b")], road(between_s=3.0)) == ()


def test_updates_of_different_sizes_final_updates_and_sums_go_straight() -> None:
    other = UploadRequest("b", 1, 1, 5 * MB, 0)
    assert plan_groups([ask("a"), other, ask("c")], road(busy_s=9.0)) == ()
    final = ask("b", final=True)
    assert plan_groups([ask("a"), final], road(busy_s=9.0)) == ()


def test_the_helper_is_where_the_sum_is_soonest() -> None:
    near = {"b"}
    way = UploadPath(
        "hub", 9.0, 80.0, lambda s, d, n: 1.0 if d == "hub" else 0.1 if d in near else 0.5
    )
    (group,) = plan_groups([ask(name) for name in "abc"], way)
    assert group.helper == "b"


# ---------------------------------------------------------------- the line with helpers


def test_a_sum_is_granted_and_taken_as_one_transfer() -> None:
    line = helped()
    gather = gathered(line)
    total = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=gather.asks)
    assert line.ask(0.9, 0, total) == []
    decisions = line.arrived(0.99, 0, ask("a"))
    assert Take(ask("a")) in decisions and Grant(total) in decisions
    assert Take(total) in line.arrived(1.9, 1, total)
    line.committed(gather.group)


def test_parts_that_did_not_come_go_by_themselves() -> None:
    line = helped()
    gather = gathered(line)
    missing, *present = gather.asks
    total = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=gather.asks)
    line.ask(0.9, 0, part_of(total, tuple(present)))
    granted = [d.ask for d in line.arrived(0.99, 0, ask("a")) if isinstance(d, Grant)]
    later = [d.ask for d in line.arrived(1.9, 1, granted[0]) if isinstance(d, Grant)]
    assert {a.parts for a in granted + later} == {(), tuple(present)}
    assert missing in granted + later


def test_a_helper_that_dies_delays_but_loses_nothing() -> None:
    line = helped(grant_s=5.0)
    gather = gathered(line)
    line.arrived(0.99, 0, ask("a"))
    decisions = line.tick(5.9, 1)
    assert Dissolve(gather.group) in decisions
    taken = []
    for turn in range(12):  # whoever is granted arrives
        for granted in [d.ask for d in decisions if isinstance(d, Grant)]:
            decisions = line.arrived(6.0 + turn, 1, granted)
            taken += [d.ask for d in decisions if isinstance(d, Take)]
            break
    assert {a.region for a in taken} >= {a.region for a in gather.asks}
    late = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=gather.asks)
    assert line.arrived(99.0, 4, late) == [Dissolve(gather.group)]
    assert line.ask(99.0, 4, late) == [Dissolve(gather.group)]


def test_a_part_that_comes_by_itself_after_all_is_not_summed_too() -> None:
    line = helped()
    gather = gathered(line)
    alone = gather.asks[0]
    decisions = line.arrived(0.3, 0, alone)
    assert decisions[0] == Dissolve(gather.group)
    assert Take(alone) in decisions
    total = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=gather.asks)
    assert line.arrived(0.5, 1, total) == [Dissolve(gather.group)]


def test_a_sum_that_the_averager_refuses_falls_apart() -> None:
    line = helped()
    gather = gathered(line)
    total = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=gather.asks)
    line.ask(0.9, 0, total)
    line.arrived(0.99, 0, ask("a"))
    assert Take(total) in line.arrived(1.9, 1, total)
    decisions = line.refuse(1.9, 1, gather.group)
    assert decisions[0] == Dissolve(gather.group)
    assert any(isinstance(d, Grant) and d.ask in gather.asks for d in decisions)


def test_a_sum_of_strangers_is_refused() -> None:
    line = helped()
    gather = gathered(line)
    forged = UploadRequest(gather.helper, 0, gather.group, 10 * MB, 0, parts=(ask("f"),))
    assert line.arrived(0.5, 0, forged) == [Dissolve(gather.group)]
    stolen = UploadRequest("f", 0, gather.group, 10 * MB, 0, parts=gather.asks)
    assert line.arrived(0.5, 0, stolen) == [Dissolve(gather.group)]


def test_a_stale_sum_is_dissolved_and_updates_in_time_continue() -> None:
    line = helped(max_staleness=4)
    gather = gathered(line)
    decisions = line.tick(0.9, 2)  # somebody else has committed twice: no room for all three
    assert decisions[0] == Dissolve(gather.group)
    (dropped,) = [d.ask for d in decisions if isinstance(d, Drop)]
    assert dropped in gather.asks


def test_paused_forms_no_groups() -> None:
    line = helped()
    line.paused = True
    line.ask(0.0, 0, ask("a"))
    assert not [d for name in "bcd" for d in line.ask(0.0, 0, ask(name))]
    assert not line.tick(0.8, 0)
