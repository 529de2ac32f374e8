"""The line in front of the averager, driven one event at a time."""

from __future__ import annotations

import pytest

from geo_ray.transport.uploads import (
    Drop,
    Grant,
    Take,
    TransferScheduler,
    TransfersConfig,
    UploadRequest,
)

MB = 1_000_000


def line_of(paths=None, **options) -> TransferScheduler:
    line = TransferScheduler(TransfersConfig(**({"averager_mbps": 80.0} | options)))
    line.rates.paths |= dict.fromkeys("abcd", 1000.0) if paths is None else paths
    return line


def ask(region: str, seq: int = 1, size: int = MB, base: int = 0, **more) -> UploadRequest:
    return UploadRequest(region, 1, seq, size, base, **more)


def test_a_lone_sender_is_granted_at_once() -> None:
    line = line_of()
    assert line.is_quiet
    assert line.ask(0.0, 0, ask("a")) == [Grant(ask("a"))]
    assert not line.is_quiet


def test_the_others_wait_and_the_shortest_is_next() -> None:
    line = line_of()
    line.ask(0.0, 0, ask("a"))
    assert line.ask(0.01, 0, ask("b", size=4 * MB)) == []
    assert line.ask(0.02, 0, ask("c", size=2 * MB)) == []
    assert line.arrived(0.09, 0, ask("a")) == [Take(ask("a")), Grant(ask("c", size=2 * MB))]


def test_in_order_of_asking_if_so_configured() -> None:
    line = line_of(order="fifo")
    line.ask(0.0, 0, ask("a"))
    line.ask(0.01, 0, ask("b", size=4 * MB))
    line.ask(0.02, 0, ask("c", size=2 * MB))
    assert line.arrived(0.09, 0, ask("a"))[1:] == [Grant(ask("b", size=4 * MB))]


def test_as_many_run_as_the_averager_can_receive() -> None:
    line = line_of(dict.fromkeys("abcde", 20.0))
    granted = [decision for name in "abcde" for decision in line.ask(0.0, 0, ask(name))]
    assert granted == [Grant(ask(name)) for name in "abcd"]


def test_a_short_one_does_not_wait_for_a_long_one() -> None:
    line = line_of()
    line.ask(0.0, 0, ask("a", size=100 * MB))
    assert line.ask(0.1, 0, ask("b", size=MB)) == [Grant(ask("b", size=MB))]
    assert line.ask(0.1, 0, ask("c", size=60 * MB)) == []


def test_a_long_one_is_not_overtaken_for_ever() -> None:
    line = line_of(max_overtaken=3)
    line.ask(0.0, 0, ask("a"))
    line.ask(0.0, 0, ask("b", size=50 * MB))
    order, now_s = [], 0.0
    flying = ask("a")
    for turn in range(1, 6):  # whenever one is through, a short one has just asked
        line.ask(now_s + 0.05, 0, ask("c" if flying.region == "a" else "a", turn + 1))
        decisions = line.arrived(now_s + 0.09, 0, flying)
        flying = next(decision.ask for decision in decisions if isinstance(decision, Grant))
        order.append(flying.region)
        now_s += 0.09
        if flying.region == "b":
            break
    assert order == ["c", "a", "c", "b"]


def test_a_grant_that_is_not_used_lapses_and_the_late_update_is_still_taken() -> None:
    line = line_of(grant_s=5.0)
    line.ask(0.0, 0, ask("a"))
    line.ask(0.0, 0, ask("b"))
    assert line.next_deadline_s() is not None
    assert line.tick(4.9, 0) in ([], [Grant(ask("b"))])
    line.tick(5.0, 0)
    line.arrived(6.0, 0, ask("b"))
    assert line.is_quiet
    assert line.arrived(7.0, 1, ask("a")) == [Take(ask("a"))]


def test_the_next_grant_leaves_before_the_end_of_the_transfer() -> None:
    line = line_of(dict.fromkeys("ab", 80.0))
    line.rates.latency_s |= dict.fromkeys("ab", 0.02)
    line.ask(0.0, 0, ask("a"))  # its bytes take 0.1 s and begin at 0.02
    assert line.ask(0.01, 0, ask("b")) == []
    due_s = line.next_deadline_s()
    assert due_s == pytest.approx(0.1)
    assert line.tick(due_s, 0) == [Grant(ask("b"))]


def test_asking_twice_is_asking_once() -> None:
    line = line_of()
    line.ask(0.0, 0, ask("a"))
    line.ask(0.0, 0, ask("b"))
    assert line.ask(0.05, 0, ask("b")) == []
    assert line.ask(0.05, 0, ask("a")) == [Grant(ask("a"))]
    assert line.arrived(0.09, 0, ask("a")) == [Take(ask("a")), Grant(ask("b"))]


def test_unscheduled_updates_are_applied_on_arrival() -> None:
    line = line_of()
    assert line.arrived(0.0, 0, ask("a")) == [Take(ask("a"))]
    line.began(1.0, ask("b"))
    assert line.ask(1.05, 1, ask("c", size=90 * MB)) == []
    taken, granted = line.arrived(1.09, 1, ask("b"))
    assert taken == Take(ask("b"))
    assert granted == Grant(ask("c", size=90 * MB))


# ---------------------------------------------------------------- staleness


def test_the_update_nearest_its_bound_goes_first() -> None:
    line = line_of(max_staleness=3)
    line.ask(0.0, 3, ask("a", base=3))
    line.ask(0.0, 3, ask("b", size=9 * MB, base=1))  # with a's commit it has room for none
    line.ask(0.0, 3, ask("c", base=3))
    assert line.arrived(0.09, 3, ask("a", base=3))[1:] == [Grant(ask("b", size=9 * MB, base=1))]


def test_an_update_that_would_be_late_is_dropped_unsent() -> None:
    line = line_of(max_staleness=2)
    assert line.ask(0.0, 5, ask("a", base=2)) == [Drop(ask("a", base=2))]
    assert line.is_quiet


def test_of_several_that_exclude_each_other_the_smallest_is_dropped() -> None:
    line = line_of(max_staleness=1)
    line.ask(0.0, 1, ask("a", base=1))
    line.ask(0.0, 1, ask("b", base=1, norm=3.0))
    assert line.ask(0.0, 1, ask("c", base=1, norm=2.0)) == [Drop(ask("c", base=1, norm=2.0))]


def test_arrived_updates_wait_for_one_in_flight_without_slack() -> None:
    line = line_of(max_staleness=2)
    line.ask(0.0, 4, ask("a", base=2))
    own = ask("b", base=4)
    assert line.arrived(0.1, 4, own) == []
    assert line.arrived(0.2, 4, ask("a", base=2)) == [Take(ask("a", base=2)), Take(own)]


def test_a_final_update_is_never_dropped() -> None:
    line = line_of(max_staleness=1)
    final = ask("a", base=0, final=True)
    assert line.ask(0.0, 50, final) == [Grant(final)]
    assert line.arrived(0.1, 50, final) == [Take(final)]
