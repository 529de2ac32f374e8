"""Programs on the virtual clock: times follow from links and from what nodes say."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from geo_ray.base.errors import (
    DeadlineExceededError,
    NodeFailedError,
    ProgramError,
    ProgramStalledError,
)
from geo_ray.program.calls import FRAME_BYTES, batched_handler, gathered
from geo_ray.program.clock import NodeStopped, VirtualThreads, here
from geo_ray.program.graph import NodeGroup, NodeRestarts, Program, ProgramNode
from geo_ray.program.run import run_program
from geo_ray.transport.emulation import LinkSpec
from tests.support import program_support as toys


class Slow:
    """Takes its time."""

    def work(self, number: int) -> tuple[int, float]:
        here().takes_s(1.0)
        return number, here().clock.now_s()

    @batched_handler(4, 2.0)
    def together(self, numbers: list[int]) -> list[tuple[int, float]]:
        here().takes_s(1.0)
        return [(len(numbers), here().clock.now_s())] * len(numbers)


class Does:
    """Does what a test wants."""

    def __init__(self, doing: Any, *callers: Any) -> None:
        self._doing, self._callers = doing, callers

    def run(self) -> Any:
        return DOINGS[self._doing](*self._callers)


DOINGS: dict[str, Any] = {}


def doing(function: Any) -> str:
    DOINGS[function.__name__] = function
    return str(function.__name__)


def with_slow(function: Any, calls_at_once: int = 1, **more: Any) -> Program:
    slow = ProgramNode("slow", Slow)
    user = ProgramNode("user", Does, (doing(function), slow.handle))
    groups = (NodeGroup("eu", (slow,), calls_at_once=calls_at_once), NodeGroup("us", (user,)))
    return Program("p", groups, **more)


def test_a_call_takes_the_links_time_and_the_nodes() -> None:
    def call(slow: Any) -> float:
        slow.work(1)
        return float(here().clock.now_s())

    link = LinkSpec(rate_mbps=8, delay_s=0.25)
    result = run_program(with_slow(call, links={("eu", "us"): link}), "virtual")
    (traffic,) = result.traffic
    sent = traffic.request_bytes + traffic.answer_bytes + 2 * FRAME_BYTES
    assert result.values["user"] == pytest.approx(1.0 + 2 * 0.25 + sent * 8e-6 / 8)
    assert result.seconds == result.values["user"]


@pytest.mark.parametrize(
    ("calls_at_once", "ends"), [(1, [1, 2, 3]), (2, [1, 1, 2]), (3, [1, 1, 1])]
)
def test_so_many_calls_are_answered_at_once(calls_at_once: int, ends: list[float]) -> None:
    def call(slow: Any) -> Any:
        return gathered([slow.futures.work(number) for number in range(3)])

    found = run_program(with_slow(call, calls_at_once), "virtual").values["user"]
    assert found == list(enumerate(ends))


def test_a_batch_is_carried_out_when_it_is_full_or_the_first_has_waited() -> None:
    def call(slow: Any) -> Any:
        return gathered([slow.futures.together(number) for number in range(6)])

    found = run_program(with_slow(call, 2), "virtual").values["user"]
    assert found == [(4, 1.0)] * 4 + [(2, 3.0)] * 2


def test_it_is_the_same_again() -> None:
    links = {("us", "eu"): LinkSpec(rate_mbps=1, delay_s=0.1, jitter_s=0.05, loss=0.1)}

    def call(slow: Any) -> Any:
        return gathered([slow.futures.work(number) for number in range(5)])

    found = [
        run_program(with_slow(call, links=links, seed=seed), "virtual").values for seed in (1, 1, 2)
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_wait_for_a_future_respects_its_timeout() -> None:
    def call(slow: Any) -> Any:
        future = slow.futures.work(1)
        with pytest.raises(DeadlineExceededError, match=r"not answered within 0\.5 s"):
            future.result(0.5)
        return [here().clock.now_s(), future.done(), *future.result()]

    assert run_program(with_slow(call), "virtual").values["user"] == [0.5, False, 1, 1.0]


def test_a_program_that_waits_forever_is_reported_as_stalled() -> None:
    def call(slow: Any) -> None:
        from concurrent.futures import Future

        slow.futures.work(1).result(600.0)  # which is answered long before
        here().clock.wait(Future())

    with pytest.raises(ProgramStalledError, match="at 1 s of virtual time; waiting nodes: user"):
        run_program(with_slow(call), "virtual")


def test_a_thread_of_a_nodes_own_cannot_wait() -> None:
    def call(slow: Any) -> list[str]:
        clock, seen = here().clock, []

        def work() -> None:
            with pytest.raises(ProgramError, match="a thread that a node created itself"):
                clock.sleep_s(1.0)
            with pytest.raises(ProgramError, match="outside a node"):
                here()
            seen.append("both")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return seen

    assert run_program(with_slow(call), "virtual").values["user"] == ["both"]


def test_a_waiting_node_ends_whatever_it_catches() -> None:
    cleaned = []

    class Stubborn:
        def run(self) -> None:
            while True:
                try:
                    here().clock.sleep_s(1e6)
                except Exception:
                    continue
                finally:
                    cleaned.append(here().name)

    class Fails:
        def run(self) -> None:
            here().clock.sleep_s(1.0)
            raise ValueError

    nodes = (ProgramNode("stubborn", Stubborn), ProgramNode("fails", Fails))
    with pytest.raises(NodeFailedError, match="'fails'"):
        run_program(toys.alone(*nodes), "virtual")
    assert cleaned == ["stubborn"]


def test_nothing_is_started_on_a_clock_that_has_ended() -> None:
    clock = VirtualThreads()
    assert clock.run(clock.now_s) == 0.0
    with pytest.raises(NodeStopped):
        clock.sleep_s(1.0)
    with pytest.raises(NodeStopped):
        clock.start(lambda: None)


def test_restarts_are_counted_in_their_window() -> None:
    class Faulty:
        def __init__(self, counter: Any) -> None:
            self._counter = counter

        def run(self) -> None:
            here().clock.sleep_s(40.0)
            raise ValueError(self._counter.add())

    counter = ProgramNode("counter", toys.Counter)
    faulty = ProgramNode("faulty", Faulty, (counter.handle,))

    def failures(rule: NodeRestarts) -> str:
        groups = (NodeGroup("eu", (counter,)), NodeGroup("eu", (faulty,), restarts=rule))
        with pytest.raises(NodeFailedError) as caught:
            run_program(Program("p", groups), "virtual")
        return caught.value.message

    assert "ValueError(1)" in failures(NodeRestarts(0))
    assert "ValueError(4)" in failures(NodeRestarts(3, None))
    assert "ValueError(3)" in failures(NodeRestarts(2, 85.0))


class Reborn:
    """Takes five seconds to be made, and fails two seconds later, for the first time."""

    def __init__(self) -> None:
        here().clock.sleep_s(5.0)
        self._born_s = here().clock.now_s()

    def born_s(self) -> float:
        return self._born_s

    def run(self) -> None:
        here().clock.sleep_s(2.0)
        assert self._born_s > 5.0


def test_a_call_waits_for_a_restarting_node() -> None:
    def call(reborn: Any) -> list[float]:
        before_s = reborn.born_s()
        here().clock.sleep_s(3.0)
        return [before_s, reborn.born_s(), here().clock.now_s()]

    reborn = ProgramNode("reborn", Reborn)
    user = ProgramNode("user", Does, (doing(call), reborn.handle))
    groups = (NodeGroup("eu", (reborn,), restarts=NodeRestarts(1)), NodeGroup("eu", (user,)))
    result = run_program(Program("p", groups), "virtual")
    assert result.values["user"] == [5.0, 12.0, 12.0]
    assert result.restarts == {"reborn": 1}
