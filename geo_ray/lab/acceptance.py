"""Decides whether figures that were taken in a lab describe its links or the machine.

Idea: a link is known by its round trip. A packet that comes 1 ms late changes a link of 2 ms by
half, and a link of 200 ms by nothing that a protocol could notice.

Rule: with ``bound = max(1 ms, 2 % of the round trip without queues)`` a link is in time if

1. at most 5 % of its packets are late by more than ``bound``, both when the relay takes them
   and when it gives them away; and
2. mean lateness of taking and giving together is at most ``max(1 ms, 1 % of the round trip)``, so
   that both ways together make the round trip at most 2 % longer.

Links of fewer than 100 packets are judged together, each packet against its own link's bounds:
two late packets of ten on an idle link say nothing. Figures are accepted if all links are in time.

The cause of what was held up is the relay itself if its own computing accounts for at least half
of the time by which its rounds began late; otherwise the larger of the two that the kernel counts:
time stolen by the host, and time in the run queue. If these account for less than half of what is
left, the cause is unknown. The cause changes no verdict: late is late.

When: after every run, with the counters of that run only.

Source: the first part is the rule that the lab always had, with the bound made relative; the
second follows from TCP's rate at a given window or loss, which goes with 1 / round trip (Mathis et
al., 1997), so that 2 % of the round trip is at most 2 % of a rate. The numbers are ours. The
standard library only: the relay takes its bounds from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

LEAST_S: Final = 0.001  # below it the relay's own wake-up interval decides
BOUND_SHARE: Final = 0.02
MEAN_SHARE: Final = 0.01
MAX_LATE_SHARE: Final = 0.05
FEW_PACKETS: Final = 100
FEW: Final = "links of few packets"


def late_after_s(round_trip_s: float) -> float:
    """Return by how much a packet of a link may be late before it counts as late."""
    return max(LEAST_S, BOUND_SHARE * round_trip_s)


def mean_bound_s(round_trip_s: float) -> float:
    """Return how late packets of one direction may be on average."""
    return max(LEAST_S, MEAN_SHARE * round_trip_s)


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How late the packets of one direction were.

    Attributes:
        round_trip_s: there and back, without queues.
        taken: packets taken from the sending region.
        taken_late: of these, taken later than the bound.
        taken_late_sum_s: lateness of all of them, in rounds that began late.
        given: packets given to the receiving region.
        given_late: of these, given later than the bound.
        given_late_sum_s: lateness of all of them.
    """

    round_trip_s: float
    taken: int
    taken_late: int
    taken_late_sum_s: float
    given: int
    given_late: int
    given_late_sum_s: float

    @property
    def late_share(self) -> float:
        """The share of packets beyond the bound, taken or given, whichever is larger."""
        return max(_per(self.taken_late, self.taken), _per(self.given_late, self.given))

    @property
    def mean_s(self) -> float:
        """Mean lateness of taking and giving together."""
        return _per(self.taken_late_sum_s, self.taken) + _per(self.given_late_sum_s, self.given)


@dataclass(frozen=True, slots=True)
class RelayTimes:
    """What held the relay up.

    Attributes:
        seconds: length of the run.
        late_s: time by which rounds began late, summed over those that were over 1 ms late.
        own_s: part of it in which the relay itself computed.
        waited_s: time the relay's thread was ready and had no core, as the kernel counts it; None
            if it does not.
        stolen_s: time in which the host ran others on the cores that the relay may use, as the
            kernel counts it; the most that can have been taken from the relay.
        cores: how many these are.
    """

    seconds: float
    late_s: float
    own_s: float
    waited_s: float | None
    stolen_s: float
    cores: int

    @property
    def stolen_share(self) -> float:
        """The share of the cores' time that the host gave to others."""
        return _per(self.stolen_s, self.seconds * self.cores)

    @property
    def cause(self) -> str:
        """``relay``, ``stolen``, ``run queue`` or ``unknown``; empty if nothing was late."""
        if self.late_s <= 0:
            return ""
        if self.own_s >= self.late_s / 2:
            return "relay"
        waited_s = self.waited_s or 0.0
        if max(waited_s, self.stolen_s) < (self.late_s - self.own_s) / 2:
            return "unknown"
        return "stolen" if self.stolen_s >= waited_s else "run queue"

    def __str__(self) -> str:
        waited = "not counted" if self.waited_s is None else f"{self.waited_s:.3f} s"
        return (
            f"the relay was held up for {self.late_s:.3f} s of {self.seconds:.1f} s, "
            f"{self.own_s:.3f} s of it by itself; stolen from its cores: {self.stolen_s:.2f} s "
            f"({self.stolen_share:.1%}), in the run queue: {waited}"
        )


@dataclass(frozen=True, slots=True)
class LabVerdict:
    """Whether a run counts, and why not.

    Attributes:
        late_share: of the link that has the largest share of late packets.
        mean_over_bound: mean lateness over what is allowed, of the link where it is largest.
        why: a sentence per link and rule that it breaks; empty if the run is accepted.
    """

    late_share: float
    mean_over_bound: float
    why: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        """Whether figures of this time describe the links."""
        return not self.why


def judge(links: Mapping[str, LinkTimes]) -> LabVerdict:
    """Judge a run by its packets; the module's text has the rule.

    Args:
        links: by a name that the sentences use.
    """
    few = [times for times in links.values() if max(times.taken, times.given) < FEW_PACKETS]
    found = [
        (name, times.late_share, _mean_over_bound([times]), f", {times.round_trip_s * 1e3:g} ms")
        for name, times in links.items()
        if max(times.taken, times.given) >= FEW_PACKETS
    ]
    if few:
        found.append((FEW, _share_together(few), _mean_over_bound(few), ""))
    why = []
    for name, share, over, trip in found:
        if share > MAX_LATE_SHARE:
            why.append(f"{name}{trip}: {share:.1%} of the packets late (allowed: 5 %)")
        if over > 1:
            why.append(f"{name}{trip}: mean lateness {over:.2g} times what is allowed")
    return LabVerdict(
        max((share for _, share, _, _ in found), default=0.0),
        max((over for _, _, over, _ in found), default=0.0),
        tuple(why),
    )


def _share_together(links: Iterable[LinkTimes]) -> float:
    links = list(links)
    return max(
        _per(sum(each.taken_late for each in links), sum(each.taken for each in links)),
        _per(sum(each.given_late for each in links), sum(each.given for each in links)),
    )


def _mean_over_bound(links: Iterable[LinkTimes]) -> float:
    """Mean over all packets of lateness over their link's bound, for taking plus giving."""
    links = list(links)
    taken = sum(each.taken_late_sum_s / mean_bound_s(each.round_trip_s) for each in links)
    given = sum(each.given_late_sum_s / mean_bound_s(each.round_trip_s) for each in links)
    return _per(taken, sum(each.taken for each in links)) + _per(
        given, sum(each.given for each in links)
    )


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
