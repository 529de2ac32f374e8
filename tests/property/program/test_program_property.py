"""Programs of any shape: batches and orders as the rules say, values as they were."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.program.calls import CallBatch, gathered
from geo_ray.program.clock import VirtualThreads, here
from geo_ray.program.graph import NodeGroup, Program, ProgramNode
from geo_ray.program.run import run_program
from geo_ray.program.serialization import pack, unpack
from geo_ray.transport.emulation import LinkSpec

FEW = settings(max_examples=60)

PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers().filter(lambda n: abs(n) < 2**60) | st.text("abc"), inner)
    ),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    """A value with the types of all its parts, which ``==`` does not tell apart."""
    if isinstance(value, dict):
        return dict, [(kinds(key), kinds(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    return type(value), value


@given(PLAIN)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert kinds(unpack(pack(value))) == kinds(value)


@given(st.binary(max_size=40))
def test_no_bytes_do_more_than_to_be_refused(data: bytes) -> None:
    from geo_ray.base.errors import FrameError

    with contextlib.suppress(FrameError):
        unpack(data)


def batches_by_rule(times: list[int], size: int, timeout_s: float) -> list[list[int]]:
    """Which calls go together: the second program, one call after the other."""
    batches: list[list[int]] = []
    closes_s = -1.0
    for number, time_s in enumerate(times):
        if not batches or len(batches[-1]) == size or time_s > closes_s:
            batches.append([])
            closes_s = time_s + timeout_s
        batches[-1].append(number)
    return batches


@FEW
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12).map(sorted),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.5, 4.5]),
)
def test_calls_are_batched_by_the_rule(times: list[int], size: int, timeout_s: float) -> None:
    clock, carried, answers = VirtualThreads(), [], {}

    def execute(requests: list[int]) -> list[int]:
        carried.append(list(requests))
        clock.sleep_s(0.25)
        return [10 * each for each in requests]

    batch = CallBatch(size, timeout_s, clock, execute)

    def call(number: int, time_s: int) -> None:
        clock.sleep_s(time_s)
        answers[number] = batch.answer(number)

    def main() -> None:
        for number, time_s in enumerate(times):
            clock.start(partial(call, number, time_s))
        clock.sleep_s(100.0)

    clock.run(main)
    assert sorted(carried) == batches_by_rule(times, size, timeout_s)
    assert answers == {number: 10 * number for number in range(len(times))}


class Book:
    """Notes what it is called with, in its order."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    def note(self, number: int, filling: bytes, takes_s: float) -> None:
        self._seen.append(number)
        here().takes_s(takes_s)

    def seen(self) -> list[int]:
        return self._seen


class Writer:
    """Makes a given number of calls without waiting."""

    def __init__(self, book: Any, calls: list[tuple[int, float]]) -> None:
        self._book, self._calls = book, calls

    def run(self) -> list[int]:
        gathered(
            self._book.futures.note(number, b"x" * size, takes_s)
            for number, (size, takes_s) in enumerate(self._calls)
        )
        seen: list[int] = self._book.seen()
        return seen


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from([0.0, 0.1])), max_size=8),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.integers(0, 100),
)
def test_calls_over_a_link_are_answered_in_the_order_in_which_they_were_begun(
    calls: list[tuple[int, float]], jitter_s: float, loss: float, seed: int
) -> None:
    link = LinkSpec(rate_mbps=10, delay_s=0.1, jitter_s=jitter_s, loss=loss)
    book = ProgramNode("book", Book)
    writer = ProgramNode("writer", Writer, (book.handle, calls))
    groups = (NodeGroup("eu", (book,)), NodeGroup("us", (writer,)))
    program = Program("p", groups, links={("us", "eu"): link}, seed=seed)
    result = run_program(program, "virtual")
    assert result.values["writer"] == list(range(len(calls)))
    first = result.traffic[0]
    assert first.calls == len(calls) + 1
    assert first.request_bytes >= sum(size for size, _ in calls)
