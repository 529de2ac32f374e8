"""Writes a region's parts of checkpoints, and copies of its state for newcomers, on other threads.

Disks are slow, and whoever takes a copy has an exchange to carry on, or a controller that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.actors.parts import HeldShard, typed
from geo_ray.runtime.actors.remote_shard import RemoteShard
from geo_ray.training.server.effects import HandOver, Snapshot
from geo_ray.util.together import Together

Written = Snapshot | HandOver
"""What is copied at once, and written when there is time."""


class RegionWriter:
    """See the module's docstring.

    Args:
        held: the primary shard.
        others: the region's other shards, in order, on connections of their own: what writes their
            parts holds up nothing else.
        event_buffer: takes what has become of it.
    """

    def __init__(
        self, held: HeldShard, others: Sequence[RemoteShard], event_buffer: EventBuffer
    ) -> None:
        self._held = held
        self._others = others
        self._event_buffer = event_buffer
        self._together = Together(1 + len(others), "write-parts")

    def write_apart(self, copies: Sequence[Written]) -> None:
        """Begin to write; events tell of the parts, or why there are none."""
        if copies:
            threading.Thread(target=self._write, args=(tuple(copies),), daemon=True).start()

    def close(self) -> None:
        """End its threads."""
        self._together.close()

    def _write(self, copies: Sequence[Written]) -> None:
        for copy in copies:
            is_handed = isinstance(copy, HandOver)
            snapshot = copy.snapshot if isinstance(copy, HandOver) else copy
            try:
                parts = self._write_parts(snapshot)
            except Exception as error:  # whatever it is: the controller waits for the part
                kind = "hand_over_failed" if is_handed else "part_failed"
                self._event_buffer.add(kind, id=snapshot.id, error=typed(error))
                continue
            about = {"id": snapshot.id, "step": snapshot.step, "parts": parts}
            if is_handed:
                self._event_buffer.add("handed", **about, round=snapshot.round)
            else:
                self._event_buffer.add("parts", **about)

    def _write_parts(self, snapshot: Snapshot) -> list[PartInfo]:
        own = partial(self._held.write_primary_part, snapshot)
        others = [partial(each.ask, HeldShard.write_part, snapshot.id) for each in self._others]
        return self._together([own, *others])
