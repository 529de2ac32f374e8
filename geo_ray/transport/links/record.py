"""The measurements of one direction of one pair of regions."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from geo_ray.config.base import StrictModel
from geo_ray.transport.flow.estimator import LinkEstimate


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
    old, new = sorted((one, two), key=lambda record: record.measured_at_unix_s)
    age_s = new.measured_at_unix_s - old.measured_at_unix_s
    old_samples = old.samples * float(0.5 ** (age_s / half_life_s))
    part = old_samples / (old_samples + new.samples)

    def mean(a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return b if a is None else a
        return part * a + (1 - part) * b

    def spread(a: float | None, a_mad: float | None, b: float | None, b_mad: float | None) -> float:
        inside = mean(a_mad, b_mad) or 0.0
        apart = 0.0 if a is None or b is None else 2 * part * (1 - part) * abs(a - b)
        return inside + apart

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
