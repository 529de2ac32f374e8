"""Programs in threads: callers that are kept, nodes that go on, Ctrl-C."""

from __future__ import annotations

import _thread
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from geo_ray.base.errors import NodeEndedError, NodeFailedError, ProgramError
from geo_ray.base.threads import LOOK_S
from geo_ray.program.clock import NodeStopped, RealClock, here
from geo_ray.program.graph import ProgramNode
from geo_ray.program.run import On, run_program
from tests.support import program_support as toys

KEPT: list[Any] = []


class Keeps:
    """Keeps a caller for longer than it may."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def run(self) -> None:
        KEPT[:] = [self._other, self._other.futures.same(1)]


@pytest.mark.parametrize("on", ["threads", "virtual"])
def test_a_call_to_a_node_of_a_program_that_has_ended(on: On) -> None:
    other = ProgramNode("other", toys.Echo)
    run_program(toys.alone(other, ProgramNode("keeps", Keeps, (other.handle,))), on)
    caller, _ = KEPT
    with pytest.raises(NodeEndedError, match=r"other\.same was called, but the program has ended"):
        caller.same(1)
    with pytest.raises(NodeEndedError, match="its program has ended"):
        caller.futures.same(1)


def test_a_failed_node_that_still_runs_ends_at_its_next_wait() -> None:
    going, stopped = threading.Event(), threading.Event()

    class GoesOn:
        def run(self) -> None:
            going.set()
            try:
                here().clock.sleep_s(600.0)
            except NodeStopped:
                stopped.set()
                raise

    class Fails:
        def run(self) -> None:
            assert going.wait(60.0)
            raise ValueError

    nodes = (ProgramNode("goes-on", GoesOn), ProgramNode("fails", Fails))
    with pytest.raises(NodeFailedError, match="'fails' failed in run"):
        run_program(toys.alone(*nodes), "threads")
    assert stopped.wait(60.0)


def test_an_interruption_ends_it() -> None:
    class Interrupted:
        def run(self) -> None:
            _thread.interrupt_main()
            here().clock.sleep_s(600.0)

    with pytest.raises(KeyboardInterrupt):
        run_program(toys.alone(ProgramNode("interrupted", Interrupted)), "threads")


def test_here_is_nowhere_outside_a_node_and_there_are_four_ways() -> None:
    with pytest.raises(ProgramError, match="outside a node"):
        here()
    with pytest.raises(ProgramError, match="on 'thread'; did you mean 'threads'"):
        run_program(toys.alone(ProgramNode("a", toys.Echo)), "thread")  # type: ignore[arg-type]


def test_threads_are_used_again_and_end_with_the_clock() -> None:
    clock, seen = RealClock(), []
    done = threading.Semaphore(0)

    def work() -> None:
        seen.append(threading.current_thread())
        done.release()

    for _ in range(50):
        clock.start(work)
        done.acquire()
    assert len(set(seen)) < 50
    clock.close()
    clock.close()
    for thread in set(seen):
        thread.join(60.0)
        assert not thread.is_alive()
    with pytest.raises(NodeStopped):
        clock.start(work)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_wait_ends_with_a_future_that_is_cancelled(timeout_s: float | None) -> None:
    future: Future[None] = Future()
    future.cancel()
    assert RealClock().wait(future, timeout_s)


def test_a_wait_is_as_long_as_its_limit() -> None:
    """Longer than the time between two looks, and none at all."""
    clock, future = RealClock(), Future[None]()
    began_s = time.monotonic()
    assert not clock.wait(future, 2.2 * LOOK_S)
    assert time.monotonic() - began_s >= 2.2 * LOOK_S
    assert not clock.wait(future, 0.0)
    future.set_result(None)
    assert clock.wait(future, 0.0)
