"""What tells another program of a run: the protocol, and what it must know beside the events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from geo_ray.observe.events.schema import Event


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """The run that is told of.

    Attributes:
        run_dir: its directory.
        base_dir: where relative paths of its configuration start.
        origin_unix_s: time of day of its second 0.
    """

    run_dir: Path
    base_dir: Path
    origin_unix_s: float


class Exporter(Protocol):
    """Given the events of one run in order, by one thread. May take its time, and may raise."""

    def feed(self, event: Event) -> None:
        """Take the next event."""

    def flush(self) -> None:
        """Hand on what was held back; called when nothing has come for a while."""

    def close(self) -> None:
        """Hand on all, and end; nothing is called after it."""
