"""What bridges learn about their links while training, in the run's `links.json`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from geo_ray.errors import GeoRayError
from geo_ray.transport.flow.estimator import LinkEstimate
from geo_ray.transport.links.record import record_of
from geo_ray.transport.links.table import LinkTable, load_links, save_links

_LOGGER = logging.getLogger(__name__)
_EVERY_S: Final = 1.0


class LinkNotes:
    """Keeps the table of one run.

    Args:
        path: the file; what a run that is resumed had learned is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = _known(path)
        self._saving = threading.Thread()
        self._heard_s = -_EVERY_S
        self._newest: dict[tuple[str, str], Mapping[str, int]] = {}
        self._before: dict[tuple[str, str], Counter[str]] = {}  # of bridges that are gone
        self._told: dict[tuple[str, str], Mapping[str, int]] = {}  # by a driver that is gone

    def hear(
        self,
        told: Mapping[str, Mapping[str, Any]],
        emit: Callable[..., None],
        *,
        force: bool = False,
    ) -> None:
        """Take in what bridges tell of their links, and write it down, every second at most.

        Args:
            told: `PeerStats` by peer, by region.
            emit: takes events.
            force: now, and wait until it is written.
        """
        now_s = time.monotonic()
        if not force and now_s - self._heard_s < _EVERY_S:
            return
        self._heard_s = now_s
        for region, links in told.items():
            for peer, link in links.items():
                by_class = {k: int(v) for k, v in link["bytes_out"].items()}
                emit("wan", src=region, dst=peer, bytes_by_class=self._sum(region, peer, by_class))
            self.note(region, links)
        self.save(wait=force)

    def _sum(self, region: str, peer: str, sent: Mapping[str, int]) -> dict[str, int]:
        """Bytes of a link over all bridges of a region so far: one that is new counts from 0."""
        pair = region, peer
        newest, before = self._newest.get(pair, {}), self._before.setdefault(pair, Counter())
        for name, count in self._told.pop(pair, {}).items():  # more than it sent, others did
            before[name] += max(0, count - sent.get(name, 0))
        if any(sent.get(name, 0) < count for name, count in newest.items()):
            before.update(newest)
        self._newest[pair] = sent
        return dict(sorted((before + Counter(sent)).items()))

    def go_on(self, sums: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Count on from what a driver before this one told, by link and class."""
        self._told = dict(sums)

    def note(self, region: str, links: Mapping[str, Any]) -> None:
        """Take in what the bridge of ``region`` tells of its links (`PeerStats` by peer)."""
        now_unix_s = time.time()
        found = [
            record_of(region, peer, LinkEstimate(**link["estimate"]), now_unix_s)
            for peer, link in links.items()
        ]
        self._table = self._table.with_records([record for record in found if record is not None])

    def save(self, *, wait: bool = False) -> None:
        """Write the file; a full disk must not end a run for this.

        On a thread: where a checkpoint is being written, the disk takes seconds for any file.

        Args:
            wait: until it is written. Without, it is left for later if the one before is not.
        """
        if wait and self._saving.ident is not None:
            self._saving.join()
        if not self._table.links or self._saving.is_alive():
            return
        self._saving = threading.Thread(target=self._write, args=(self._table,), daemon=True)
        self._saving.start()
        if wait:
            self._saving.join()

    def _write(self, table: LinkTable) -> None:
        try:
            save_links(table, self._path)
        except GeoRayError as error:
            _LOGGER.warning("%s", error)


def _known(path: Path) -> LinkTable:
    if not path.exists():
        return LinkTable()
    try:
        return load_links(path)
    except GeoRayError as error:
        _LOGGER.warning("%s", error)
        return LinkTable()
