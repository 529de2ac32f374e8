"""The relay's process: `python -m geo_ray.lab.relay DIRECTORY [--detached]`.

The process reads ``plan.json`` in the directory, opens a TUN device in every region's namespace,
serves JSON requests on ``control.sock``, and forwards packets until it receives a quit request or
SIGTERM, or its owner closes standard input. In each case it takes the whole lab down at its end.

While packets flow it wakes once per quantum and serves everything that is due; a timer per packet
would cost three times the CPU. It runs with real-time priority, so that delays are right also when
all cores are busy. Standard library only: it starts in 50 ms, and no other library's threads or
garbage collection interfere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import heapq
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from geo_ray.lab import teardown
from geo_ray.lab.link import Link
from geo_ray.lab.mesh import Mesh, Station
from geo_ray.lab.namespace import Tun
from geo_ray.lab.plan import DEVICE, CapShape, LabPlan, Trace, from_json, prefixes_of
from geo_ray.lab.stats import LEAST_S

Target: TypeAlias = tuple[str, int, int]
"""("link", source, destination), ("up", region, region) or ("down", region, region)."""


class TraceSchedule:
    """The next change of every trace.

    Args:
        traces: traces by the target that they change.
    """

    def __init__(self, traces: Mapping[Target, Trace]) -> None:
        self._traces = dict(traces)
        self._began_s = 0.0
        self._heap: list[tuple[float, Target, float]] = []
        self._changes: dict[Target, Iterator[tuple[float, float]]] = {}

    def start(self, now_s: float) -> None:
        """Start or restart all traces."""
        self._began_s = now_s
        self._heap = []
        self._changes = {target: trace.changes() for target, trace in self._traces.items()}
        for target in self._traces:
            self._push_next(target)

    def drop(self, target: Target) -> None:
        """Forget a trace, because its rate was set by hand."""
        self._traces.pop(target, None)
        self._changes.pop(target, None)
        self._heap = [entry for entry in self._heap if entry[1] != target]
        heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """Return when a rate changes next; None: never."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[tuple[Target, float]]:
        """Return the changes until now: (target, Mbit/s) in order of time."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            _, target, rate_mbps = heapq.heappop(self._heap)
            found.append((target, rate_mbps))
            self._push_next(target)
        return found

    def _push_next(self, target: Target) -> None:
        change = next(self._changes[target], None)
        if change is not None:
            time_s, rate_mbps = change
            heapq.heappush(self._heap, (self._began_s + time_s, target, rate_mbps))


LEAST_PAUSE_S: Final = 50e-6  # leaves the core to others even when the relay falls behind


class RoundTimer:
    """Starts rounds a quantum apart, and sums up their delays.

    A late round takes packets that arrived while it was awaited, so lateness counts from the time
    when the round was due or a quantum after the last one began, whichever is later. A delay of one
    round is not counted for the next round again, but a long round makes the next one late.

    Args:
        quantum_s: between two rounds.
        notes: counters ``late_s``, ``own_s`` and ``late_max_s`` are kept here; others may reset
            them.
        now_s: the present.
    """

    __slots__ = ("_began_s", "_due_s", "_notes", "_quantum_s", "_spent_s", "_wake_s")

    def __init__(
        self, quantum_s: float, notes: dict[str, int | float | bool], now_s: float
    ) -> None:
        self._quantum_s, self._notes = quantum_s, notes
        self._wake_s = self._began_s = self._due_s = now_s
        self._spent_s = 0.0
        notes |= {"late_s": 0.0, "own_s": 0.0, "late_max_s": 0.0}

    def pause_s(self, now_s: float) -> float:
        """Return how long to sleep until the next round, while packets flow."""
        self._due_s = max(self._wake_s, self._began_s) + self._quantum_s
        self._wake_s = max(self._wake_s + self._quantum_s, now_s + LEAST_PAUSE_S)
        return self._wake_s - now_s

    def woke(self, now_s: float, due_s: float | None) -> None:
        """Note the end of an idle wait; ``due_s``: for what; None: for a packet only."""
        self._wake_s = now_s
        self._due_s = now_s if due_s is None else max(due_s, self._began_s)

    def begin(self, now_s: float, spent_s: float) -> float:
        """Begin a round.

        Args:
            now_s: the present.
            spent_s: what the relay's thread has computed so far.

        Returns:
            By how much it is late; 0 if that is at most `LEAST_S`.
        """
        computed_s = spent_s - self._spent_s
        self._began_s, self._spent_s = now_s, spent_s
        late_s = now_s - self._due_s
        if late_s <= LEAST_S:
            return 0.0
        notes = self._notes
        notes["late_s"] += late_s
        notes["own_s"] += min(late_s, max(0.0, computed_s - self._quantum_s))
        notes["late_max_s"] = max(notes["late_max_s"], late_s)
        return late_s


_STAT: Final = Path("/proc/stat")
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
_STEAL_COLUMN: Final = 8  # name, user, nice, system, idle, iowait, irq, softirq, steal


def stolen_time_s() -> float:
    """Seconds since the boot in which the host ran others on the cores of this process."""
    with _STAT.open() as lines:
        text = lines.read()
    return stolen_ticks(text, os.sched_getaffinity(0)) / os.sysconf("SC_CLK_TCK")


def run_queue_wait_s() -> float | None:
    """Seconds that this thread has been ready without a core; None if the kernel counts none."""
    try:
        return run_queue_ns(_SCHEDSTAT.read_text()) * 1e-9
    except (OSError, ValueError):
        return None


def stolen_ticks(stat: str, cores: Collection[int]) -> int:
    """The column ``steal`` of these cores in the text of ``/proc/stat``; 0 where it is missing."""
    found = 0
    wanted = {f"cpu{core}" for core in cores}
    for line in stat.splitlines():
        columns = line.split()
        if columns and columns[0] in wanted and len(columns) > _STEAL_COLUMN:
            found += int(columns[_STEAL_COLUMN])
    return found


def run_queue_ns(schedstat: str) -> int:
    """The wait in the text of ``/proc/PID/schedstat``: time run, time waited, turns.

    Raises:
        ValueError: it has no such text.
    """
    _, waited, _ = schedstat.split()
    return int(waited)


class Control:
    """Carries out requests between two rounds of the relay.

    Args:
        mesh: regions and links, which requests change and read.
        schedule: the traces.
        stop: ends the relay.
    """

    def __init__(self, mesh: Mesh, schedule: TraceSchedule, stop: Callable[[], None]) -> None:
        self._mesh = mesh
        self._schedule = schedule
        self._stop = stop
        self.notes: dict[str, int | float | bool] = {}
        self._note_bases()

    def answer(self, request: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Execute one request; an invalid request gets an answer with ``error``."""
        try:
            action = getattr(self, f"_do_{request['do']}", None)
            if action is None:
                return {"error": f"unknown request '{request['do']}'"}
            return {"ok": True, **(action(request, now_s) or {})}
        except KeyError as error:
            return {"error": f"no {error}"}
        except (TypeError, ValueError, ZeroDivisionError) as error:
            return {"error": str(error)}

    def apply(self, target: Target, rate_mbps: float, now_s: float) -> None:
        """Set a rate on behalf of a trace."""
        kind, src, dst = target
        if kind == "link":
            link = self._mesh.links[src, dst]
            link.reshape(now_s, replace(link.shape, rate_mbps=rate_mbps))
        else:
            queue = getattr(self._mesh.stations[src], kind)
            queue.reshape(now_s, replace(queue.shape, rate_mbps=rate_mbps))

    # ------------------------------------------------------------------ requests

    def _do_ping(self, request: dict[str, Any], now_s: float) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def _do_set(self, request: dict[str, Any], now_s: float) -> None:
        changes = request["changes"]
        links = self._links(request)
        shapes = [replace(link.shape, **changes) for link in links.values()]  # all or none
        for (pair, link), shape in zip(links.items(), shapes, strict=True):
            if "rate_mbps" in changes:
                self._schedule.drop(("link", *pair))
            link.reshape(now_s, shape)
        self._mesh.note_round_trips()

    def _do_cap(self, request: dict[str, Any], now_s: float) -> None:
        index = self._mesh.index(request["region"])
        for side in ("up", "down"):
            if side in request:
                self._schedule.drop((side, index, index))
                shape = CapShape(**request[side])
                getattr(self._mesh.stations[index], side).reshape(now_s, shape)

    def _do_cut(self, request: dict[str, Any], now_s: float) -> None:
        for link in self._links(request).values():
            link.cut(now_s)

    def _do_heal(self, request: dict[str, Any], now_s: float) -> None:
        for link in self._links(request).values():
            link.heal()

    def _do_reset(self, request: dict[str, Any], now_s: float) -> None:
        self._mesh.reset()
        self._note_bases()
        for name, value in self.notes.items():
            if not isinstance(value, bool):
                self.notes[name] = 0

    def _do_restart_traces(self, request: dict[str, Any], now_s: float) -> None:
        self._schedule.start(now_s)

    def _do_quit(self, request: dict[str, Any], now_s: float) -> None:
        self._stop()

    def _do_totals(self, request: dict[str, Any], now_s: float) -> dict[str, Any]:
        waited_s = run_queue_wait_s()
        return {
            "seconds": (now_s - self._began_s),
            "cpu_s": time.process_time() - self._cpu_base_s,
            "stolen_s": stolen_time_s() - self._stolen_base_s,
            "waited_s": None if waited_s is None else waited_s - self._waited_base_s,
            "cores": len(os.sched_getaffinity(0)),
            **self.notes,
        }

    def _do_stats(self, request: dict[str, Any], now_s: float) -> dict[str, Any]:
        # One region per request, so that an answer fits into a datagram whatever the mesh.
        index = self._mesh.index(request["src"])
        station = self._mesh.stations[index]
        return {
            "links": {
                self._mesh.stations[dst].name: self._books(link, now_s)
                for (src, dst), link in self._mesh.links.items()
                if src == index
            },
            "up": station.up.books(now_s),
            "down": station.down.books(now_s),
            "unrouted": station.unrouted,
        }

    def _note_bases(self) -> None:
        """Reset the base values of the system's counters."""
        self._cpu_base_s = time.process_time()
        self._stolen_base_s = stolen_time_s()
        self._waited_base_s = run_queue_wait_s() or 0.0
        self._began_s = time.monotonic()

    def _books(self, link: Link, now_s: float) -> dict[str, Any]:
        shape = link.shape
        return {
            "rate_mbps": shape.rate_mbps,
            "delay_s": shape.delay_s,
            "loss": shape.loss,
            **link.books(now_s),
        }

    def _links(self, request: dict[str, Any]) -> dict[tuple[int, int], Link]:
        """Return the links of an ordered pair; ``*`` stands for every region."""
        wanted = request["src"], request["dst"]
        sources, targets = (None if name == "*" else self._mesh.index(name) for name in wanted)
        found = {
            (src, dst): link
            for (src, dst), link in self._mesh.links.items()
            if sources in (None, src) and targets in (None, dst)
        }
        if not found:
            raise ValueError("there is no link {} -> {}".format(*wanted))
        return found


READY: Final = b"ready"
PLAN_FILE: Final = "plan.json"
CONTROL_FILE: Final = "control.sock"

_BATCH: Final = 256  # packets read from one region before the others get their turn
_LINGER_S: Final = 0.005  # the relay wakes up for that long after the last packet
_MILLISECOND_S: Final = 0.001
_PRIORITY: Final = 10
_REQUEST_BYTES: Final = 1 << 16
_PR_SET_TIMERSLACK: Final = 29
_MLOCK_ALL: Final = 3


class Relay:
    """Carries packets between the namespaces of a plan.

    Args:
        plan: what to carry how.
        control_path: where to make the control socket.
        owner: a file whose end means that the owner has ended; None: no owner.
    """

    def __init__(self, plan: LabPlan, control_path: Path, owner: int | None) -> None:
        self._tuns = [Tun(station.namespace, DEVICE) for station in plan.stations]
        self._mtu = plan.mtu
        stations = [
            Station(
                station.name,
                prefixes_of(index),
                station.up,
                station.down,
                functools.partial(os.write, tun.file),
            )
            for index, (station, tun) in enumerate(zip(plan.stations, self._tuns, strict=True))
        ]
        links = {(link.src, link.dst): (link.shape, link.seed) for link in plan.links}
        self._mesh = Mesh(stations, links)
        self._schedule = TraceSchedule(_traces(plan))
        self._control = Control(self._mesh, self._schedule, self.stop)
        self._stopped = False
        self._quantum_s = plan.quantum_us * 1e-6
        self._owner = owner
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(control_path))
        self._socket.setblocking(False)
        self._sources = dict(zip([tun.file for tun in self._tuns], stations, strict=True))
        self._epoll = select.epoll()
        for file in (*self._sources, self._socket.fileno()):
            self._epoll.register(file, select.EPOLLIN)
        if owner is not None:
            self._epoll.register(owner, select.EPOLLIN)

    def stop(self) -> None:
        """End `run` after the present round."""
        self._stopped = True

    def run(self) -> None:
        """Carry packets until `stop`."""
        notes = self._control.notes
        notes |= {"realtime": _hurry(), "read_packets": 0, "pass_max_s": 0.0}
        clock = time.monotonic
        self._schedule.start(clock())
        last_busy_s = clock()
        timer = RoundTimer(self._quantum_s, notes, last_busy_s)
        while not self._stopped:
            now_s = clock()
            if now_s - last_busy_s < _LINGER_S:
                time.sleep(timer.pause_s(now_s))
                ready = self._epoll.poll(0)
            else:
                due_s = self._next_s()
                ready = self._idle(now_s, due_s)
                timer.woke(clock(), due_s)
            began_s = clock()
            late_s = timer.begin(began_s, time.thread_time())
            count = self._ingest(ready, began_s, late_s) if ready else 0
            notes["read_packets"] += count
            for target, rate_mbps in self._schedule.due(began_s):
                self._control.apply(target, rate_mbps, began_s)
            if self._mesh.advance(clock) or count:
                last_busy_s = clock()
                pass_s = last_busy_s - began_s
                if pass_s > notes["pass_max_s"]:
                    notes["pass_max_s"] = pass_s

    def close(self) -> None:
        """Remove the devices and the control socket."""
        self._epoll.close()
        for tun in self._tuns:
            tun.close()
        path = self._socket.getsockname()
        self._socket.close()
        Path(path).unlink(missing_ok=True)

    def _next_s(self) -> float | None:
        """Return when something is due next; None: never."""
        times_s = (self._mesh.next_s(), self._schedule.next_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _idle(self, now_s: float, due_s: float | None) -> list[tuple[int, int]]:
        """Wait for a packet, a request, or what is due next, without waking in between."""
        if due_s is None:
            return self._epoll.poll()
        wait_s = due_s - now_s
        if wait_s > _MILLISECOND_S:
            # epoll rounds up to milliseconds; the last one is slept exactly
            return self._epoll.poll(wait_s - _MILLISECOND_S / 2)
        time.sleep(min(max(wait_s, 0.0), self._quantum_s))
        return self._epoll.poll(0)

    def _ingest(self, ready: list[tuple[int, int]], now_s: float, late_s: float) -> int:
        total, read, mtu = 0, os.read, self._mtu
        for file, _ in ready:
            station = self._sources.get(file)
            if station is None:
                self._attend(file, now_s)
                continue
            packets: list[bytes] = []
            try:
                while len(packets) < _BATCH:
                    packets.append(read(file, mtu))
            except BlockingIOError:
                pass
            except OSError:  # the namespace was deleted
                self._epoll.unregister(file)
            station.accept(packets, now_s, late_s)
            total += len(packets)
        return total

    def _attend(self, file: int, now_s: float) -> None:
        """Answer a request, or notice that the owner has ended."""
        if file == self._owner:
            if not os.read(file, 1):
                self.stop()
            return
        data, sender = self._socket.recvfrom(_REQUEST_BYTES)
        try:
            answer = self._control.answer(json.loads(data), now_s)
        except (ValueError, TypeError, AttributeError):
            answer = {"error": "a request is a JSON object"}
        if sender:
            with contextlib.suppress(OSError):  # the asking process has ended
                self._socket.sendto(json.dumps(answer).encode(), sender)


def _traces(plan: LabPlan) -> dict[Target, Trace]:
    traces: dict[Target, Trace] = {}
    for index, station in enumerate(plan.stations):
        if station.up_trace is not None:
            traces["up", index, index] = station.up_trace
        if station.down_trace is not None:
            traces["down", index, index] = station.down_trace
    for link in plan.links:
        if link.trace is not None:
            traces["link", link.src, link.dst] = link.trace
    return traces


def _hurry() -> bool:
    """Set what keeps wake-ups exact; return False if the system refuses real-time priority."""
    gc.collect()
    gc.freeze()
    gc.disable()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    libc.mlockall(_MLOCK_ALL)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError:
        return False
    return True


def main() -> None:
    """Carry packets; see the module's text. Writes `READY` to standard output when it does."""
    directory = Path(sys.argv[1])
    owner = None if "--detached" in sys.argv[2:] else sys.stdin.fileno()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles the terminal's Ctrl-C
    try:
        plan = from_json((directory / PLAN_FILE).read_text())
        relay = Relay(plan, directory / CONTROL_FILE, owner)
        signal.signal(signal.SIGTERM, lambda *_: relay.stop())
        os.write(sys.stdout.fileno(), READY)
        os.close(sys.stdout.fileno())
        relay.run()
        relay.close()
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        teardown.take_down(directory)


if __name__ == "__main__":
    main()
