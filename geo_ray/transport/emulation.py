"""Emulated WAN links: a seeded link model, and shapers that delay real bytes and datagrams by it.

The model describes one direction of a link and has no clock. The simulator computes arrivals with
it; the shapers delay real traffic until then, so both agree. TCP itself (slow start,
windows, congestion) is not modelled; see docs/design/transport.md.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Final

from pydantic import Field, model_validator

from geo_ray.base.clock import Clock
from geo_ray.base.errors import InvariantError
from geo_ray.base.model import StrictModel

CHUNK_BYTES: Final = 64 * 1024
PACKET_BYTES: Final = 1448  # payload of an Ethernet-sized TCP segment with timestamps
_JITTER_MEMORY_S: Final = 0.2  # correlated jitter does not reorder and does not bias the mean
_QUEUE_S: Final = 0.1  # datagrams that would wait longer for the link are dropped


class LinkSpec(StrictModel):
    """One direction of a link between two regions."""

    rate_mbps: float | None = Field(
        default=None, gt=0, description="Bandwidth in 10^6 bit/s; null is unlimited."
    )
    delay_s: float = Field(default=0.0, ge=0, description="One-way delay in seconds.")
    jitter_s: float = Field(
        default=0.0, ge=0, description="Standard deviation of the delay in seconds; keeps order."
    )
    loss: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Probability that a 1448-byte packet is lost; a 64 KiB chunk with a lost "
        "packet arrives one round trip later.",
    )
    outages: tuple[tuple[float, float], ...] = Field(
        default=(),
        description="[start, end) in seconds since the run began in which nothing arrives; "
        "ascending and disjoint.",
    )

    @model_validator(mode="after")
    def _check_outages(self) -> LinkSpec:
        last_end_s = 0.0
        for start_s, end_s in self.outages:
            if not last_end_s <= start_s < end_s:
                raise ValueError(
                    f"outages: {start_s:g} to {end_s:g} s ends before it begins, or begins before "
                    "the one before it ends"
                )
            last_end_s = end_s
        return self


class LinkModel:
    """The state of one direction of a link; deterministic by seed and sequence of calls.

    Connections and datagrams share a link and may come from different threads, so calls are locked.

    Args:
        spec: properties of the link.
        seed: seed of loss and jitter; see `link_seed`.
        round_trip_s: how much later a lost packet's chunk arrives, in seconds; None takes twice
            the one-way delay.
    """

    def __init__(self, spec: LinkSpec, seed: int, round_trip_s: float | None = None) -> None:
        self.spec = spec
        self.round_trip_s = 2 * spec.delay_s if round_trip_s is None else round_trip_s
        self._lock = threading.Lock()
        self._random = Random(seed)
        self._drops = Random(f"datagrams {seed}")  # leaves connections' chances as they are
        self._free_at_s = 0.0
        self._last_arrival_s = 0.0
        self._jitter_s = 0.0
        self._jitter_at_s = -math.inf

    @property
    def free_at_s(self) -> float:
        """The time at which the sender's end of the link has put its last byte on the wire."""
        return self._free_at_s

    def transfer(self, now_s: float, size_bytes: int) -> float:
        """Put bytes on the link after those that are on it.

        Calling it for a message at once, or for its 64 KiB chunks one after the other with the
        same ``now_s``, gives the same arrival.

        Args:
            now_s: when the bytes are ready, in seconds since the run began; may lie before the
                time at which the link is free.
            size_bytes: payload and header.

        Returns:
            When the last byte arrives, in seconds since the run began; never earlier than an
            earlier transfer's.

        Raises:
            InvariantError: ``size_bytes`` is not positive.
        """
        if size_bytes <= 0:
            raise InvariantError(f"a link cannot carry {size_bytes} bytes")
        with self._lock:
            for chunk_bytes in _chunks(size_bytes):
                self._transfer_chunk(now_s, chunk_bytes)
            return self._last_arrival_s

    def datagram(self, now_s: float, size_bytes: int) -> float | None:
        """Put a datagram on the link after the bytes that are on it.

        Args:
            now_s: when it is ready, in seconds since the run began.
            size_bytes: with all headers; one packet.

        Returns:
            When it arrives; None if it is lost: by chance, in an outage, or because the link's
            queue is full.
        """
        with self._lock:
            spec = self.spec
            if self._free_at_s - now_s > _QUEUE_S:
                return None
            work_s = 0.0 if spec.rate_mbps is None else size_bytes * 8e-6 / spec.rate_mbps
            self._free_at_s = max(now_s, self._free_at_s) + work_s
            if self._drops.random() < spec.loss:
                return None
            arrival_s = self._free_at_s + max(0.0, spec.delay_s + self._next_jitter_s())
            if any(start_s <= arrival_s < end_s for start_s, end_s in spec.outages):
                return None
            return arrival_s

    def _transfer_chunk(self, now_s: float, chunk_bytes: int) -> None:
        spec = self.spec
        work_s = 0.0 if spec.rate_mbps is None else chunk_bytes * 8e-6 / spec.rate_mbps
        self._free_at_s = self._serialised_at_s(max(now_s, self._free_at_s), work_s)
        delay_s = max(0.0, spec.delay_s + self._next_jitter_s())
        if spec.loss and self._is_hit(chunk_bytes):
            delay_s += self.round_trip_s
        arrival_s = max(self._free_at_s + delay_s, self._last_arrival_s)
        for start_s, end_s in spec.outages:
            if start_s <= arrival_s < end_s:
                arrival_s = end_s
        self._last_arrival_s = arrival_s

    def _serialised_at_s(self, start_s: float, work_s: float) -> float:
        """Return when ``work_s`` seconds of sending are done; the link is paused during outages."""
        for outage_s, end_s in self.spec.outages:
            # An outage is given where bytes arrive; the sender feels it one delay earlier.
            outage_s, end_s = outage_s - self.spec.delay_s, end_s - self.spec.delay_s
            if start_s >= end_s:
                continue
            if start_s + work_s < outage_s:
                break
            work_s -= max(0.0, outage_s - start_s)
            start_s = end_s
        return start_s + work_s

    def _next_jitter_s(self) -> float:
        if not self.spec.jitter_s:
            return 0.0
        memory = math.exp((self._jitter_at_s - self._free_at_s) / _JITTER_MEMORY_S)
        news = math.sqrt(1.0 - memory * memory) * self._random.gauss(0.0, 1.0)
        self._jitter_s = memory * self._jitter_s + news * self.spec.jitter_s
        self._jitter_at_s = self._free_at_s
        return self._jitter_s

    def _is_hit(self, chunk_bytes: int) -> bool:
        packets = math.ceil(chunk_bytes / PACKET_BYTES)
        return self._random.random() >= (1.0 - self.spec.loss) ** packets


def link_seed(seed: int, src: str, dst: str) -> int:
    """Return the seed of the link from ``src`` to ``dst`` in an experiment with ``seed``."""
    digest = blake2b(f"{seed}\0{src}\0{dst}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def build_links(
    specs: Mapping[tuple[str, str], LinkSpec], seed: int
) -> dict[tuple[str, str], LinkModel]:
    """Build the models of an experiment's links, the same for the simulator and for every bridge.

    Args:
        specs: by (source region, destination region).
        seed: the experiment's.

    Returns:
        Fresh models by (source, destination). A round trip is both directions' delay; a direction
        that is not given counts as the other.
    """
    return {
        (src, dst): LinkModel(
            spec,
            link_seed(seed, src, dst),
            spec.delay_s + specs.get((dst, src), spec).delay_s,
        )
        for (src, dst), spec in specs.items()
    }


def _chunks(size_bytes: int) -> Iterator[int]:
    while size_bytes > CHUNK_BYTES:
        yield CHUNK_BYTES
        size_bytes -= CHUNK_BYTES
    yield size_bytes


_HORIZON_S: Final = 0.05  # bytes are scheduled so far ahead; a cut loses at most that


class Shaper:
    """A link model in real time; it outlives the connections that use it.

    Args:
        model: one direction of a link.
        clock: clock by which bytes are released.
        run_start_s: the clock's time at which the model's time is 0.
    """

    def __init__(self, model: LinkModel, clock: Clock, run_start_s: float) -> None:
        self._model = model
        self._clock = clock
        self._run_start_s = run_start_s
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.now_s() - self._run_start_s

    def arrival_s(self, ready_s: float, size_bytes: int) -> float:
        """See `LinkModel.transfer`."""
        with self._lock:
            return self._model.transfer(ready_s, size_bytes)

    def backlog_s(self) -> float:
        """Return for how long the link is still busy with the bytes it was given."""
        with self._lock:
            return self._model.free_at_s - self.now_s()

    def has_capacity(self) -> bool:
        """Return whether the link will soon be idle unless it is given more."""
        return self.capacity_in_s() <= 0.0

    def capacity_in_s(self) -> float:
        """Return the seconds until `has_capacity` holds."""
        return max(0.0, self.backlog_s() - _HORIZON_S)


def regroup(parts: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the same bytes in groups of exactly ``size_bytes``; the last group may be shorter."""
    group: list[memoryview] = []
    buffer = size_bytes
    for part in parts:
        while part.nbytes >= buffer:
            yield [*group, part[:buffer]]
            part, group, buffer = part[buffer:], [], size_bytes
        if part.nbytes:
            group.append(part)
            buffer -= part.nbytes
    if group:
        yield group


_HEADERS_BYTES: Final = 28  # IP and UDP


class DatagramShaper:
    """Delays datagrams until the link model says that they arrive, and drops those that do not.

    Args:
        send: puts a datagram on the real socket; loopback takes no time.
        model: one direction of a link; the endpoint's connections use the same one.
        clock: clock by which datagrams are released.
        run_start_s: the clock's time at which the model's time is 0.
    """

    def __init__(
        self, send: Callable[[bytes], None], model: LinkModel, clock: Clock, run_start_s: float
    ) -> None:
        self._release = send
        self._model = model
        self._clock = clock
        self._run_start_s = run_start_s
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, bytes]] = []
        self._number = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wan-udp-shaper", daemon=True)
        self._thread.start()

    def send(self, datagram: bytes) -> None:
        """Put a datagram on the emulated link."""
        arrival_s = self._model.datagram(self._now_s(), len(datagram) + _HEADERS_BYTES)
        if arrival_s is None:
            return
        with self._changed:
            heapq.heappush(self._queue, (arrival_s, next(self._number), datagram))
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; datagrams on the link are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _now_s(self) -> float:
        return self._clock.now_s() - self._run_start_s

    def _run(self) -> None:
        while (datagram := self._next()) is not None:
            self._release(datagram)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._closed:
                left_s = self._queue[0][0] - self._now_s() if self._queue else None
                if left_s is not None and left_s <= 0.0:
                    return heapq.heappop(self._queue)[2]
                self._changed.wait(left_s)
        return None
