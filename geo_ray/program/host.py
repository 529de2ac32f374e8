"""A node where it runs: makes it, answers calls to it, and runs it."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from geo_ray.errors import NodeCallError, NodeFailedError, ValueUnshippableError
from geo_ray.program.batch import MARK, CallBatch
from geo_ray.program.caller import OutgoingCalls, filled
from geo_ray.program.clock import NodeStopped, ProgramClock
from geo_ray.program.surroundings import NodeSurroundings, being_at
from geo_ray.program.values import pack, unpack
from geo_ray.util.user_class import or_meant

_MOST_CHARS: Final = 8000  # of a traceback, which passes in the head of a message


class CallGate:
    """Lets so many calls through at a time, the others in their order."""

    def __init__(self, calls_at_once: int, clock: ProgramClock) -> None:
        self._free, self._clock = calls_at_once, clock
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Wait for a turn and have it."""
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
        make: what makes the node.
        args: for it; handles among them.
        calls_at_once: see `NodeGroup.calls_at_once`.
        surroundings: of the instance.
        calls: of the instance to others.
        names: of the instances of every node.
    """

    def __init__(
        self,
        make: Callable[..., object],
        args: tuple[object, ...],
        calls_at_once: int,
        surroundings: NodeSurroundings,
        calls: OutgoingCalls,
        names: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._make, self._args = make, filled(args, calls, names)
        self._surroundings = surroundings
        self._gate = CallGate(calls_at_once, surroundings.clock)
        self._lock = threading.Lock()
        self._batches: dict[str, CallBatch] = {}
        self._node: Any = None

    @property
    def has_run(self) -> bool:
        """Whether it has something to do of its own."""
        return callable(getattr(self._node, "run", None))

    def stand(self) -> None:
        """Make the node.

        Raises:
            NodeFailedError: it raised.
        """
        try:
            with being_at(self._surroundings):
                self._node = self._make(*self._args)
        except NodeStopped:
            raise
        except BaseException as error:  # `sys.exit`, too: the node ends, and not who has started it
            raise self._failed("while it was made", error) from error

    def run(self) -> bytes:
        """What its ``run`` returns, packed.

        Raises:
            NodeFailedError: it raised, or returned what cannot be sent.
        """
        try:
            with being_at(self._surroundings):
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
            NodeCallError: it raised, or is not there.
            ValueUnshippableError: what it returned cannot be sent.
        """
        given, named = unpack(request)
        try:
            with being_at(self._surroundings):
                function = self._function(method)
                marked = getattr(function, MARK, None)
                if marked is None:
                    with self._gate.passed():
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
            who = f"{self._surroundings.name}.{method}"
            raise ValueUnshippableError(f"the result of {who}: {error.message}") from None

    def _batch(
        self, method: str, function: Callable[..., Any], marked: tuple[int, float]
    ) -> CallBatch:
        with self._lock:
            if method not in self._batches:
                clock = self._surroundings.clock
                self._batches[method] = CallBatch(*marked, clock, partial(self._gated, function))
            return self._batches[method]

    def _gated(self, function: Callable[..., Any], requests: list[Any]) -> Any:
        with self._gate.passed():
            return function(requests)

    def _function(self, method: str) -> Callable[..., Any]:
        node = self._node
        found = None if method.startswith("_") or method == "run" else getattr(node, method, None)
        if not callable(found):
            kind = type(node)  # whose properties are not computed by this
            there = [
                n for n in dir(kind) if n[0] != "_" and n != "run" and callable(getattr(kind, n))
            ]
            raise NodeCallError(
                f"node {self._surroundings.name!r} has no method {method!r} to be called"
                f"{or_meant(method, there)}",
                fix="Call a public method of the node; `run` is started by the launcher.",
            )
        function: Callable[..., Any] = found
        return function

    def _failed(self, when: str, error: BaseException) -> NodeFailedError:
        if isinstance(error, NodeFailedError):
            return error
        return NodeFailedError(f"node {self._surroundings.name!r} failed {when}: {_said(error)}")

    def _call_failed(self, method: str, error: BaseException) -> NodeCallError:
        if isinstance(error, NodeCallError):
            return error
        return NodeCallError(f"{self._surroundings.name}.{method} failed: {_said(error)}")


def _only(given: list[Any], named: dict[str, Any]) -> Any:
    if len(given) != 1 or named:
        raise TypeError("a batched handler takes one argument of each call, without its name")
    return given[0]


def _said(error: BaseException) -> str:
    """An error of a user's and its traceback, as text that can be sent."""
    try:
        what = f"{error!r:.2000}"
    except Exception:  # the error's own fault, which is not to hide it
        what = type(error).__name__
    trace = "".join(traceback.format_exception(error)).rstrip()[-_MOST_CHARS:]
    return f"{what}\n{trace}".encode(errors="backslashreplace").decode()
