"""Carries a program out: starts instances, restarts them, and ends all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from geo_ray.errors import NodeFailedError
from geo_ray.program.clock import NodeStopped, ProgramClock
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeInstance
from geo_ray.program.policy import ProgramPolicy
from geo_ray.program.result import ProgramResult
from geo_ray.program.traffic import traffic_of
from geo_ray.program.values import unpack


class NodeCrew(Protocol):
    """Makes instances, by whatever means; each launcher has one."""

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """Bring up what is there before all nodes.

        Args:
            alarm: to be told of what the program cannot go on without.
        """

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """Make an instance, in place of an earlier one; whether it has a ``run``.

        Raises:
            GeoRayError: it could not be made.
        """

    def run(self, name: str) -> bytes:
        """What an instance's ``run`` returns.

        Raises:
            GeoRayError: it failed, or its process ended.
        """

    def attend(self, name: str) -> None:
        """Wait until an instance ends.

        Raises:
            GeoRayError: its process ended.
        """

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """Calls and bytes by the calling node; see `traffic_of`."""

    def end(self) -> None:
        """End everything; called once, whatever has happened."""


@dataclass(slots=True)
class _Inbox:
    """What has happened, for one who waits."""

    clock: ProgramClock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _events: deque[tuple[str, str, Any]] = field(default_factory=deque)
    _news: Future[None] = field(default_factory=Future)

    def put(self, what: str, name: str, told: Any) -> None:
        with self._lock:
            self._events.append((what, name, told))
            news, self._news = self._news, Future()
        news.set_result(None)

    def get(self) -> tuple[str, str, Any]:
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                news = self._news
            self.clock.wait(news)


def carry_out(program: Program, crew: NodeCrew, clock: ProgramClock, on: str) -> ProgramResult:
    """Run a program to its end; nothing of it is left afterwards, however it ends.

    Raises:
        NodeFailedError: an instance failed once too often.
        GeoRayError: it could not be started.
    """
    policy, inbox = ProgramPolicy(program), _Inbox(clock)
    instances = {instance.name: instance for instance in program.instances}
    values: dict[str, Any] = {}
    began_s = clock.now_s()
    try:
        crew.begin(partial(inbox.put, "lost", ""))
        while True:
            for name in policy.due():
                number = policy.incarnations[name]
                clock.start(partial(_look_after, instances[name], number, crew, inbox))
            if policy.is_over:
                break
            what, name, told = inbox.get()
            if what == "stood":
                policy.stood(name, runs=told)
            elif what == "returned":
                policy.returned(name)
                values[name] = unpack(told)
            elif what == "lost":
                raise told
            elif not policy.failed(name, clock.now_s()):
                raise _final(told, policy.limit(name))
        seconds = clock.now_s() - began_s
        traffic = traffic_of(program.edges, crew.counts())
    finally:
        crew.end()
    restarts = {name: n - 1 for name, n in policy.incarnations.items() if n > 1}
    return ProgramResult(program, on, values, seconds, traffic, restarts)


def _look_after(instance: NodeInstance, incarnation: int, crew: NodeCrew, inbox: _Inbox) -> None:
    """One incarnation of an instance, from its start to its end."""
    try:
        inbox.put("stood", instance.name, runs := crew.start(instance, incarnation))
        if runs:
            inbox.put("returned", instance.name, crew.run(instance.name))
        crew.attend(instance.name)
    except NodeStopped:
        raise
    except BaseException as error:  # it belongs to who waits
        inbox.put("failed", instance.name, error)


def _final(error: BaseException, limit: str) -> BaseException:
    if isinstance(error, NodeFailedError):
        return NodeFailedError(f"{error.message}\n({limit})", fix=error.fix)
    return error
