"""A relay's counters, and whether it kept time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_LATE_SHARE: Final = 0.05


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
        late_packets: delivered more than 1 ms after they were due.
        late_mean_s: mean lateness of all.
        late_max_s: largest lateness.
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
    queue_bytes: int
    queue_peak_bytes: int
    waiting: int
    is_cut: bool


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
        stalled_packets: of these, read by a round that began more than 1 ms late.
        pass_max_s: longest single round.
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
    stalled_packets: int
    pass_max_s: float
    unrouted: int
    links: Mapping[tuple[str, str], LinkStats]
    up: Mapping[str, CapStats]
    down: Mapping[str, CapStats]
    congestion_control: Mapping[str, str]

    @property
    def late_share(self) -> float:
        """The share of packets taken or given more than 1 ms late, whichever is larger."""
        out = sum(link.out_packets for link in self.links.values())
        late = sum(link.late_packets for link in self.links.values())
        return max(late / max(1, out), self.stalled_packets / max(1, self.read_packets))

    @property
    def was_late(self) -> bool:
        """Whether figures of this time must be rejected."""
        return self.late_share > MAX_LATE_SHARE

    def record(self) -> dict[str, object]:
        """Return what is stored with every figure measured in a lab, as JSON values."""
        return {
            "congestion_control": dict(self.congestion_control),
            "relay_late_share": self.late_share,
            "relay_cores": self.cpu_share,
            "relay_realtime": self.realtime,
            "seconds": self.seconds,
            "links": {
                f"{src} -> {dst}": {
                    "rate_mbps": link.rate_mbps,
                    "delay_s": link.delay_s,
                    "loss": link.loss,
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
