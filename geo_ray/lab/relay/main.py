"""The relay's process: `python -m geo_ray.lab.relay.main DIRECTORY [--detached]`.

The process reads ``plan.json`` in the directory, opens a TUN device in every region's namespace,
answers on ``control.sock``, and carries packets until it is told to quit, gets SIGTERM, or its
owner's end of standard input closes. In each case it takes the whole lab down at its end.

While packets flow it wakes once per quantum and serves everything that is due; a timer per packet
would cost three times the CPU. It runs with a real-time priority, so that delays are right also
when all cores are busy. Standard library only: it starts in 50 ms and no other library's threads
or garbage collection get in its way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from geo_ray.lab import teardown
from geo_ray.lab.relay.control import Control
from geo_ray.lab.relay.mesh import Mesh, Station
from geo_ray.lab.relay.pace import RoundPace
from geo_ray.lab.relay.plan import DEVICE, LabPlan, from_json, prefixes_of
from geo_ray.lab.relay.schedule import Target, TraceSchedule
from geo_ray.lab.relay.traces import Trace
from geo_ray.lab.tun import Tun

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
        pace = RoundPace(self._quantum_s, notes, last_busy_s)
        while not self._stopped:
            now_s = clock()
            if now_s - last_busy_s < _LINGER_S:
                time.sleep(pace.pause_s(now_s))
                ready = self._epoll.poll(0)
            else:
                due_s = self._next_s()
                ready = self._idle(now_s, due_s)
                pace.woke(clock(), due_s)
            began_s = clock()
            late_s = pace.begin(began_s, time.thread_time())
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
        """When something is due next; None: never."""
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
