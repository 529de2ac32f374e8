"""What came of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_ray.observe.html_view import html_view
from geo_ray.observe.text import bytes_text, counted, duration_text
from geo_ray.program.graph import Program
from geo_ray.program.traffic import EdgeTraffic


@dataclass(frozen=True, slots=True, repr=False)
class ProgramResult:
    """A program that has ended.

    Attributes:
        program: the whole.
        on: threads, processes, ray or virtual.
        values: what each ``run`` returned, by instance.
        seconds: from the first start to the last return, of virtual time on the virtual clock.
        traffic: over each edge.
        restarts: how often instances were made anew; of those that were.
    """

    program: Program
    on: str
    values: Mapping[str, Any]
    seconds: float
    traffic: tuple[EdgeTraffic, ...]
    restarts: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """For JSON, as far as what was returned is."""
        return {
            "program": self.program.name,
            "on": self.on,
            "seconds": self.seconds,
            "values": dict(self.values),
            "restarts": dict(self.restarts),
            "traffic": [
                {
                    "source": each.edge.source,
                    "target": each.edge.target,
                    "source_region": each.edge.source_region,
                    "target_region": each.edge.target_region,
                    "calls": each.calls,
                    "request_bytes": each.request_bytes,
                    "answer_bytes": each.answer_bytes,
                }
                for each in self.traffic
            ],
        }

    def __repr__(self) -> str:
        return (
            f"<ProgramResult {self.program.name}: {duration_text(self.seconds)} ({self.on}), "
            f"{counted(len(self.values), 'instance')}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                each.edge.source,
                each.edge.target,
                f"{each.calls:,}",
                bytes_text(each.request_bytes),
                bytes_text(each.answer_bytes),
            )
            for each in self.traffic
        ]
        return html_view(repr(self)[1:-1], ("from", "to", "calls", "there", "back"), rows)

    def __str__(self) -> str:
        lines = [f"program {self.program.name}: {duration_text(self.seconds)} ({self.on})"]
        for name, value in sorted(self.values.items()):
            lines.append(f"  {name} returned {value!r:.200}")
        for name, count in sorted(self.restarts.items()):
            lines.append(f"  {name} was started anew, {counted(count, 'time')}")
        for each in self.traffic:
            edge = each.edge
            way = f"   [{edge.source_region} => {edge.target_region}]" if edge.crosses else ""
            there, back = bytes_text(each.request_bytes), bytes_text(each.answer_bytes)
            lines.append(
                f"  {edge.source} -> {edge.target}: {counted(each.calls, 'call')}, {there} there, "
                f"{back} back{way}"
            )
        return "\n".join(lines)
