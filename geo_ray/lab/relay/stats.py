"""A relay's counters, and whether it kept time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geo_ray.lab.acceptance import LabVerdict, LinkTimes, RelayTimes, judge


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
        late_packets: delivered later than the link's bound (`geo_ray.lab.acceptance`).
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
    def late_share(self) -> float:
        """The share of late packets, of the link where it is largest."""
        return self.verdict.late_share

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
            "late_share": verdict.late_share,
            "mean_late_over_bound": verdict.mean_over_bound,
            "relay": {
                "cores": self.cpu_share,
                "realtime": self.realtime,
                "late_s": self.late_s,
                "late_max_s": self.late_max_s,
                "own_s": self.own_s,
                "run_queue_s": self.waited_s,
                "stolen_s": self.stolen_s,
                "stolen_share": self.relay.stolen_share,
                "cause": self.relay.cause,
            },
            "seconds": self.seconds,
            "links": {
                f"{src} -> {dst}": {
                    "rate_mbps": link.rate_mbps,
                    "delay_s": link.delay_s,
                    "loss": link.loss,
                    "late_share": link.times.late_share,
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
    def cpu_share(self) -> float:
        """The share of one core that the relay used."""
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0
