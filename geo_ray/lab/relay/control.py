"""The requests that a running relay answers; requests and answers are JSON values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from geo_ray.lab.relay import stolen
from geo_ray.lab.relay.link import Link
from geo_ray.lab.relay.mesh import Mesh
from geo_ray.lab.relay.schedule import Target, TraceSchedule
from geo_ray.lab.relay.shapes import CapShape


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
        """Carry out one request; a wrong request gets an answer with ``error``."""
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
        waited_s = stolen.waited_s()
        return {
            "seconds": (now_s - self._began_s),
            "cpu_s": time.process_time() - self._cpu_base_s,
            "stolen_s": stolen.stolen_s() - self._stolen_base_s,
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
        """Let the counters of the system count from now on."""
        self._cpu_base_s = time.process_time()
        self._stolen_base_s = stolen.stolen_s()
        self._waited_base_s = stolen.waited_s() or 0.0
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
