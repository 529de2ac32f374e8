"""Calls between nodes: by method, by future or to all replicas; batching; the node host.

`NodeHost` creates a node, answers its calls and runs it. `TrafficCounter` counts bytes per
edge.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from geo_ray.base.errors import (
    DeadlineExceededError,
    NodeCallError,
    NodeEndedError,
    NodeFailedError,
    ProgramInvalidError,
    ValueUnshippableError,
)
from geo_ray.base.user_code import or_meant
from geo_ray.program.clock import NodeContext, NodeStopped, ProgramClock, in_context, name_here
from geo_ray.program.graph import NodeEdge, NodeHandle
from geo_ray.program.serialization import pack, unpack

FRAME_BYTES: Final = 256
"""Approximate size of the headers of a message between regions."""


@dataclass(frozen=True, slots=True)
class EdgeTraffic:
    """Traffic of an edge: the bytes of arguments and results, without headers.

    Attributes:
        edge: caller and called node.
        calls: number of calls.
        request_bytes: bytes of arguments.
        answer_bytes: bytes of results.
    """

    edge: NodeEdge
    calls: int
    request_bytes: int
    answer_bytes: int


class TrafficCounter:
    """Counts the calls of one instance, by the node that is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int, int]] = {}

    def count(self, target: str, request_bytes: int, answer_bytes: int) -> None:
        """Count a call."""
        with self._lock:
            calls, there, back = self._counts.get(target, (0, 0, 0))
            self._counts[target] = (calls + 1, there + request_bytes, back + answer_bytes)

    def counts(self) -> dict[str, list[int]]:
        """Return calls and bytes in both directions."""
        with self._lock:
            return {target: list(counts) for target, counts in self._counts.items()}


def traffic_of(
    edges: Iterable[NodeEdge], counted: Mapping[str, Iterable[Mapping[str, list[int]]]]
) -> tuple[EdgeTraffic, ...]:
    """Sum up by edge.

    Args:
        edges: of the program.
        counted: by the calling node, of each of its instances and attempts.
    """
    found = []
    for edge in edges:
        counts = [c[edge.target] for c in counted.get(edge.source, ()) if edge.target in c]
        calls, there, back = (sum(c[i] for c in counts) for i in range(3))
        found.append(EdgeTraffic(edge, calls, there, back))
    return tuple(found)


Send = Callable[[str, str, bytes], bytes | memoryview]
"""Sends a call, (instance, method, arguments), and waits for the answer."""

RETURN_S: Final = 300.0
"""Time for which a call waits for a restarting node."""


class CallFuture:
    """The future result of a call.

    Not one of `concurrent.futures`, which cannot wait on a virtual clock.
    """

    def __init__(self, future: Future[Any], clock: ProgramClock) -> None:
        self._future, self._clock = future, clock

    def done(self) -> bool:
        """Whether the result has arrived."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the result.

        Raises:
            DeadlineExceededError: it did not arrive in time; the call continues.
            ProgramError: the error of the call.
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
    """Report a call after the end; a node's own thread ends without an error.

    Raises:
        NodeEndedError: the caller is no node.
    """
    if not name_here():
        raise NodeEndedError("a node was called, but its program has ended")


def gathered(futures: Iterable[CallFuture]) -> list[Any]:
    """Return the results of several calls, in their order.

    Raises:
        ProgramError: that of the first failed call, in their order.
    """
    return [future.result() for future in futures]


class OutgoingCalls:
    """A node's calls to others.

    Args:
        clock: where it runs.
        send: transmits a call.
        traffic: counts the calls.
    """

    def __init__(self, clock: ProgramClock, send: Send, traffic: TrafficCounter) -> None:
        self._clock, self._send, self._traffic = clock, send, traffic

    def call(
        self, target: str, method: str, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Call and wait.

        Raises:
            ProgramError: the node raised an error or is gone.
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
        request = _request(target, method, given, named)  # now: the caller may modify them later
        future: Future[Any] = Future()

        def execute() -> None:
            try:
                future.set_result(self._exchange(target, method, request))
            except NodeStopped:
                raise
            except BaseException as error:
                future.set_exception(error)

        try:
            self._clock.start(execute)
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
    """Replaces a handle: ``caller.method(x)`` calls and waits. Replicas are called in turn.

    Attributes:
        futures: the same, without waiting: ``caller.futures.method(x)`` returns a `CallFuture`.
        each: a caller of each replica.
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
    """Calls that return a `CallFuture` immediately."""

    def __init__(self, turns: itertools.cycle[str], calls: OutgoingCalls) -> None:
        self._turns, self._calls = turns, calls

    def __getattr__(self, method: str) -> Callable[..., CallFuture]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *given, **named: self._calls.begin(next(self._turns), method, given, named)


def filled(value: Any, calls: OutgoingCalls, names: Mapping[str, tuple[str, ...]]) -> Any:
    """Return a value with callers in place of handles.

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


F = TypeVar("F", bound=Callable[..., Any])
MARK: Final = "_geo_ray_batch"
MOST_CALLS: Final = 64
"""Maximum number of calls in a batch."""


def batched_handler(batch_size: int, timeout_s: float) -> Callable[[F], F]:
    """Let a method answer several calls at once: it takes a list and returns one of equal length.

    Each call gives one argument and gets one result. Calls that wait for each other do not count as
    being answered, so `NodeGroup.calls_at_once` limits the *batches* at a time.

    Args:
        batch_size: calls that complete a batch, at most 64.
        timeout_s: how long the first call waits for others.

    Raises:
        ProgramInvalidError: the numbers are out of range.
    """
    if not 1 <= batch_size <= MOST_CALLS or not 0 <= timeout_s < threading.TIMEOUT_MAX:
        raise ProgramInvalidError(
            f"a batch of {batch_size} calls within {timeout_s:g} s: 1 to {MOST_CALLS} calls, and "
            "at least 0 s, finite"
        )

    def marked(method: F) -> F:
        setattr(method, MARK, (batch_size, timeout_s))
        return method

    return marked


class CallBatch:
    """Calls that wait for each other; the first of a batch executes it for all.

    Args:
        batch_size: calls that complete a batch.
        timeout_s: how long the first one waits.
        clock: where they wait.
        execute: answers the requests; returns as many results.
    """

    def __init__(
        self,
        batch_size: int,
        timeout_s: float,
        clock: ProgramClock,
        execute: Callable[[list[Any]], Any],
    ) -> None:
        self._size, self._timeout_s, self._clock = batch_size, timeout_s, clock
        self._execute = execute
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, Future[Any]]] = []
        self._full: Future[None] = Future()

    def answer(self, request: Any) -> Any:
        """Return this request's result of its batch.

        Raises:
            Exception: that of the whole batch.
        """
        mine: Future[Any] = Future()
        with self._lock:
            self._waiting.append((request, mine))
            is_first = len(self._waiting) == 1
            batch, full = self._waiting, self._full
            if len(batch) >= self._size:  # later calls start the next batch
                self._waiting, self._full = [], Future()
        if len(batch) >= self._size and not full.done():
            full.set_result(None)
        if is_first:
            self._clock.wait(full, self._timeout_s)
            with self._lock:
                if self._waiting is batch:
                    self._waiting, self._full = [], Future()
            self._answer_all(batch)
        else:
            self._clock.wait(mine)
        return mine.result()

    def _answer_all(self, batch: list[tuple[Any, Future[Any]]]) -> None:
        try:
            answers = self._execute([request for request, _ in batch])
            if not isinstance(answers, list | tuple) or len(answers) != len(batch):
                raise TypeError(f"a batched handler was given {len(batch)} requests and returned "
                                f"{answers!r:.100} instead of a list of as many")  # fmt: skip
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), value in zip(batch, answers, strict=True):
                future.set_result(value)


_MOST_CHARS: Final = 8000  # of a traceback, which is sent in the header of a message


class CallSemaphore:
    """Admits a number of calls at a time, in their order."""

    def __init__(self, calls_at_once: int, clock: ProgramClock) -> None:
        self._free, self._clock = calls_at_once, clock
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Wait for admission and hold it."""
        mine: Future[None] | None = None
        with self._lock:
            if self._free:
                self._free -= 1
            else:
                mine = Future()
                self._waiting.append(mine)
        if mine is not None:
            self._clock.wait(mine)
        try:
            yield
        finally:
            with self._lock:
                next_one = self._waiting.popleft() if self._waiting else None
                self._free += next_one is None
            if next_one is not None:
                next_one.set_result(None)


class NodeHost:
    """Holds one instance.

    Args:
        make: the node's factory.
        args: its arguments, handles included.
        calls_at_once: see `NodeGroup.calls_at_once`.
        context: of the instance.
        calls: of the instance to others.
        names: of the instances of every node.
    """

    def __init__(
        self,
        make: Callable[..., object],
        args: tuple[object, ...],
        calls_at_once: int,
        context: NodeContext,
        calls: OutgoingCalls,
        names: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._make, self._args = make, filled(args, calls, names)
        self._context = context
        self._semaphore = CallSemaphore(calls_at_once, context.clock)
        self._lock = threading.Lock()
        self._batches: dict[str, CallBatch] = {}
        self._node: Any = None

    @property
    def has_run(self) -> bool:
        """Whether the node has a ``run`` method."""
        return callable(getattr(self._node, "run", None))

    def stand(self) -> None:
        """Create the node.

        Raises:
            NodeFailedError: its factory raised.
        """
        try:
            with in_context(self._context):
                self._node = self._make(*self._args)
        except NodeStopped:
            raise
        except BaseException as error:  # including `sys.exit`: only the node ends
            raise self._failed("while it was created", error) from error

    def run(self) -> bytes:
        """Run its ``run`` and return the packed result.

        Raises:
            NodeFailedError: it raised an error, or its result cannot be sent.
        """
        try:
            with in_context(self._context):
                return pack(self._node.run())
        except NodeStopped:
            raise
        except BaseException as error:
            raise self._failed("in run", error) from error

    def answer(self, method: str, request: bytes | memoryview) -> bytes:
        """Call a method.

        Args:
            method: of the node.
            request: its packed arguments.

        Returns:
            Its packed result.

        Raises:
            NodeCallError: it raised an error, or does not exist.
            ValueUnshippableError: its result cannot be sent.
        """
        given, named = unpack(request)
        try:
            with in_context(self._context):
                function = self._function(method)
                marked = getattr(function, MARK, None)
                if marked is None:
                    with self._semaphore.passed():
                        value = function(*given, **named)
                else:
                    request_of_many = _only(given, named)
                    value = self._batch(method, function, marked).answer(request_of_many)
        except NodeStopped:
            raise
        except BaseException as error:
            raise self._call_failed(method, error) from error
        try:
            return pack(value)
        except ValueUnshippableError as error:
            who = f"{self._context.name}.{method}"
            raise ValueUnshippableError(f"the result of {who}: {error.message}") from None

    def _batch(
        self, method: str, function: Callable[..., Any], marked: tuple[int, float]
    ) -> CallBatch:
        with self._lock:
            if method not in self._batches:
                clock = self._context.clock
                self._batches[method] = CallBatch(*marked, clock, partial(self._gated, function))
            return self._batches[method]

    def _gated(self, function: Callable[..., Any], requests: list[Any]) -> Any:
        with self._semaphore.passed():
            return function(requests)

    def _function(self, method: str) -> Callable[..., Any]:
        node = self._node
        found = None if method.startswith("_") or method == "run" else getattr(node, method, None)
        if not callable(found):
            kind = type(node)  # so that properties of the instance are not computed
            there = [
                n for n in dir(kind) if n[0] != "_" and n != "run" and callable(getattr(kind, n))
            ]
            raise NodeCallError(
                f"node {self._context.name!r} has no public method {method!r}"
                f"{or_meant(method, there)}",
                fix="Call a public method of the node; `run` is started by the launcher.",
            )
        function: Callable[..., Any] = found
        return function

    def _failed(self, when: str, error: BaseException) -> NodeFailedError:
        if isinstance(error, NodeFailedError):
            return error
        return NodeFailedError(f"node {self._context.name!r} failed {when}: {_error_text(error)}")

    def _call_failed(self, method: str, error: BaseException) -> NodeCallError:
        if isinstance(error, NodeCallError):
            return error
        return NodeCallError(f"{self._context.name}.{method} failed: {_error_text(error)}")


def _only(given: list[Any], named: dict[str, Any]) -> Any:
    if len(given) != 1 or named:
        raise TypeError("a batched handler takes one positional argument of each call")
    return given[0]


def _error_text(error: BaseException) -> str:
    """Return a user's error and its traceback as text."""
    try:
        what = f"{error!r:.2000}"
    except Exception:  # an error in `repr` must not hide the error
        what = type(error).__name__
    trace = "".join(traceback.format_exception(error)).rstrip()[-_MOST_CHARS:]
    return f"{what}\n{trace}".encode(errors="backslashreplace").decode()
