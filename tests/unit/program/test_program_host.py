"""A node where it runs: whatever its code raises is an error of the call, and of nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from geo_ray.base.errors import NodeCallError, NodeFailedError, ProgramInvalidError
from geo_ray.program.calls import NodeHost, OutgoingCalls, TrafficCounter, batched_handler
from geo_ray.program.clock import NodeContext, RealClock
from geo_ray.program.serialization import pack, unpack


class UnreadableError(Exception):
    """Cannot even be shown."""

    def __repr__(self) -> NoReturn:
        raise RuntimeError


class Odd:
    """Fails in odd ways."""

    def run(self) -> None:
        sys.exit("enough")

    def leaves(self) -> None:
        sys.exit(3)

    def says_no_text(self) -> None:
        raise ValueError("a file named \udcff")

    def says_nothing(self) -> None:
        raise UnreadableError

    @property
    def broken(self) -> NoReturn:
        raise ValueError("a property")

    @batched_handler(1, 0.0)
    def batch(self, requests: list[int]) -> list[int]:
        if requests == [0]:
            sys.exit(4)
        return requests


def host_of(make: Any) -> NodeHost:
    clock = RealClock()
    calls = OutgoingCalls(clock, lambda *_: b"", TrafficCounter())
    return NodeHost(make, (), 1, NodeContext("odd", "eu", 0, "threads", clock), calls, {})


@pytest.fixture
def host() -> Iterator[NodeHost]:
    host = host_of(Odd)
    host.stand()
    yield host
    given = pack([[7], {}])
    assert unpack(host.answer("batch", given)) == 7  # it goes on, whatever was before


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("leaves", [[], {}], r"odd\.leaves failed: SystemExit\(3\)"),
        ("says_no_text", [[], {}], "a file named "),
        ("says_nothing", [[], {}], r"odd\.says_nothing failed: UnreadableError\n"),
        ("broken", [[], {}], r"odd\.broken failed: ValueError\('a property'\)"),
        ("borken", [[], {}], "no public method 'borken'.* valid: batch, leaves, says_no_text"),
        ("batch", [[0], {}], r"odd\.batch failed: SystemExit\(4\)"),
        ("batch", [[1, 2], {}], "takes one positional argument of each call"),
        ("batch", [[], {"requests": 1}], "takes one positional argument of each call"),
    ],
)
def test_an_error_in_a_method_is_an_error_of_the_call(
    host: NodeHost, method: str, given: Any, said: str
) -> None:
    with pytest.raises(NodeCallError, match=said) as caught:
        host.answer(method, pack(given))
    assert unpack(pack(caught.value.message)) == caught.value.message  # it can be sent


def test_a_run_that_leaves_python_has_failed(host: NodeHost) -> None:
    with pytest.raises(NodeFailedError, match=r"'odd' failed in run: SystemExit\('enough'\)"):
        host.run()


def test_a_node_that_leaves_python_while_it_is_made_has_failed() -> None:
    with pytest.raises(NodeFailedError, match=r"failed while it was created: SystemExit"):
        host_of(sys.exit).stand()


@pytest.mark.parametrize(
    ("size", "timeout_s"), [(0, 1.0), (65, 1.0), (2, -1.0), (2, float("nan")), (2, float("inf"))]
)
def test_a_batch_has_a_size_and_an_end(size: int, timeout_s: float) -> None:
    with pytest.raises(ProgramInvalidError, match=f"a batch of {size} calls within"):
        batched_handler(size, timeout_s)
