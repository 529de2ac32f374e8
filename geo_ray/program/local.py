"""A program in threads of this process, on the machine's clock or on a virtual one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from geo_ray.errors import NodeEndedError, NodeFailedError, NodeLostError
from geo_ray.program.caller import RETURN_S, OutgoingCalls
from geo_ray.program.clock import ProgramClock
from geo_ray.program.graph import Program
from geo_ray.program.host import NodeHost
from geo_ray.program.node import NodeInstance, instance_names
from geo_ray.program.surroundings import NodeSurroundings
from geo_ray.program.traffic import FRAME_BYTES, TrafficCounter
from geo_ray.program.values import pack, unpack
from geo_ray.transport.emulation.link_model import build_links


class LocalCrew:
    """Makes instances in this process; see `NodeCrew`.

    What crosses regions is held back as the program's links say, by one model for each direction,
    like a bridge for each region that all calls from there go through.

    Args:
        program: the whole.
        clock: the machine's or a virtual one.
        on: threads or virtual.
    """

    def __init__(self, program: Program, clock: ProgramClock, on: str) -> None:
        self._clock, self._on = clock, on
        self._links = build_links(program.both_ways, program.seed)
        self._names = {name: instance_names(*both) for name, both in program.nodes.items()}
        self._regions = {each.name: each.group.region for each in program.instances}
        # Of those that stand; whoever calls one that is being made anew waits for it.
        self._hosts: dict[str, Future[NodeHost]] = {name: Future() for name in self._regions}
        self._counters: dict[str, list[TrafficCounter]] = defaultdict(list)
        self._ended: Future[None] = Future()
        self._began_s = 0.0

    def begin(self, alarm: Callable[[BaseException], None]) -> None:
        """See `NodeCrew.begin`."""
        self._began_s = self._clock.now_s()

    def start(self, instance: NodeInstance, incarnation: int) -> bool:
        """See `NodeCrew.start`."""
        region, group = instance.group.region, instance.group
        counter = TrafficCounter()
        self._counters[instance.node.name].append(counter)
        calls = OutgoingCalls(self._clock, partial(self._send, region), counter)
        place = NodeSurroundings(instance.name, region, instance.replica, self._on, self._clock)
        # As elsewhere, each instance has arguments of its own.
        args = unpack(pack(instance.node.args))
        host = NodeHost(instance.make, args, group.calls_at_once, place, calls, self._names)
        host.stand()
        self._hosts[instance.name].set_result(host)
        return host.has_run

    def run(self, name: str) -> bytes:
        """See `NodeCrew.run`."""
        try:
            return self._hosts[name].result().run()
        except NodeFailedError:
            self._hosts[name] = Future()
            raise

    def attend(self, name: str) -> None:
        """See `NodeCrew.attend`."""
        self._clock.wait(self._ended)

    def counts(self) -> Mapping[str, list[dict[str, list[int]]]]:
        """See `NodeCrew.counts`."""
        return {node: [each.counts() for each in all_] for node, all_ in self._counters.items()}

    def end(self) -> None:
        """See `NodeCrew.end`; who goes on after it gets no further than the next call."""
        self._ended.set_result(None)

    def _send(self, region: str, target: str, method: str, request: bytes) -> bytes:
        if self._ended.done():
            raise NodeEndedError(f"{target}.{method} was called, but the program has ended")
        there = self._regions[target]
        self._carry(region, there, len(request))
        answer = b""
        try:
            answer = self._standing(target).answer(method, request)
        finally:
            self._carry(there, region, len(answer))
        return answer

    def _standing(self, target: str) -> NodeHost:
        host = self._hosts[target]
        if not self._clock.wait(host, RETURN_S):
            raise NodeLostError(f"{target} did not come back within {RETURN_S:g} s")
        return host.result()

    def _carry(self, src: str, dst: str, size_bytes: int) -> None:
        link = self._links.get((src, dst))
        if link is not None:
            now_s = self._clock.now_s() - self._began_s
            self._clock.sleep_s(link.transfer(now_s, size_bytes + FRAME_BYTES) - now_s)
