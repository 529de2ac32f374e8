"""The pieces in which a run's event log lies in a bucket, and what they are together. Pure.

    events/000002-000000000000048213-000000000000051100-9f86d081884c7d65.jsonl

A piece says which holder of the run's lease wrote it, from which byte of the log to which, and how
its SHA-256 begins. Rule: a holder goes on where the log stood when it took the run over. What an
earlier one wrote beyond that came too late and counts no more. Of several pieces that begin at one
byte the longest counts: short ones are put together now and then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NAME = re.compile(r"(\d{6})-(\d{18})-(\d{18})-([0-9a-f]{16})\.jsonl")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the log.

    Attributes:
        epoch: of the lease of who wrote it.
        start: its first byte.
        end: the byte behind its last.
        digest: how the SHA-256 of the whole piece begins.
    """

    epoch: int
    start: int
    end: int
    digest: str

    @property
    def name(self) -> str:
        """Of its object."""
        return f"{self.epoch:06d}-{self.start:018d}-{self.end:018d}-{self.digest}.jsonl"


def segment_named(name: str) -> Segment | None:
    """The piece that an object is; None if it is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    epoch, start, end, digest = found.groups()
    return Segment(int(epoch), int(start), int(end), digest)


def first_bytes(segments: Iterable[Segment]) -> dict[int, int]:
    """Where each holder went on, by its epoch."""
    firsts: dict[int, int] = {}
    for each in segments:
        firsts[each.epoch] = min(each.start, firsts.get(each.epoch, each.start))
    return firsts


def chain(segments: Iterable[Segment]) -> list[tuple[Segment, int]]:
    """The pieces that make up the log, in order, each with the byte at which it stops to count."""
    by_epoch: dict[int, dict[int, Segment]] = {}
    for each in segments:
        longest = by_epoch.setdefault(each.epoch, {})
        if each.start not in longest or longest[each.start].end < each.end:
            longest[each.start] = each
    found: list[tuple[Segment, int]] = []
    for epoch in sorted(by_epoch):
        own: Mapping[int, Segment] = by_epoch[epoch]
        at = min(own)
        if at > length_of(found):
            break  # something before it is missing
        found = [(each, min(stop, at)) for each, stop in found if each.start < at]
        while at in own:
            found.append((own[at], own[at].end))
            at = own[at].end
    return found


def length_of(pieces: list[tuple[Segment, int]]) -> int:
    """Bytes of the log."""
    return pieces[-1][1] if pieces else 0
