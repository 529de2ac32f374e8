"""What pieces of a log in a bucket are together: against a log that is kept whole."""

from __future__ import annotations

from random import Random

import pytest

from geo_ray.runs.remote import Segment, chain, length_of, segment_named

DIGEST = "0123456789abcdef"


class Bucket:
    """Drivers that take a run over from each other, and write late; and the log as it is."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.there: dict[Segment, bytes] = {}
        self.log = b""
        self.late: list[tuple[Segment, bytes]] = []
        self.token, self.own, self.base = 1, list[Segment](), 0

    def put(self, token: int, start: int, data: bytes) -> Segment:
        segment = Segment(token, start, start + len(data), DIGEST)
        self.there[segment] = data
        return segment

    def write(self) -> None:
        data = bytes(self.random.randrange(256) for _ in range(self.random.randint(1, 9)))
        if self.random.random() < 0.1:  # it stands still with that, and is overtaken
            stale = Segment(self.token, len(self.log), len(self.log) + len(data), DIGEST)
            self.late.append((stale, data))
            self.overtake()
            return
        self.own.append(self.put(self.token, len(self.log), data))
        self.log += data

    def overtake(self) -> None:
        self.token, self.own = self.token + 1, []
        data = b"taken over"
        self.own.append(self.put(self.token, len(self.log), data))
        self.log += data

    def put_together(self) -> None:
        segments, self.own = self.own, []
        if len(segments) > 1:
            self.put(self.token, segments[0].start, self.log[segments[0].start : segments[-1].end])
            for each in segments:
                if self.random.random() < 0.8:  # it may die on the way
                    del self.there[each]

    def read(self) -> bytes:
        pieces, found = chain(self.random.sample([*self.there], len(self.there))), b""
        for segment, stop in pieces:
            found += self.there[segment][: stop - segment.start]
        assert len(found) == length_of(pieces)
        return found


@pytest.mark.parametrize("seed", range(200))
def test_the_log_is_what_holders_wrote_in_turn(seed: int) -> None:
    bucket = Bucket(seed)
    for _ in range(40):
        bucket.random.choice((bucket.write, bucket.write, bucket.put_together))()
        for segment, data in bucket.late:
            bucket.there[segment] = data  # it arrives after all
        bucket.late.clear()
        assert bucket.read() == bucket.log


def test_a_name_says_all_of_a_piece() -> None:
    segment = Segment(3, 17, 99, DIGEST)
    assert segment_named(segment.name) == segment
    for name in ("", "x.jsonl", segment.name + "x", segment.name.replace("-", "_")):
        assert segment_named(name) is None


def test_a_log_whose_beginning_is_missing_ends_there() -> None:
    first, third = Segment(1, 0, 10, DIGEST), Segment(1, 20, 30, DIGEST)
    assert chain([third, first]) == [(first, 10)]
    assert chain([Segment(2, 11, 12, DIGEST), first]) == [(first, 10)]
    assert chain([]) == [] and length_of([]) == 0
