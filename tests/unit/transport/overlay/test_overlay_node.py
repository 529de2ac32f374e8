"""A region's part: sums once each, forwards what is complete, and refuses what makes no sense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from geo_ray.base.errors import FrameError, InvariantError
from geo_ray.transport.overlay.messages import (
    Commit,
    ControlMessage,
    Fetch,
    Orders,
    Ready,
    SegmentAck,
    SegmentPart,
    Sent,
    Starved,
    Stuck,
    Want,
    Whole,
)
from geo_ray.transport.overlay.node import Node
from geo_ray.transport.overlay.plan import PROBE, RESULT, SUM, Grid, SendOrder
from geo_ray.transport.overlay.vector import Vector

GRID = Grid(10, 4)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def ramp(scale: float = 1.0) -> NDArray[np.float32]:
    return np.arange(10, dtype=np.float32) * np.float32(scale)


def node_of(me: int, *, fused: bool = False, num: int = 3, **options: float) -> Node:
    return Node(me, num, 0, GRID, fused, **options)  # type: ignore[arg-type]


def part_of(
    index: int, values: NDArray[np.float32], phase: int = SUM, mask: int = 0b100, **changes: object
) -> SegmentPart:
    first, stop = GRID.bounds(index)
    part = SegmentPart(1, 0, phase, index, mask, 1.0, False, values[first:stop].tobytes())
    return replace(part, **changes)  # type: ignore[arg-type]


def taken(node: Node) -> list[tuple[int, ControlMessage]]:
    out, node.out = node.out, []
    return out


def parts_to(node: Node, peer: int, now_s: float = 0.0) -> list[SegmentPart]:
    found = []
    while (part := node.next_part(peer, now_s)) is not None:
        found.append(part)
    return found


# ------------------------------------------------------------------ vector


def test_contributions_are_weighted_and_the_mean_divides_by_all_weights() -> None:
    vector = Vector(0, 2, GRID, fused=False)
    vector.contribute(ramp(), 3.0)
    for index in range(3):
        first, stop = GRID.bounds(index)
        assert vector.add(index, 0b10, 1.0, (ramp(5.0)[first:stop]).tobytes())
    assert vector.is_summed
    np.testing.assert_allclose(vector.mean(), ramp(2.0))


def test_early_messages_are_stored_until_the_own_contribution() -> None:
    vector = Vector(0, 2, GRID, fused=True)
    for index in range(3):
        first, stop = GRID.bounds(index)
        vector.add(index, 0b10, 1.0, (ramp()[first:stop]).tobytes())
    assert not vector.is_whole
    vector.contribute(ramp(3.0), 1.0)
    assert vector.is_whole
    np.testing.assert_allclose(vector.result_P, ramp(2.0))


def test_no_contribution_is_counted_twice() -> None:
    vector = Vector(0, 3, GRID, fused=False)
    vector.contribute(ramp(), 1.0)
    data = ramp()[:4].tobytes()
    assert vector.add(0, 0b010, 1.0, data)
    assert not vector.add(0, 0b110, 1.0, data)
    assert not vector.add(0, 0b001, 1.0, data)
    assert vector.sum_of(0)[0] == 0b011
    np.testing.assert_allclose(np.frombuffer(vector.sum_of(0)[2], np.float32), ramp(2.0)[:4])


def test_missing_blocks_are_reported_in_ranges() -> None:
    vector = Vector(1, 2, Grid(20, 4), fused=False)
    assert vector.missing() == [(0, 5)]
    vector.put(1, np.zeros(4, np.float32).tobytes())
    vector.put(4, np.zeros(4, np.float32).tobytes())
    assert vector.missing() == [(0, 1), (2, 4)]


def test_sums_begin_from_the_own_contribution_again() -> None:
    vector = Vector(0, 2, GRID, fused=False)
    vector.contribute(ramp(), 2.0)
    under_way = vector.sum_of(0)[2]
    vector.add(0, 0b10, 1.0, ramp(7.0)[:4].tobytes())
    before = bytes(under_way)
    vector.restart(1)
    assert vector.sum_of(0)[0] == 0b01
    np.testing.assert_allclose(np.frombuffer(vector.sum_of(0)[2], np.float32), ramp(2.0)[:4])
    assert bytes(under_way) == before, "what was handed to the transport stays as it was"


@pytest.mark.parametrize(
    ("index", "mask", "weight", "size"),
    [(3, 2, 1.0, 16), (0, 0, 1.0, 16), (0, 8, 1.0, 16), (0, 2, 0.0, 16), (0, 2, 1.0, 12)],
)
def test_partial_sums_that_make_no_sense_are_refused(
    index: int, mask: int, weight: float, size: int
) -> None:
    vector = Vector(0, 2, GRID, fused=False)
    vector.contribute(ramp(), 1.0)
    with pytest.raises(FrameError):
        vector.add(index, mask, weight, bytes(size))
    assert vector.sum_of(0)[0] == 0b01


# ------------------------------------------------------------------ sums


def test_a_leaf_sends_its_segments_in_order_once_it_is_ready() -> None:
    node = node_of(2)
    node.on_message(0, Orders(1, 0, (SendOrder(2, 1, SUM, 0, 3, 0b100),)), 0.0)
    assert parts_to(node, 1) == []
    node.contribute(1, ramp(), 2.0, {"x": 1}, 0.0)
    assert taken(node) == [(0, Ready(1, {"x": 1}))]
    parts = parts_to(node, 1)
    assert [part.index for part in parts] == [0, 1, 2]
    assert {(part.mask, part.weight, part.phase) for part in parts} == {(0b100, 2.0, SUM)}
    np.testing.assert_allclose(np.frombuffer(parts[2].data, np.float32), ramp(2.0)[8:])


def test_a_segment_is_forwarded_once_its_inputs_are_complete() -> None:
    node = node_of(1)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 0, SUM, 0, 3, 0b110),)), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    assert parts_to(node, 0) == []
    node.on_part(2, part_of(0, ramp(2.0)), 0.0)
    (part,) = parts_to(node, 0)
    assert (part.index, part.mask, part.weight) == (0, 0b110, 2.0)
    np.testing.assert_allclose(np.frombuffer(part.data, np.float32), ramp(3.0)[:4])


def test_the_window_limits_data_in_flight() -> None:
    node = node_of(2, window=2)
    node.on_message(0, Orders(1, 0, (SendOrder(2, 1, SUM, 0, 3, 0b100),)), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    first = parts_to(node, 1)
    assert len(first) == 2 and first[-1].wants_ack
    node.on_message(1, SegmentAck(1), 1.0)
    assert len(parts_to(node, 1)) == 1


def test_an_executed_order_is_reported_with_the_observed_state() -> None:
    node = node_of(2)
    send = SendOrder(2, 1, SUM, 0, 3, 0b100)
    node.on_message(0, Orders(1, 0, (send,)), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    taken(node)
    assert parts_to(node, 1, 10.0)[-1].wants_ack
    node.on_message(1, SegmentAck(3), 12.0)
    assert taken(node) == [(0, Sent(1, 0, send, 40, 2.0))]


def test_an_acknowledgement_rides_on_a_part_if_there_is_one() -> None:
    node = node_of(1)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 2, SUM, 0, 1, 0b010),)), 0.0)
    node.on_part(2, part_of(0, ramp(), RESULT, wants_ack=True), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    taken(node)
    assert parts_to(node, 2)[0].acked == 1
    node.acknowledge()
    assert taken(node) == []
    node.on_part(0, part_of(1, ramp(), RESULT, wants_ack=True), 0.0)
    node.acknowledge()
    assert taken(node) == [(0, SegmentAck(1))]


def test_a_higher_attempt_voids_sums_and_a_lower_one_is_late() -> None:
    node = node_of(1)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 0, SUM, 0, 3, 0b110),)), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    node.on_part(2, part_of(0, ramp()), 0.0)
    node.on_message(0, Orders(1, 1, (SendOrder(1, 2, SUM, 0, 3, 0b010),)), 0.0)
    assert parts_to(node, 0) == []
    node.on_part(2, part_of(0, ramp()), 0.0)  # of the first attempt
    assert [part.mask for part in parts_to(node, 2)] == [0b010] * 3


def test_a_part_of_a_higher_attempt_may_come_before_the_word_of_it() -> None:
    node = node_of(1)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    node.on_part(2, part_of(0, ramp()), 0.0)
    node.on_part(2, part_of(0, ramp(), attempt=1), 0.0)
    node.on_message(0, Orders(1, 1, (SendOrder(1, 0, SUM, 0, 1, 0b110),)), 0.0)
    assert len(parts_to(node, 0)) == 1


# ------------------------------------------------------------------ results


def test_a_round_is_over_with_its_result_and_its_commit_in_any_order() -> None:
    for commit_first in (True, False):
        node = node_of(1)
        node.contribute(1, ramp(), 1.0, {}, 0.0)
        if commit_first:
            node.on_message(0, Commit(1, 0, {"version": 7}), 0.0)
        for index in range(3):
            node.on_part(0, part_of(index, ramp(4.0), RESULT), 0.0)
        if not commit_first:
            assert node.done == []
            node.on_message(0, Commit(1, 0, {"version": 7}), 0.0)
        (done,) = node.done
        assert done.about == {"version": 7}
        np.testing.assert_allclose(done.result_P, ramp(4.0))
        assert (0, Whole(1)) in node.out


def test_results_are_forwarded_as_they_arrive_and_twice_is_once() -> None:
    node = node_of(1)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 2, RESULT, 0, 3),)), 0.0)
    node.on_part(0, part_of(0, ramp(), RESULT), 0.0)
    node.on_part(0, part_of(0, ramp(9.0), RESULT), 0.0)
    (part,) = parts_to(node, 2)
    np.testing.assert_allclose(np.frombuffer(part.data, np.float32), ramp()[:4])


def test_a_fetching_region_requests_only_missing_parts() -> None:
    orphan, holder = node_of(1), node_of(2)
    for node in (orphan, holder):
        node.contribute(1, ramp(), 1.0, {}, 0.0)
    for index in range(3):
        holder.on_part(0, part_of(index, ramp(), RESULT), 0.0)
    orphan.on_part(0, part_of(1, ramp(), RESULT), 0.0)
    taken(orphan)
    orphan.on_message(0, Fetch(1, 2), 0.0)
    ((to, want),) = taken(orphan)
    assert (to, want) == (2, Want(1, ((0, 1), (2, 3))))
    holder.on_message(1, want, 0.0)
    assert [part.index for part in parts_to(holder, 1)] == [0, 2]


def test_probes_are_sent_between_rounds_only() -> None:
    node = node_of(1)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    for index in range(3):
        node.on_part(0, part_of(index, ramp(), RESULT), 0.0)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 2, PROBE, 0, 2),)), 0.0)
    assert parts_to(node, 2) == []
    node.on_message(0, Commit(1, 0, {}), 0.0)
    assert [part.phase for part in parts_to(node, 2)] == [RESULT] * 2
    node.on_message(0, Orders(1, 0, (SendOrder(1, 0, PROBE, 0, 2),)), 0.0)
    node.contribute(2, ramp(), 1.0, {}, 0.0)
    assert parts_to(node, 0) == []


# ------------------------------------------------------------------ trouble


def test_a_region_without_acknowledgements_is_reported_once_per_stall() -> None:
    node = node_of(0, stall_s=10.0)
    node.on_message(
        0, Orders(1, 0, (SendOrder(0, 1, RESULT, 0, 3), SendOrder(0, 2, RESULT, 0, 3))), 0.0
    )
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    node.set_result(1, ramp())
    taken(node)
    parts_to(node, 1)
    parts_to(node, 2)
    node.on_message(1, SegmentAck(3), 9.0)
    taken(node)
    node.tick(9.9)
    assert taken(node) == []
    node.tick(10.1)
    assert taken(node) == [(0, Stuck(1, 2))]
    node.tick(15.0)
    assert taken(node) == []


def test_a_round_restarted_often_gets_more_time() -> None:
    for attempt, waits_s in ((0, 10.0), (3, 10.0), (4, 20.0), (9, 30.0)):
        node = node_of(1, stall_s=10.0)
        node.contribute(1, ramp(), 1.0, {}, 0.0)
        node.on_message(0, Orders(1, attempt, (SendOrder(1, 0, SUM, 0, 3, 0b010),)), 0.0)
        assert parts_to(node, 0)
        taken(node)
        node.tick(waits_s - 0.1)
        assert taken(node) == []
        node.tick(waits_s + 0.1)
        assert taken(node) == [(0, Stuck(1, 0))]


def test_unrequested_acknowledgements_are_no_stall() -> None:
    node = node_of(1, stall_s=10.0, window=32)
    node.on_message(0, Orders(1, 0, (SendOrder(1, 0, SUM, 0, 3, 0b110),)), 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    node.on_part(2, part_of(0, ramp()), 0.0)
    (part,) = parts_to(node, 0)
    node.on_message(0, SegmentAck(1), 0.0) if part.wants_ack else None
    taken(node)
    node.tick(100.0)
    assert taken(node) == []


def test_a_missing_committed_result_is_reported() -> None:
    node = node_of(1, stall_s=10.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    taken(node)
    node.tick(50.0)
    assert taken(node) == [], "whether the others are ready is not known here"
    node.on_message(0, Commit(1, 0, {}), 50.0)
    node.on_part(0, part_of(0, ramp(), RESULT), 55.0)
    node.tick(64.0)
    assert taken(node) == []
    node.tick(66.0)
    assert taken(node) == [(0, Starved(1))]


def test_memory_holds_a_few_rounds_only() -> None:
    node = node_of(1)
    with pytest.raises(FrameError, match="far from"):
        node.on_part(2, part_of(0, ramp(), rnd=3), 0.0)
    for rnd in range(1, 6):
        node.contribute(rnd, ramp(), 1.0, {}, 0.0)
        node.on_part(2, part_of(0, ramp(), rnd=rnd + 1), 0.0)  # others may be ahead by one
        for index in range(3):
            node.on_part(0, part_of(index, ramp(), RESULT, rnd=rnd), 0.0)
        node.on_message(0, Commit(rnd, 0, {}), 0.0)
        assert len(node._rounds) <= 3
    assert node.finished == 5


def test_no_region_contributes_twice_or_out_of_turn() -> None:
    node = node_of(1)
    with pytest.raises(InvariantError):
        node.contribute(2, ramp(), 1.0, {}, 0.0)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    with pytest.raises(InvariantError):
        node.contribute(1, ramp(), 1.0, {}, 0.0)


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (2, Commit(1, 0, {})),
        (2, Orders(1, 0, ())),
        (0, Orders(1, 0, (SendOrder(2, 0, SUM, 0, 3, 4),))),
        (0, Orders(1, 0, (SendOrder(1, 0, SUM, 0, 4, 2),))),
        (0, Orders(1, 0, (SendOrder(1, 1, SUM, 0, 3, 2),))),
        (2, SegmentAck(1)),
        (2, Want(1, ((0, 9),))),
    ],
)
def test_messages_that_make_no_sense_are_refused(peer: int, message: ControlMessage) -> None:
    node = node_of(1)
    node.contribute(1, ramp(), 1.0, {}, 0.0)
    with pytest.raises(FrameError):
        node.on_message(peer, message, 0.0)
