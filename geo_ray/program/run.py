"""Runs a program in threads, in subprocesses, on Ray or on virtual time.

`ProgramPolicy` decides restarts (pure); `execute` starts, restarts and ends the instances;
`ThreadBackend` runs them in threads.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from geo_ray.base.errors import NodeEndedError, NodeFailedError, NodeLostError, ProgramError
from geo_ray.base.restarts import Restarts
from geo_ray.base.user_code import or_meant
from geo_ray.experiment.cluster import ClusterConfig
from geo_ray.program.calls import (
    FRAME_BYTES,
    RETURN_S,
    NodeHost,
    OutgoingCalls,
    TrafficCounter,
    traffic_of,
)
from geo_ray.program.clock import (
    NodeContext,
    NodeStopped,
    ProgramClock,
    RealClock,
    VirtualThreads,
)
from geo_ray.program.graph import NodeInstance, Program, handles_in, instance_names
from geo_ray.program.processes import Launcher, LocalProcesses, ProcessBackend
from geo_ray.program.result import ProgramResult
from geo_ray.program.serialization import check_not_importing, pack, unpack
from geo_ray.transport.emulation import build_links


class NodeState(Enum):
    """State of an instance."""

    WAITING = "waiting"
    STARTING = "starting"
    STANDING = "standing"
    RETURNED = "returned"


class ProgramPolicy:
    """Starts instances once those that they call are ready, restarts them, and detects the end.

    Args:
        program: the program.
    """

    def __init__(self, program: Program) -> None:
        nodes = program.nodes
        self._callees: dict[str, frozenset[str]] = {}
        self._restarts: dict[str, Restarts] = {}
        self._states: dict[str, NodeState] = {}
        self._runs: dict[str, bool] = {}
        self._made: Counter[str] = Counter()
        for instance in program.instances:
            named = [instance_names(*nodes[t]) for t in handles_in(instance.node.args)]
            self._callees[instance.name] = frozenset(name for names in named for name in names)
            rule = instance.group.restarts
            self._restarts[instance.name] = Restarts(rule.most, rule.window_s, "restarts.most")
            self._states[instance.name] = NodeState.WAITING

    @property
    def incarnations(self) -> Mapping[str, int]:
        """Number of starts of each instance."""
        return self._made

    @property
    def is_over(self) -> bool:
        """Whether all are ready, and every ``run`` has returned."""
        return all(
            state is NodeState.RETURNED or (state is NodeState.STANDING and not self._runs[name])
            for name, state in self._states.items()
        )

    def due(self) -> list[str]:
        """Return the instances to start now; they count as started."""
        up = {NodeState.STANDING, NodeState.RETURNED}
        found = [
            name
            for name, state in self._states.items()
            if state is NodeState.WAITING
            and all(self._states[callee] in up for callee in self._callees[name])
        ]
        for name in found:
            self._states[name] = NodeState.STARTING
            self._made[name] += 1
        return found

    def stood(self, name: str, *, runs: bool) -> None:
        """Record that an instance is ready; ``runs`` says whether it has a ``run``."""
        self._states[name] = NodeState.STANDING
        self._runs[name] = runs

    def returned(self, name: str) -> None:
        """Record that an instance's ``run`` has returned; it still answers calls."""
        self._states[name] = NodeState.RETURNED

    def failed(self, name: str, now_s: float) -> bool:
        """Record a failure; return whether the instance may restart, and then it is due."""
        may = self._restarts[name].take(now_s)
        if may:
            self._states[name] = NodeState.WAITING
        return may

    def limit(self, name: str) -> str:
        """Return the restart limit of an instance in words."""
        return str(self._restarts[name])


class NodeBackend(Protocol):
    """Makes instances; each way to run a program has one."""

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """Start everything that the nodes need.

        Args:
            alarm: gets the failure of a part that the program needs.
        """

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """Make an instance, replacing an earlier one; return whether it has a ``run``.

        Raises:
            GeoRayError: it could not be made.
        """

    def run(self, name: str) -> bytes:
        """Run an instance's ``run`` and return the result.

        Raises:
            GeoRayError: it failed, or its process ended.
        """

    def attend(self, name: str) -> None:
        """Wait until an instance ends.

        Raises:
            GeoRayError: its process ended.
        """

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """Return calls and bytes by the calling node; see `traffic_of`."""

    def end(self) -> None:
        """End everything; called once, in every case."""


@dataclass(slots=True)
class _Inbox:
    """Queue of events for one waiting thread."""

    clock: ProgramClock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _events: deque[tuple[str, str, Any]] = field(default_factory=deque)
    _news: Future[None] = field(default_factory=Future)

    def put(self, what: str, name: str, value: Any) -> None:
        with self._lock:
            self._events.append((what, name, value))
            news, self._news = self._news, Future()
        news.set_result(None)

    def get(self) -> tuple[str, str, Any]:
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                news = self._news
            self.clock.wait(news)


def execute(program: Program, backend: NodeBackend, clock: ProgramClock, on: str) -> ProgramResult:
    """Run a program to its end; nothing of it remains, however it ends.

    Raises:
        NodeFailedError: an instance failed once too often.
        GeoRayError: it could not be started.
    """
    policy, inbox = ProgramPolicy(program), _Inbox(clock)
    instances = {instance.name: instance for instance in program.instances}
    values: dict[str, Any] = {}
    began_s = clock.now_s()
    try:
        backend.begin(partial(inbox.put, "lost", ""))
        while True:
            for name in policy.due():
                number = policy.incarnations[name]
                clock.start(partial(_look_after, instances[name], number, backend, inbox))
            if policy.is_over:
                break
            what, name, value = inbox.get()
            if what == "stood":
                policy.stood(name, runs=value)
            elif what == "returned":
                policy.returned(name)
                values[name] = unpack(value)
            elif what == "lost":
                raise value
            elif not policy.failed(name, clock.now_s()):
                raise _final(value, policy.limit(name))
        seconds = clock.now_s() - began_s
        traffic = traffic_of(program.edges, backend.counts())
    finally:
        backend.end()
    restarts = {name: n - 1 for name, n in policy.incarnations.items() if n > 1}
    return ProgramResult(program, on, values, seconds, traffic, restarts)


def _look_after(
    instance: NodeInstance, incarnation: int, backend: NodeBackend, inbox: _Inbox
) -> None:
    """Run one attempt of an instance, from its start to its end."""
    try:
        inbox.put("stood", instance.name, runs := backend.start(instance, incarnation))
        if runs:
            inbox.put("returned", instance.name, backend.run(instance.name))
        backend.attend(instance.name)
    except NodeStopped:
        raise
    except BaseException as error:  # handled by `execute`
        inbox.put("failed", instance.name, error)


def _final(error: BaseException, limit: str) -> BaseException:
    if isinstance(error, NodeFailedError):
        return NodeFailedError(f"{error.message}\n({limit})", fix=error.fix)
    return error


class ThreadBackend:
    """Makes instances in this process; see `NodeBackend`.

    Calls between regions are delayed by the program's links, with one model per direction, as if
    each region had a bridge for all of them.

    Args:
        program: the program.
        clock: the machine's or a virtual one.
        on: threads or virtual.
    """

    def __init__(self, program: Program, clock: ProgramClock, on: str) -> None:
        self._clock, self._on = clock, on
        self._links = build_links(program.both_ways, program.seed)
        self._names = {name: instance_names(*both) for name, both in program.nodes.items()}
        self._regions = {each.name: each.group.region for each in program.instances}
        # Hosts of running instances; calls to a restarting one wait.
        self._hosts: dict[str, Future[NodeHost]] = {name: Future() for name in self._regions}
        self._counters: dict[str, list[TrafficCounter]] = defaultdict(list)
        self._ended: Future[None] = Future()
        self._began_s = 0.0

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """See `NodeBackend.begin`."""
        self._began_s = self._clock.now_s()

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """See `NodeBackend.start`."""
        region, group = instance.group.region, instance.group
        counter = TrafficCounter()
        self._counters[instance.node.name].append(counter)
        calls = OutgoingCalls(self._clock, partial(self._send, region), counter)
        place = NodeContext(instance.name, region, instance.replica, self._on, self._clock)
        # As in other backends, each instance has its own arguments.
        args = unpack(pack(instance.node.args))
        host = NodeHost(instance.make, args, group.calls_at_once, place, calls, self._names)
        host.stand()
        self._hosts[instance.name].set_result(host)
        return host.has_run

    def run(self, name: str) -> bytes:
        """See `NodeBackend.run`."""
        try:
            return self._hosts[name].result().run()
        except NodeFailedError:
            self._hosts[name] = Future()
            raise

    def attend(self, name: str) -> None:
        """See `NodeBackend.attend`."""
        self._clock.wait(self._ended)

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """See `NodeBackend.counts`."""
        return {node: [each.counts() for each in all_] for node, all_ in self._counters.items()}

    def end(self) -> None:
        """See `NodeBackend.end`; later work of a node ends at its next call."""
        self._ended.set_result(None)

    def _send(self, region: str, target: str, method: str, request: bytes) -> bytes:
        if self._ended.done():
            raise NodeEndedError(f"{target}.{method} was called, but the program has ended")
        there = self._regions[target]
        self._transfer(region, there, len(request))
        answer = b""
        try:
            answer = self._standing(target).answer(method, request)
        finally:
            self._transfer(there, region, len(answer))
        return answer

    def _standing(self, target: str) -> NodeHost:
        host = self._hosts[target]
        if not self._clock.wait(host, RETURN_S):
            raise NodeLostError(f"{target} did not come back within {RETURN_S:g} s")
        return host.result()

    def _transfer(self, src: str, dst: str, size_bytes: int) -> None:
        link = self._links.get((src, dst))
        if link is not None:
            now_s = self._clock.now_s() - self._began_s
            self._clock.sleep_s(link.transfer(now_s, size_bytes + FRAME_BYTES) - now_s)


On = Literal["threads", "processes", "ray", "virtual"]
WAYS: Final = ("threads", "processes", "ray", "virtual")


def run_program(
    program: Program,
    on: On = "threads",
    *,
    cluster: ClusterConfig | None = None,
    logs: Path | None = None,
) -> ProgramResult:
    """Run a program to its end; nothing of it remains, however it ends.

    Args:
        program: the program.
        on: ``threads`` of this process, ``processes`` of this machine, ``ray``, or ``virtual``: in
            this process, on a virtual clock on which only links and `NodeContext.takes_s`
            take time.
        cluster: for ``ray``; None: the cluster that this process is connected to or runs in, else
            one that is made on this machine.
        logs: for ``processes``; a directory for the output of each.

    Raises:
        NodeFailedError: a node failed more often than its group allows.
        GeoRayError: it could not be started.
    """
    check_not_importing()
    if on == "threads":
        real = RealClock()
        return real.run(partial(execute, program, ThreadBackend(program, real, on), real, on))
    if on == "virtual":
        virtual = VirtualThreads()
        backend = ThreadBackend(program, virtual, on)
        return virtual.run(partial(execute, program, backend, virtual, on))
    if on in ("processes", "ray"):
        real = RealClock()
        launcher = _launcher(program, on, cluster, logs)
        processes = ProcessBackend(program, launcher, real)
        return real.run(partial(execute, program, processes, real, on))
    raise ProgramError(f"a program cannot run on {on!r}{or_meant(on, WAYS)}")


def _launcher(
    program: Program, on: str, cluster: ClusterConfig | None, logs: Path | None
) -> Launcher:
    if on == "processes":
        return LocalProcesses(program, logs)
    from geo_ray.program.on_ray import RayActors  # Ray takes a second to import

    return RayActors(program, cluster)
