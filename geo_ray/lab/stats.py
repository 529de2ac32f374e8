"""A relay's counters, and the verdict whether measurements describe the lab's links or the machine.

Rule: with ``bound = max(1 ms, 2 % of the round trip without queues)`` a link is in time if at most
5 % of its packets are late by more than ``bound``, both when the relay takes them and when it
delivers them, and mean lateness of both together is at most ``max(1 ms, 1 % of the round trip)``.
Links of fewer than 100 packets are judged together. Measurements are accepted if all links are in
time; apply the rule after every run, to the counters of that run only.

The reported cause is the relay if its own computing explains at least half of the time by which
rounds began late; otherwise the larger of stolen time and run-queue wait, or unknown if these
explain less than half of the rest. The cause changes no verdict.

Source: the first part is the lab's original rule with a relative bound. The second follows from
TCP's rate at a given window or loss, which is proportional to 1 / round trip (Mathis et al., 1997).
The numbers are ours. Standard library only: the relay takes its bounds from here.
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
    def late_fraction(self) -> float:
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
    def stolen_fraction(self) -> float:
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
            f"({self.stolen_fraction:.1%}), in the run queue: {waited}"
        )


@dataclass(frozen=True, slots=True)
class LabVerdict:
    """Whether a run counts, and why not.

    Attributes:
        late_fraction: of the link that has the largest share of late packets.
        mean_over_bound: mean lateness over what is allowed, of the link where it is largest.
        why: a sentence per link and rule that it breaks; empty if the run is accepted.
    """

    late_fraction: float
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
        (name, times.late_fraction, _mean_over_bound([times]), f", {times.round_trip_s * 1e3:g} ms")
        for name, times in links.items()
        if max(times.taken, times.given) >= FEW_PACKETS
    ]
    if few:
        found.append((FEW, _fraction_of_all(few), _mean_over_bound(few), ""))
    why = []
    for name, fraction, over, trip in found:
        if fraction > MAX_LATE_SHARE:
            why.append(f"{name}{trip}: {fraction:.1%} of the packets late (allowed: 5 %)")
        if over > 1:
            why.append(f"{name}{trip}: mean lateness {over:.2g} times what is allowed")
    return LabVerdict(
        max((fraction for _, fraction, _, _ in found), default=0.0),
        max((over for _, _, over, _ in found), default=0.0),
        tuple(why),
    )


def _fraction_of_all(links: Iterable[LinkTimes]) -> float:
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


@dataclass(frozen=True)
class LinkStats:
    """The counters of one direction: ``in == out + lost + all drops + waiting`` in packets.

    Attributes:
        rate_mbps: present rate; None: unlimited.
        delay_s: one way.
        loss: wanted share of independent loss.
        in_packets: taken from the sending region.
        in_bytes: bytes taken since the reset, IP heads included.
        out_packets: given to the receiving region.
        out_bytes: their bytes.
        lost: by chance.
        queue_drops: found the link's queue full.
        cap_drops: found a flow's or a region's own queue full.
        cut_drops: while the link was cut.
        device_drops: not taken by the receiving region.
        late_packets: delivered later than the link's bound (`geo_ray.lab.stats`).
        late_mean_s: mean lateness of all.
        late_max_s: largest lateness.
        round_trip_s: there and back, without queues.
        taken_late_packets: taken in a round that began later than the bound.
        taken_late_mean_s: mean over all packets of how late their rounds began.
        queue_bytes: in the link's queue now.
        queue_peak_bytes: the most since the last reset.
        waiting: packets in any queue or under way now.
        is_cut: nothing passes.
    """

    rate_mbps: float | None
    delay_s: float
    loss: float
    in_packets: int
    in_bytes: int
    out_packets: int
    out_bytes: int
    lost: int
    queue_drops: int
    cap_drops: int
    cut_drops: int
    device_drops: int
    late_packets: int
    late_mean_s: float
    late_max_s: float
    round_trip_s: float
    taken_late_packets: int
    taken_late_mean_s: float
    queue_bytes: int
    queue_peak_bytes: int
    waiting: int
    is_cut: bool

    @property
    def times(self) -> LinkTimes:
        """What the rule of acceptance asks of a link."""
        return LinkTimes(
            self.round_trip_s,
            self.in_packets,
            self.taken_late_packets,
            self.taken_late_mean_s * self.in_packets,
            self.out_packets,
            self.late_packets,
            self.late_mean_s * self.out_packets,
        )


@dataclass(frozen=True)
class CapStats:
    """A region's own line in one direction: rate, and bytes waiting now and at most."""

    rate_mbps: float | None
    queue_bytes: int
    queue_peak_bytes: int


@dataclass(frozen=True)
class LabStats:
    """Everything a relay has counted since it started or was reset.

    Attributes:
        seconds: how long that is.
        cpu_s: CPU time of the relay in it, what its writes cost the receiving TCP included.
        realtime: whether the relay has its real-time priority.
        read_packets: taken from all regions.
        pass_max_s: longest single round.
        late_s: time by which rounds began late, of those that were over 1 ms late.
        own_s: part of it in which the relay itself computed.
        late_max_s: latest round.
        waited_s: time in the run queue as the kernel counts it; None if it does not.
        stolen_s: time that the host took from the relay's cores, as the kernel counts it.
        cores: how many cores the relay may use.
        unrouted: packets for addresses outside the lab.
        links: by (source, destination).
        up: the regions' own lines towards the others.
        down: the same from the others.
        congestion_control: of the regions' TCP.
    """

    seconds: float
    cpu_s: float
    realtime: bool
    read_packets: int
    pass_max_s: float
    late_s: float
    own_s: float
    late_max_s: float
    waited_s: float | None
    stolen_s: float
    cores: int
    unrouted: int
    links: Mapping[tuple[str, str], LinkStats]
    up: Mapping[str, CapStats]
    down: Mapping[str, CapStats]
    congestion_control: Mapping[str, str]

    @property
    def verdict(self) -> LabVerdict:
        """Whether figures of this time count."""
        return judge({f"{src} -> {dst}": link.times for (src, dst), link in self.links.items()})

    @property
    def relay(self) -> RelayTimes:
        """What held the relay up."""
        return RelayTimes(
            self.seconds, self.late_s, self.own_s, self.waited_s, self.stolen_s, self.cores
        )

    @property
    def late_fraction(self) -> float:
        """The share of late packets, of the link where it is largest."""
        return self.verdict.late_fraction

    @property
    def was_late(self) -> bool:
        """Whether figures of this time must be rejected."""
        return not self.verdict.accepted

    def record(self) -> dict[str, object]:
        """Return what is stored with every figure measured in a lab, as JSON values."""
        verdict = self.verdict
        return {
            "congestion_control": dict(self.congestion_control),
            "accepted": verdict.accepted,
            "why": list(verdict.why),
            "late_fraction": verdict.late_fraction,
            "mean_late_over_bound": verdict.mean_over_bound,
            "relay": {
                "cores": self.cpu_fraction,
                "realtime": self.realtime,
                "late_s": self.late_s,
                "late_max_s": self.late_max_s,
                "own_s": self.own_s,
                "run_queue_s": self.waited_s,
                "stolen_s": self.stolen_s,
                "stolen_fraction": self.relay.stolen_fraction,
                "cause": self.relay.cause,
            },
            "seconds": self.seconds,
            "links": {
                f"{src} -> {dst}": {
                    "rate_mbps": link.rate_mbps,
                    "delay_s": link.delay_s,
                    "loss": link.loss,
                    "late_fraction": link.times.late_fraction,
                    "late_mean_s": link.times.mean_s,
                    "late_max_s": link.late_max_s,
                    "bytes": link.out_bytes,
                    "lost_packets": link.lost,
                    "queue_drops": link.queue_drops,
                }
                for (src, dst), link in self.links.items()
                if link.in_packets
            },
        }

    @property
    def cpu_fraction(self) -> float:
        """The share of one core that the relay used."""
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0
