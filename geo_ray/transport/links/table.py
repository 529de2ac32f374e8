"""The table of links between regions: one JSON file that planner, overlay and codecs read.

A pair that was not measured has no record; `LinkTable.get` raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from geo_ray.config.base import StrictModel
from geo_ray.config.json_file import load_json
from geo_ray.errors import ConfigError, LinkUnknownError, RunDirectoryError
from geo_ray.transport.emulation.link_model import LinkSpec
from geo_ray.transport.links.record import LinkRecord, merge_records
from geo_ray.util.atomic_file import write_atomic


class LinkTable(StrictModel):
    """Records by ordered pair of regions."""

    version: Literal[1] = 1
    links: tuple[LinkRecord, ...] = ()

    @model_validator(mode="after")
    def _each_pair_once(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for record in self.links:
            if record.pair in seen:
                raise ValueError(f"{record.src} to {record.dst} is there more than once")
            seen.add(record.pair)
        return self

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], LinkRecord]:
        return {record.pair: record for record in self.links}

    def get(self, src: str, dst: str) -> LinkRecord:
        """The record of a pair.

        Raises:
            LinkUnknownError: the pair, which the message names, was not measured.
        """
        record = self.find(src, dst)
        if record is None:
            raise LinkUnknownError(f"the link from region '{src}' to region '{dst}' is not known")
        return record

    def find(self, src: str, dst: str) -> LinkRecord | None:
        """The record of a pair, or None."""
        return self._by_pair.get((src, dst))

    @property
    def regions(self) -> list[str]:
        """All regions that a record names, sorted."""
        return sorted({name for record in self.links for name in record.pair})

    def holes(self, regions: Iterable[str] | None = None) -> list[tuple[str, str]]:
        """Ordered pairs without a record.

        Args:
            regions: the regions of interest; None takes those of the table.
        """
        names = sorted(set(self.regions if regions is None else regions))
        pairs = [(src, dst) for src in names for dst in names if src != dst]
        return [pair for pair in pairs if pair not in self._by_pair]

    def with_records(self, records: Iterable[LinkRecord]) -> LinkTable:
        """Return the table with ``records`` in place of earlier ones for the same pairs."""
        merged = self._by_pair | {record.pair: record for record in records}
        return LinkTable(links=tuple(merged[pair] for pair in sorted(merged)))

    def fresh(self, now_unix_s: float, max_age_s: float) -> LinkTable:
        """Return only the records that were measured within ``max_age_s``."""
        young = [r for r in self.links if now_unix_s - r.measured_at_unix_s <= max_age_s]
        return LinkTable(links=tuple(young))

    def merge(self, other: LinkTable, half_life_s: float) -> LinkTable:
        """Both tables in one.

        A pair that both have is averaged, weighted by samples, of which the older side loses half
        per ``half_life_s`` that lies between the two. The difference of the two sides counts as
        spread.
        """
        merged = other._by_pair | self._by_pair
        for pair in self._by_pair.keys() & other._by_pair.keys():
            merged[pair] = merge_records(self._by_pair[pair], other._by_pair[pair], half_life_s)
        return LinkTable(links=tuple(merged[pair] for pair in sorted(merged)))


def table_of(specs: Mapping[tuple[str, str], LinkSpec], now_unix_s: float = 0.0) -> LinkTable:
    """Return the table that a perfect measurement of emulated links would give.

    Directions without a rate are left out, since they have no goodput.
    """
    return LinkTable(
        links=tuple(
            LinkRecord(
                src=src,
                dst=dst,
                goodput_mbps=spec.rate_mbps,
                rtt_s=spec.delay_s + specs.get((dst, src), spec).delay_s,
                loss=spec.loss,
                samples=1,
                measured_at_unix_s=now_unix_s,
                source="emulated",
            )
            for (src, dst), spec in sorted(specs.items())
            if spec.rate_mbps is not None
        )
    )


def save_links(table: LinkTable, path: Path) -> None:
    """Write the table atomically.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        write_atomic(path, (table.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be written: {error.strerror or error}",
            fix="Free space, or write the link table elsewhere.",
        ) from error


def load_links(path: Path) -> LinkTable:
    """Read a table.

    Raises:
        ConfigError: the file is missing or not valid; the message says what is wrong.
    """
    fix = "Correct what is named, or measure anew with `geo-ray probe`."
    return load_json(path, LinkTable, "link table", partial(ConfigError, fix=fix))
