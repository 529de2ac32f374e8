"""The plan of a probe, its message kinds, field checks, and the order in which links are probed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import Field

from geo_ray.base.errors import FrameError
from geo_ray.base.model import StrictModel
from geo_ray.transport.wire.fields import Meta

TRAFFIC: Final = "probe"  # traffic class of a probe's bytes

PING: Final = "probe.ping"
PONG: Final = "probe.pong"
BEGIN: Final = "probe.begin"
DATA_KIND: Final = "probe.data"
GOT: Final = "probe.got"
END: Final = "probe.end"
ASK: Final = "probe.ask"
RESULT: Final = "probe.result"
BUSY: Final = "probe.busy"
TRAIN: Final = "probe.train"
WAY: Final = "probe.way"
TRAIN_END: Final = "probe.train_end"
TRAIN_ASK: Final = "probe.train_ask"
TRAIN_RESULT: Final = "probe.train_result"
PLEASE: Final = "probe.please"
REPORT: Final = "probe.report"


class ProbePlan(StrictModel):
    """The settings of a measurement of one direction."""

    duration_s: float = Field(
        5.0, gt=0, le=600, description="counted part of the transfer; at least 20 round trips"
    )
    ramp_s: float | None = Field(
        None, ge=0, le=600, description="left out before it; null: 1 s, at least 12 round trips"
    )
    pings: int = Field(40, ge=1, le=1000, description="round trips on the idle link")
    udp_s: float = Field(2.0, ge=0, le=60, description="length of the UDP train; 0: none")
    timeout_s: float = Field(
        60.0, gt=0, le=3600, description="longest wait for one answer of the other end"
    )

    def counted_for(self, rtt_s: float) -> float:
        """Return the seconds that count: more on a long link, where loss delays what follows."""
        return max(self.duration_s, 20 * rtt_s)

    def ramp_for(self, rtt_s: float) -> float:
        """Return the seconds that do not count on a link with that round trip."""
        return max(1.0, 12 * rtt_s) if self.ramp_s is None else self.ramp_s


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """The progress of a probe.

    Attributes:
        phase: "idle", "round trips", "goodput", "loss", or "receiving" for the other end's
            measurement.
        fraction: completed share of the phase, 0 to 1.
        rate_mbps: present rate, if it is known.
    """

    phase: str = "idle"
    fraction: float = 0.0
    rate_mbps: float | None = None


def real(meta: Meta, name: str, low: float, high: float) -> float:
    """Field ``name`` of a received meta as a number between ``low`` and ``high``.

    Raises:
        FrameError: it has another type or range.
    """
    value = meta.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)  # which NaN is not: no comparison holds for it
    raise FrameError(f"a probe's {name!r} is {value!r:.100}")


def whole(meta: Meta, name: str, low: int, high: int) -> int:
    """Field ``name`` of a received meta as an int between ``low`` and ``high``.

    Raises:
        FrameError: it has another type or range.
    """
    value = meta.get(name)
    if type(value) is not int or not low <= value <= high:
        raise FrameError(f"a probe's {name!r} is {value!r:.100}")
    return value


Pair: TypeAlias = tuple[str, str]


def probe_rounds(regions: Sequence[str], *, disjoint: bool) -> list[list[Pair]]:
    """Return every ordered pair of regions, in rounds of pairs that are probed at the same time.

    Args:
        regions: at least two, all different.
        disjoint: let pairs that share no region be probed together: n regions then need about 2n
            rounds instead of n * (n - 1). Links that share a cable disturb each other nevertheless.

    Returns:
        Rounds in order; one pair each unless ``disjoint``.
    """
    if not disjoint:
        pairs = [(a, b) for i, a in enumerate(regions) for b in regions[i + 1 :]]
        return [[pair] for a, b in pairs for pair in ((a, b), (b, a))]
    rounds = []
    circle: list[str | None] = [*regions, *([None] if len(regions) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(a, b) for a, b in facing if a is not None and b is not None]
        rounds += [met, [(b, a) for a, b in met]]
        circle = [circle[0], circle[-1], *circle[1:-1]]  # the first stays, the others move on
    return rounds
