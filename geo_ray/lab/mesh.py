"""All regions and links of a lab, without their devices: packets in, packets out. Pure.

    device -> up (shared) -> link: flow caps, queue, loss, delay -> down (shared) -> device

Time is given with every call; nothing happens between calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from geo_ray.lab.link import Device, Link, SharedQueue
from geo_ray.lab.plan import CapShape, LinkShape
from geo_ray.lab.stats import late_after_s


class Station:
    """A region in the mesh: takes its packets, and delivers packets to it.

    Args:
        name: name of the region.
        prefixes: first bytes of its IPv4 (2) and IPv6 (8) addresses.
        up: its own line towards the others.
        down: its own line from the others.
        device: takes its packets.
    """

    def __init__(
        self,
        name: str,
        prefixes: Sequence[bytes],
        up: CapShape,
        down: CapShape,
        device: Device,
    ) -> None:
        self.name = name
        self.prefixes = tuple(prefixes)
        self.up, self.down = SharedQueue(up), SharedQueue(down)
        self.inbound: list[Link] = []
        self.unrouted = 0
        self._device = device
        self._routes: dict[bytes, Link] = {}
        self._due: list[tuple[float, Link, bytes]] = []

    def attach(self, link: Link, other: Station) -> None:
        """Send packets for ``other`` over ``link``."""
        other.inbound.append(link)
        for prefix in other.prefixes:
            self._routes[prefix] = link

    def accept(self, packets: Iterable[bytes], now_s: float, late_s: float = 0.0) -> None:
        """Take in packets that the region sends.

        Args:
            packets: whole IP packets, in order.
            now_s: when they are taken.
            late_s: how late that is at most; 0 if it is in time.
        """
        routes, up = self._routes, self.up
        for packet in packets:
            link = routes.get(packet[16:18] if packet[0] < 0x50 else packet[24:32])
            if link is None:
                self.unrouted += 1
                continue
            link.in_packets += 1
            link.in_bytes += len(packet)
            if late_s:
                link.taken_late(late_s)
            if up.is_open:
                link.push(now_s, packet)
            else:
                up.push(link, now_s, packet)

    def deliver(self, clock: Callable[[], float]) -> bool:
        """Give the region what is due; True if there was anything.

        Args:
            clock: asked often, because giving packets away takes time.
        """
        if not self.down.is_open:
            return self._deliver_capped(clock)
        busy, now_s, device = False, clock(), self._device
        for link in self.inbound:
            line = link.line  # tested here, because most links have nothing to do most of the time
            if (line and line[0][0] <= now_s) or link.has_flows:
                while link.release(now_s, device):
                    busy, now_s = True, clock()
        return busy

    def next_s(self) -> float | None:
        """Return when something happens next without a packet coming in; None: never."""
        times_s = [link.next_s() for link in self.inbound]
        times_s += [self.up.next_s(), self.down.next_s()]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _deliver_capped(self, clock: Callable[[], float]) -> bool:
        now_s, due, down, device = clock(), self._due, self.down, self._device
        for link in self.inbound:
            line = link.line
            if (line and line[0][0] <= now_s) or link.has_flows:
                link.hand_over(now_s, self._collect)
        if due:
            due.sort(key=_first)
            for due_s, link, packet in due:
                down.push(link, due_s, packet)
            due.clear()
        first_s = down.next_s()
        if first_s is None or first_s > now_s:
            return False

        def give(link: Link, left_s: float, packet: bytes) -> None:
            late_s = clock() - left_s
            try:
                device(packet)
            except OSError:
                link.device_drops += 1
            else:
                link.delivered(late_s, len(packet))

        down.release(now_s, give)
        return True

    def _collect(self, link: Link, due_s: float, packet: bytes) -> None:
        self._due.append((due_s, link, packet))


class Mesh:
    """Stations by index, and a link for every ordered pair of them.

    Args:
        stations: the regions.
        links: shape and seed by (source, destination) index.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        links: Mapping[tuple[int, int], tuple[LinkShape, int]],
    ) -> None:
        self.stations = tuple(stations)
        self.links: dict[tuple[int, int], Link] = {}
        for (src, dst), (shape, seed) in links.items():
            link = self.links[src, dst] = Link(shape, seed)
            stations[src].attach(link, stations[dst])
        self.note_round_trips()

    def note_round_trips(self) -> None:
        """Set the round trip of every link; must be called when delays have changed."""
        for (src, dst), link in self.links.items():
            back = self.links.get((dst, src), link)
            link.round_trip_s = link.shape.delay_s + back.shape.delay_s
            link.late_after_s = late_after_s(link.round_trip_s)

    def advance(self, clock: Callable[[], float]) -> bool:
        """Do everything that is due; return True if packets were given to regions."""
        now_s = clock()
        for station in self.stations:
            if not station.up.is_open:
                station.up.release(now_s, _push)
        busy = False
        for station in self.stations:
            busy |= station.deliver(clock)
        return busy

    def next_s(self) -> float | None:
        """Return when something happens next without a packet coming in; None: never."""
        times_s = [station.next_s() for station in self.stations]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def index(self, name: str) -> int:
        """The index of a region.

        Raises:
            KeyError: no region has this name.
        """
        for index, station in enumerate(self.stations):
            if station.name == name:
                return index
        raise KeyError(name)

    def reset(self) -> None:
        """Reset all counters."""
        for link in self.links.values():
            link.reset()
        for station in self.stations:
            station.unrouted = 0
            station.up.reset()
            station.down.reset()


_first = operator.itemgetter(0)


def _push(link: Link, at_s: float, packet: bytes) -> None:
    link.push(at_s, packet)
