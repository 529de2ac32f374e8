"""How a node calls another: like a method, by futures, or all replicas at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from geo_ray.errors import DeadlineExceededError, NodeEndedError, ValueUnshippableError
from geo_ray.program.clock import NodeStopped, ProgramClock
from geo_ray.program.node import NodeHandle
from geo_ray.program.surroundings import name_here
from geo_ray.program.traffic import TrafficCounter
from geo_ray.program.values import pack, unpack

Send = Callable[[str, str, bytes], bytes | memoryview]
"""Carries a call, (instance, method, arguments), and waits for what comes back."""

RETURN_S: Final = 300.0
"""How long a call waits for a node that is started anew."""


class CallFuture:
    """What will come back of a call.

    Not one of `concurrent.futures`, whose waiting stands still on a virtual clock.
    """

    def __init__(self, future: Future[Any], clock: ProgramClock) -> None:
        self._future, self._clock = future, clock

    def done(self) -> bool:
        """Whether it has come."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for it.

        Raises:
            DeadlineExceededError: it did not come in time; the call goes on.
            ProgramError: whatever came of the call instead.
        """
        try:
            is_done = self._clock.wait(self._future, timeout_s)
        except NodeStopped:
            check_in_node()
            raise
        if not is_done:
            raise DeadlineExceededError(f"a call was not answered within {timeout_s:g} s")
        return self._future.result()


def check_in_node() -> None:
    """Tell who kept a caller for too long; a node's own thread is to end without an error.

    Raises:
        NodeEndedError: whoever calls this is no node.
    """
    if not name_here():
        raise NodeEndedError("a node was called, but its program has ended")


def gathered(futures: Iterable[CallFuture]) -> list[Any]:
    """The results of several calls, in their order.

    Raises:
        ProgramError: of the first, in their order, that failed.
    """
    return [future.result() for future in futures]


class OutgoingCalls:
    """A node's calls to others.

    Args:
        clock: where it runs.
        send: the way there.
        traffic: counts them.
    """

    def __init__(self, clock: ProgramClock, send: Send, traffic: TrafficCounter) -> None:
        self._clock, self._send, self._traffic = clock, send, traffic

    def call(
        self, target: str, method: str, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Call and wait.

        Raises:
            ProgramError: the node raised, or is gone.
            ValueUnshippableError: an argument cannot be sent.
        """
        request = _request(target, method, given, named)
        return self._exchange(target, method, request)

    def begin(
        self, target: str, method: str, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> CallFuture:
        """Call without waiting.

        Raises:
            ValueUnshippableError: an argument cannot be sent.
        """
        request = _request(target, method, given, named)  # now: the caller may change them later
        future: Future[Any] = Future()

        def carry_out() -> None:
            try:
                future.set_result(self._exchange(target, method, request))
            except NodeStopped:
                raise
            except BaseException as error:
                future.set_exception(error)

        try:
            self._clock.start(carry_out)
        except NodeStopped:
            check_in_node()
            raise
        return CallFuture(future, self._clock)

    def _exchange(self, target: str, method: str, request: bytes) -> Any:
        answer: bytes | memoryview = b""
        try:
            answer = self._send(target, method, request)
        finally:
            self._traffic.count(target.partition("/")[0], len(request), len(answer))
        return unpack(answer)


def _request(target: str, method: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    try:
        return pack([list(given), dict(named)])
    except ValueUnshippableError as error:
        raise ValueUnshippableError(f"an argument of {target}.{method}: {error.message}") from None


class NodeCaller:
    """Takes a handle's place: ``caller.method(x)`` calls and waits. Replicas are called in turn.

    Attributes:
        futures: the same, without waiting: ``caller.futures.method(x)`` returns a `CallFuture`.
        each: a caller of each replica by itself.
    """

    def __init__(self, targets: tuple[str, ...], calls: OutgoingCalls) -> None:
        self._turns = itertools.cycle(targets)
        self._targets, self._calls = targets, calls
        self.futures = FutureCaller(self._turns, calls)

    @property
    def each(self) -> tuple[NodeCaller, ...]:
        """See the class."""
        return tuple(NodeCaller((target,), self._calls) for target in self._targets)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *given, **named: self._calls.call(next(self._turns), method, given, named)


class FutureCaller:
    """Calls that return a `CallFuture` at once."""

    def __init__(self, turns: itertools.cycle[str], calls: OutgoingCalls) -> None:
        self._turns, self._calls = turns, calls

    def __getattr__(self, method: str) -> Callable[..., CallFuture]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *given, **named: self._calls.begin(next(self._turns), method, given, named)


def filled(value: Any, calls: OutgoingCalls, names: Mapping[str, tuple[str, ...]]) -> Any:
    """A value with callers in the places of handles.

    Args:
        value: an argument of a node.
        calls: of the node.
        names: of the instances of every node.
    """
    match value:
        case NodeHandle(node=node):
            return NodeCaller(names[node], calls)
        case dict():
            return {key: filled(each, calls, names) for key, each in value.items()}
        case list():
            return [filled(each, calls, names) for each in value]
        case tuple():
            return tuple(filled(each, calls, names) for each in value)
    return value
