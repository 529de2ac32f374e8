"""Measurements of links: passive estimation, records, and the link table.

`LinkEstimator` estimates a link from traffic that passes anyway. Samples age: a sample loses half
its weight in ``half_life_s``, and extremes are dropped after ``window_s``. `LinkTable` is the JSON
file that the planner, the overlay and codecs read; a pair that was not measured has no record,
and `LinkTable.get` raises an error that names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from geo_ray.base.errors import ConfigError, LinkUnknownError, RunDirectoryError
from geo_ray.base.files import write_atomic
from geo_ray.base.load import load_json
from geo_ray.base.model import StrictModel
from geo_ray.transport.emulation import LinkSpec

_MEMORY: Final = 128  # samples behind a spread
_RTT_GAIN: Final = 0.125  # RFC 6298's weight of a new round trip


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """The estimate of one direction at one time; None means not known.

    Attributes:
        goodput_mbps: mean while the sender had more to send, in 10^6 bit/s.
        goodput_peak_mbps: the highest recent goodput, also while the sender had little to send.
        goodput_mad_mbps: median absolute deviation of the samples.
        rtt_s: smoothed round trip, queueing included.
        rtt_min_s: the shortest recent round trip: the path without queues.
        rtt_mad_s: median absolute deviation of round trips.
        loss: share of segments that were sent again.
        samples: number of goodput samples so far.
        weight_s: seconds of sending behind ``goodput_mbps``, old ones counted as less.
        age_s: seconds since the last goodput sample.
    """

    goodput_mbps: float | None
    goodput_peak_mbps: float | None
    goodput_mad_mbps: float | None
    rtt_s: float | None
    rtt_min_s: float | None
    rtt_mad_s: float | None
    loss: float | None
    samples: int
    weight_s: float
    age_s: float | None


class LinkEstimator:
    """Estimates one direction of one pair of regions. Not locked: calls must not overlap.

    Args:
        half_life_s: time after which a sample counts half.
        window_s: how long extremes (peak, shortest round trip) count.
        sample_s: shortest time of sending that makes a sample; at least a round trip is taken,
            since acknowledgements come in lumps.
        min_segments: fewest segments from which a loss is computed.
    """

    def __init__(
        self,
        half_life_s: float = 30.0,
        window_s: float = 300.0,
        sample_s: float = 0.25,
        min_segments: int = 200,
    ) -> None:
        self._half_life_s = half_life_s
        self._sample_s = sample_s
        self._min_segments = min_segments
        self._rates: deque[float] = deque(maxlen=_MEMORY)
        self._rtts: deque[float] = deque(maxlen=_MEMORY)
        self._peak_mbps = _Extreme(window_s, 1)
        self._rtt_min_s = _Extreme(window_s, -1)
        self._goodput = _AgeingRatio(half_life_s)  # 10^6 bits over seconds
        self._segments = _AgeingRatio(half_life_s)
        self._loss: float | None = None
        self._rtt_s: float | None = None
        self._rtt_at_s = 0.0
        self._last_s: float | None = None
        self._taken_s: float | None = None
        self._open = _AgeingRatio(half_life_s)  # the sample that is still too short
        self._samples = 0

    def on_delivered(self, now_s: float, delivered_bytes: int, inflight_limited: bool) -> None:
        """Record newly acknowledged bytes.

        Args:
            now_s: of a clock that never goes back.
            delivered_bytes: acknowledged since the last call; 0 is fine.
            inflight_limited: whether the sender had more to send than the link took, all the time
                since the last call. False for the first acknowledgement after a pause: its time
                contains a round trip and the pause.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or now_s < last_s:
            return
        gap_s = now_s - last_s
        if inflight_limited:
            self._open.add(now_s, delivered_bytes * 8e-6, gap_s)
            busy_s = self._open.weight(now_s)
            rate_mbps = self._open.value()
            if rate_mbps is not None and busy_s >= self._shortest_s():
                self._take(now_s, rate_mbps, busy_s)
                self._open = _AgeingRatio(self._half_life_s)
        elif gap_s >= self._shortest_s():
            # The link carries at least that much: only a higher value than the estimate counts.
            floor_mbps = delivered_bytes * 8e-6 / gap_s
            self._peak_mbps.add(now_s, floor_mbps)
            known_mbps = self._goodput.value()
            if known_mbps is not None and floor_mbps > known_mbps:
                self._take(now_s, floor_mbps, self._sample_s)

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Record a round trip, measured by a heartbeat or by the kernel."""
        if rtt_s <= 0:
            return
        self._rtts.append(rtt_s)
        self._rtt_min_s.add(now_s, rtt_s)
        old_s = rtt_s if self._rtt_s is None else self._rtt_s
        age_s = max(0.0, now_s - self._rtt_at_s)
        gain = max(_RTT_GAIN, 1.0 - 0.5 ** (age_s / self._half_life_s))
        self._rtt_s = old_s + gain * (rtt_s - old_s)
        self._rtt_at_s = now_s

    def on_segments(self, now_s: float, sent: int, retransmitted: int) -> None:
        """Record the segments sent since the last call; see `TcpInfo.segments_since`."""
        if sent > 0:
            self._segments.add(now_s, float(min(retransmitted, sent)), float(sent))
            if self._segments.weight(now_s) >= self._min_segments:
                self._loss = self._segments.value()

    def snapshot(self, now_s: float) -> LinkEstimate:
        """Return the present estimate."""
        taken_s = self._taken_s
        return LinkEstimate(
            goodput_mbps=self._goodput.value(),
            goodput_peak_mbps=self._peak_mbps.value(now_s),
            goodput_mad_mbps=spread(self._rates),
            rtt_s=self._rtt_s,
            rtt_min_s=self._rtt_min_s.value(now_s),
            rtt_mad_s=spread(self._rtts),
            loss=self._loss,
            samples=self._samples,
            weight_s=self._goodput.weight(now_s),
            age_s=None if taken_s is None else max(0.0, now_s - taken_s),
        )

    def _take(self, now_s: float, rate_mbps: float, weight_s: float) -> None:
        self._goodput.add(now_s, rate_mbps * weight_s, weight_s)
        self._peak_mbps.add(now_s, rate_mbps)
        self._rates.append(rate_mbps)
        self._taken_s = now_s
        self._samples += 1

    def _shortest_s(self) -> float:
        return max(self._sample_s, self._rtt_s or 0.0)


class _AgeingRatio:
    """Sum of parts over sum of wholes, with less weight for older ones."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._part = 0.0
        self._whole = 0.0
        self._at_s = 0.0

    def add(self, now_s: float, part: float, whole: float) -> None:
        fade = self._fade(now_s)
        self._part = self._part * fade + part
        self._whole = self._whole * fade + whole
        self._at_s = max(now_s, self._at_s)

    def value(self) -> float | None:
        return self._part / self._whole if self._whole > 0 else None

    def weight(self, now_s: float) -> float:
        return self._whole * self._fade(now_s)

    def _fade(self, now_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - self._at_s) / self._half_life_s))


class _Extreme:
    """The largest (sign 1) or smallest (sign -1) value of the last ``window_s`` seconds.

    Only values that no later value exceeds are stored, so a value costs a step or two.
    """

    def __init__(self, window_s: float, sign: int) -> None:
        self._window_s = window_s
        self._sign = sign
        self._extremes: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        while self._extremes and self._extremes[-1][1] * self._sign <= value * self._sign:
            self._extremes.pop()
        self._extremes.append((now_s, value))
        self._forget(now_s)

    def value(self, now_s: float) -> float | None:
        """None if there was no value for that long."""
        self._forget(now_s)
        return self._extremes[0][1] if self._extremes else None

    def _forget(self, now_s: float) -> None:
        while self._extremes and now_s - self._extremes[0][0] > self._window_s:
            self._extremes.popleft()


def spread(values: Sequence[float]) -> float | None:
    """Return the median absolute deviation from the median; None for no values."""
    if not values:
        return None
    middle = median(values)
    return median(abs(value - middle) for value in values)


class LinkRecord(StrictModel):
    """One direction of one pair of regions. Spreads are median absolute deviations."""

    src: str = Field(min_length=1, description="region that sends")
    dst: str = Field(min_length=1, description="region that receives")
    goodput_mbps: float = Field(ge=0, description="10^6 bit/s of payload while there was more")
    goodput_mad_mbps: float = Field(0.0, ge=0, description="spread of the samples")
    rtt_s: float = Field(ge=0, description="round trip of the pair while little was under way")
    rtt_mad_s: float = Field(0.0, ge=0, description="spread of the samples")
    rtt_p99_s: float | None = Field(None, ge=0, description="99th percentile of the samples")
    rtt_loaded_s: float | None = Field(None, ge=0, description="round trip under full load")
    rtt_loaded_p99_s: float | None = Field(None, ge=0, description="its 99th percentile")
    loss: float | None = Field(None, ge=0, le=1, description="share of packets; null: not known")
    loss_mad: float | None = Field(None, ge=0, le=1, description="spread of the samples")
    samples: float = Field(gt=0, description="goodput samples; aged ones count as less than one")
    measured_at_unix_s: float = Field(ge=0, description="time of day of the newest sample")
    source: Literal["probe", "passive", "emulated", "merged"] = Field(
        "probe", description="how it was obtained"
    )

    @model_validator(mode="after")
    def _is_a_link(self) -> Self:
        if self.src == self.dst:
            raise ValueError(f"a link leads to another region, not from {self.src} to itself")
        return self

    @property
    def pair(self) -> tuple[str, str]:
        """(source, destination)."""
        return self.src, self.dst


def record_of(src: str, dst: str, estimate: LinkEstimate, now_unix_s: float) -> LinkRecord | None:
    """Return the record of a passive estimate; None while goodput or round trip are not known."""
    goodput_mbps, rtt_s, age_s = estimate.goodput_mbps, estimate.rtt_min_s, estimate.age_s
    if goodput_mbps is None or rtt_s is None or age_s is None:
        return None
    return LinkRecord(
        src=src,
        dst=dst,
        goodput_mbps=goodput_mbps,
        goodput_mad_mbps=estimate.goodput_mad_mbps or 0.0,
        rtt_s=rtt_s,
        rtt_mad_s=estimate.rtt_mad_s or 0.0,
        rtt_loaded_s=estimate.rtt_s,
        loss=estimate.loss,
        samples=estimate.samples,
        measured_at_unix_s=max(0.0, now_unix_s - age_s),
        source="passive",
    )


def merge_records(one: LinkRecord, two: LinkRecord, half_life_s: float) -> LinkRecord:
    """Merge two records of one pair, weighted by samples and age; see `LinkTable.merge`."""
    old, new = sorted((one, two), key=attrgetter("measured_at_unix_s"))
    age_s = new.measured_at_unix_s - old.measured_at_unix_s
    old_samples = old.samples * float(0.5 ** (age_s / half_life_s))
    part = old_samples / (old_samples + new.samples)

    def mean(a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return b if a is None else a
        return part * a + (1 - part) * b

    def spread(a: float | None, a_mad: float | None, b: float | None, b_mad: float | None) -> float:
        inside = mean(a_mad, b_mad) or 0.0
        between = 0.0 if a is None or b is None else 2 * part * (1 - part) * abs(a - b)
        return inside + between

    loss = mean(old.loss, new.loss)
    mads = old.loss_mad, new.loss_mad
    return LinkRecord(
        src=new.src,
        dst=new.dst,
        goodput_mbps=mean(old.goodput_mbps, new.goodput_mbps) or 0.0,
        goodput_mad_mbps=spread(
            old.goodput_mbps, old.goodput_mad_mbps, new.goodput_mbps, new.goodput_mad_mbps
        ),
        rtt_s=mean(old.rtt_s, new.rtt_s) or 0.0,
        rtt_mad_s=spread(old.rtt_s, old.rtt_mad_s, new.rtt_s, new.rtt_mad_s),
        rtt_p99_s=mean(old.rtt_p99_s, new.rtt_p99_s),
        rtt_loaded_s=mean(old.rtt_loaded_s, new.rtt_loaded_s),
        rtt_loaded_p99_s=mean(old.rtt_loaded_p99_s, new.rtt_loaded_p99_s),
        loss=loss,
        loss_mad=None if loss is None else min(1.0, spread(old.loss, mads[0], new.loss, mads[1])),
        samples=old_samples + new.samples,
        measured_at_unix_s=new.measured_at_unix_s,
        source=new.source if new.source == old.source else "merged",
    )


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
        """Merge both tables.

        Records of the same pair are averaged, weighted by samples, of which the older side loses
        half per ``half_life_s`` between the two. The difference of the two sides counts as spread.
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
    fix = "Correct the named field, or measure again with `geo-ray probe`."
    return load_json(path, LinkTable, "link table", partial(ConfigError, fix=fix))
