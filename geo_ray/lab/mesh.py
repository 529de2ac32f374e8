"""All regions and links of a lab, without their devices: packets in, packets out. Pure.

    device -> up (shared) -> link: flow caps, queue, loss, delay -> down (shared) -> device

Time is given with every call; nothing happens between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from geo_ray.lab.link import Link
from geo_ray.lab.shapes import CapShape, LinkShape
from geo_ray.lab.shared_queue import SharedQueue

Device: TypeAlias = Callable[[bytes], bool]
"""Gives a packet to a region; False if the region did not take it."""


class Station:
    """A region's place in the mesh: where its packets come in, and where packets for it go out.

    Args:
        name: of the region.
        prefixes: first bytes of its IPv4 (2) and IPv6 (8) addresses.
        up: its own line towards the others.
        down: its own line from the others.
        device: takes its packets.
    """

    __slots__ = ("_clock", "_device", "_due", "_routes", "down", "inbound", "name", "outbound",
                 "prefixes", "unrouted", "up")  # fmt: skip

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
        self.outbound: list[Link] = []
        self.unrouted = 0
        self._device = device
        self._routes: dict[bytes, Link] = {}
        self._due: list[tuple[float, Link, bytes]] = []
        self._clock: Callable[[], float] = lambda: 0.0

    def attach(self, link: Link, other: Station) -> None:
        """Send packets for ``other`` over ``link``."""
        self.outbound.append(link)
        other.inbound.append(link)
        for prefix in other.prefixes:
            self._routes[prefix] = link

    def accept(self, packet: bytes, now_ns: float) -> None:
        """Take a packet that the region sends."""
        key = packet[16:18] if packet[0] < 0x50 else packet[24:32]
        link = self._routes.get(key)
        if link is None:
            self.unrouted += 1
            return
        link.in_packets += 1
        link.in_bytes += len(packet)
        if self.up.is_open():
            link.push(now_ns, packet)
        else:
            self.up.push(link, now_ns, packet)

    def send(self, now_ns: float) -> None:
        """Move what has left the region's own line onto its links."""
        self.up.release(now_ns, Link.push)

    def deliver(self, clock: Callable[[], float]) -> bool:
        """Give the region what is due; True if there was anything.

        Args:
            clock: asked once per link, because giving packets away takes time.
        """
        self._clock = clock
        busy = False
        if self.down.is_open():
            for link in self.inbound:
                if link.waiting:
                    due = link.next_ns()
                    if due is not None and due <= (now_ns := clock()):
                        link.release(now_ns, self._give)
                        busy = True
            return busy
        now_ns = clock()
        for link in self.inbound:
            link.release(now_ns, self._collect)
        self._due.sort(key=lambda entry: entry[0])
        for due_ns, link, packet in self._due:
            self.down.push(link, due_ns, packet)
        self._due.clear()
        first_ns = self.down.next_ns()
        if first_ns is None or first_ns > now_ns:
            return False
        self.down.release(now_ns, self._give)
        return True

    def next_ns(self) -> float | None:
        """When something happens next without a packet coming in; None: never."""
        times_ns = [link.next_ns() for link in self.inbound]
        times_ns += [self.up.next_ns(), self.down.next_ns()]
        return min((time_ns for time_ns in times_ns if time_ns is not None), default=None)

    def _collect(self, link: Link, due_ns: float, packet: bytes) -> None:
        self._due.append((due_ns, link, packet))

    def _give(self, link: Link, due_ns: float, packet: bytes) -> None:
        late_ns = self._clock() - due_ns
        if self._device(packet):
            link.delivered(late_ns, len(packet))
        else:
            link.device_drops += 1


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
            link = self.links[src, dst] = Link(src, dst, shape, seed)
            stations[src].attach(link, stations[dst])

    def advance(self, clock: Callable[[], float]) -> bool:
        """Do everything that is due; True if packets were given to regions."""
        now_ns = clock()
        for station in self.stations:
            station.send(now_ns)
        busy = False
        for station in self.stations:
            busy |= station.deliver(clock)
        return busy

    def next_ns(self) -> float | None:
        """When something happens next without a packet coming in; None: never."""
        times_ns = [station.next_ns() for station in self.stations]
        return min((time_ns for time_ns in times_ns if time_ns is not None), default=None)

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
        """Begin all books anew."""
        for link in self.links.values():
            link.reset()
        for station in self.stations:
            station.unrouted = 0
            station.up.reset()
            station.down.reset()
