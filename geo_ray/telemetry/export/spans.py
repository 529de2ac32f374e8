"""Traces of rounds across regions, computed from a run's events. Pure.

    round 12                                            all regions
      us-east                                           from its first step to the merged answer
        compute                                         its steps since the exchange before
        wait                                            it was blocked by the exchange
        upload, merge, download                         the exchange: there, at the averager, back

The time of an update at the averager is measured; the rest of an exchange is divided between
upload and download by their bytes. Exchanges without rounds are separate traces.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from geo_ray.telemetry.events import Event

Attribute: TypeAlias = str | int | float | bool

_MOST_OPEN: Final = 16  # rounds for which not all regions have reported


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span of a trace.

    Attributes:
        trace: name of the trace; the same events give the same name.
        path: name inside the trace; the root has one part, a child appends one part to its
            parent's.
        start_s: start, in seconds of the run.
        end_s: end, not before the start.
        attributes: attributes of the span.
    """

    trace: str
    path: tuple[str, ...]
    start_s: float
    end_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)

    @property
    def trace_id(self) -> int:
        """Id of the trace, 128 bits."""
        return int.from_bytes(_digest(self.trace)[:16], "big")

    @property
    def span_id(self) -> int:
        """Id of the span, 64 bits."""
        return _span_id(self.trace, self.path)

    @property
    def parent_id(self) -> int | None:
        """Id of the parent, 64 bits; None for the root."""
        return _span_id(self.trace, self.path[:-1]) if len(self.path) > 1 else None


@dataclass(slots=True)
class _Work:
    """Steps of a region since its previous exchange."""

    start_s: float | None = None
    end_s: float = 0.0
    steps: int = 0
    compute_s: float = 0.0

    def add(self, event: Event) -> None:
        start_s = event["start_s"]
        if start_s is None:
            return
        compute_s = event["compute_s"] or 0.0
        self.start_s = start_s if self.start_s is None else min(self.start_s, start_s)
        self.end_s = max(self.end_s, min(start_s + compute_s, event.t_s))
        self.steps += 1
        self.compute_s += compute_s


class SpanFold:
    """Folds events into spans, given when their trace is complete."""

    def __init__(self) -> None:
        self._run, self._strategy, self._began_s = "", "", 0.0
        self._present: set[str] = set()
        self._work: dict[str, _Work] = {}
        self._open: dict[int, list[tuple[_Work, Event]]] = {}
        self._given: deque[int] = deque(maxlen=1000)  # rounds of this run segment

    def feed(self, event: Event) -> list[SpanRecord]:
        """Process the next event; give the spans of traces that it completes."""
        match event.kind:
            case "run_started":
                done = self.rest()
                self._run, self._strategy = event["run"], event["strategy"]
                self._began_s, self._present = event.t_s, set(event["regions"])
                self._work.clear()
                self._given.clear()
                return done
            case "step":
                self._work.setdefault(event["region"], _Work()).add(event)
            case "exchange" if event["start_s"] is not None:
                return self._exchanged(event)
            case "region_joined":
                self._present.add(event["region"])
            case "region_lost" | "region_drained":
                self._present.discard(event["region"])
                self._work.pop(event["region"], None)
                return self._complete()
            case "run_finished" | "run_failed":
                return self.rest()
        return []

    def rest(self) -> list[SpanRecord]:
        """Give the traces for which not all regions have reported."""
        return [span for number in sorted(self._open) for span in self._round(number)]

    def _exchanged(self, event: Event) -> list[SpanRecord]:
        work = self._work.pop(event["region"], _Work())
        number = event["round"]
        if number is None:
            trace = f"{self._trace}/exchange/{event['region']}/{event['seq']}"
            name = f"exchange {event['seq']}"
            return self._spans(trace, name, [(work, event)], {"geo_ray.seq": event["seq"]})
        self._open.setdefault(number, []).append((work, event))
        return self._complete()

    def _complete(self) -> list[SpanRecord]:
        done = []
        for number in sorted(self._open):
            heard = {event["region"] for _, event in self._open[number]}
            if heard >= self._present or len(self._open) > _MOST_OPEN:
                done += self._round(number)
        return done

    def _round(self, number: int) -> list[SpanRecord]:
        parts = self._open.pop(number)
        name, times = f"round {number}", self._given.count(number)
        if times:  # a region that was not waited for has merged it later
            name += f", {times + 1}"
        self._given.append(number)
        trace = f"{self._trace}/{name}"
        return self._spans(trace, name, parts, {"geo_ray.round": number})

    @property
    def _trace(self) -> str:
        return f"{self._run}/{self._began_s!r}"

    def _spans(
        self,
        trace: str,
        name: str,
        parts: list[tuple[_Work, Event]],
        attributes: dict[str, Attribute],
    ) -> list[SpanRecord]:
        spans = [span for work, event in parts for span in _region_spans(trace, name, work, event)]
        start_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
        values: dict[str, Attribute] = {
            "geo_ray.run": self._run,
            "geo_ray.strategy": self._strategy,
            "geo_ray.regions": len(parts),
            **attributes,
        }
        return [SpanRecord(trace, (name,), start_s, end_s, values), *spans]


def _region_spans(trace: str, name: str, work: _Work, event: Event) -> list[SpanRecord]:
    region, sent_s, end_s = event["region"], event.number("start_s"), event.t_s
    sent_s = min(sent_s, end_s)
    start_s = sent_s if work.start_s is None else min(work.start_s, sent_s)
    values: dict[str, Attribute] = {
        "geo_ray.region": region,
        "geo_ray.bytes_sent": event["bytes_sent"],
        "geo_ray.bytes_received": event["bytes_received"],
        "geo_ray.blocking": event["blocking"],
    }
    path = (name, region)
    spans = [SpanRecord(trace, path, start_s, end_s, values)]
    if work.start_s is not None:
        computed: dict[str, Attribute] = {
            "geo_ray.steps": work.steps,
            "geo_ray.compute_s": work.compute_s,
        }
        from_s = min(work.start_s, end_s)  # clocks of two machines need not agree
        until_s = min(max(work.end_s, from_s), end_s)
        spans.append(SpanRecord(trace, (*path, "compute"), from_s, until_s, computed))
    if event["blocking"]:
        spans.append(SpanRecord(trace, (*path, "wait"), sent_s, end_s))
    held_s = min(event.fields.get("held_s") or 0.0, end_s - sent_s)
    rest_s = end_s - sent_s - held_s
    both = event["bytes_sent"] + event["bytes_received"]
    up_s = rest_s * (event["bytes_sent"] / both if both else 0.5)
    divided: dict[str, Attribute] = {"geo_ray.divided": "by bytes"}
    there_s = sent_s + up_s
    spans += [
        SpanRecord(trace, (*path, "upload"), sent_s, there_s, divided),
        SpanRecord(trace, (*path, "merge"), there_s, there_s + held_s),
        SpanRecord(trace, (*path, "download"), there_s + held_s, end_s, divided),
    ]
    return spans


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _span_id(trace: str, path: tuple[str, ...]) -> int:
    return int.from_bytes(_digest("\0".join((trace, *path)))[:8], "big")
