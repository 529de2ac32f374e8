"""Sends an update's lossy blocks to one peer: in order, paced, and only while nothing else is due.

There is one thread per peer. The thread waits until the reliable part is acknowledged, then uses
what the link has left over (`geo_ray.transport.datagrams.pacing`). The next update stops it at
once; blocks that have not left by then are reported, so that they are not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.datagrams.datagram import BlockGroup, Sealer, Secret, blocks_per_datagram
from geo_ray.transport.datagrams.pacing import Seen, TokenBucket, YieldingRate

_GATE_S: Final = 0.25  # longest wait per check that reliable data are acknowledged
_NAP_S: Final = 0.002  # shortest sleep of the pacing


@dataclass(frozen=True, slots=True)
class LossyLoad:
    """The lossy blocks of an update.

    Attributes:
        epoch: epoch of the sender.
        seq: the update's number.
        ids: position of each block within the vector, by rank.
        data: the blocks' bytes, by rank, one after the other.
        block_bytes: size of each block.
        bands: ranges of rank, for marking.
    """

    epoch: int
    seq: int
    ids: Sequence[int]
    data: memoryview
    block_bytes: int
    bands: int = 1

    def group(self, first_rank: int, count: int) -> BlockGroup:
        """Return ``count`` blocks from ``first_rank`` on, or as many as there are."""
        stop = min(len(self.ids), first_rank + count)
        size = self.block_bytes
        blocks = [self.data[rank * size : (rank + 1) * size] for rank in range(first_rank, stop)]
        return BlockGroup(self.epoch, self.seq, first_rank, self.ids[first_rank:stop], blocks)


@dataclass(slots=True)
class SenderCounts:
    """What a sender has sent.

    Attributes:
        datagrams: count of datagrams.
        bytes_out: bytes of these datagrams.
        blocks: count of lossy blocks in them.
        unsent: count of blocks that were not sent before the next update.
    """

    datagrams: int = 0
    bytes_out: int = 0
    blocks: int = 0
    unsent: int = 0


class UdpSender:
    """The sending thread of one peer; see the module's docstring.

    Args:
        send: takes (datagram, band, bands); must not block for long.
        is_drained: waits at most the given seconds; returns whether no reliable data are due to the
            peer.
        start_mbps: returns a first guess at the link's rate when a session begins.
        most_mbps: upper bound of the rate; None for no bound.
        clock: clock for pacing.
    """

    def __init__(
        self,
        send: Callable[[bytes, int, int], None],
        is_drained: Callable[[float], bool],
        start_mbps: Callable[[], float],
        most_mbps: float | None,
        clock: Clock,
    ) -> None:
        self.counts = SenderCounts()
        self._send = send
        self._is_drained = is_drained
        self._start_mbps = start_mbps
        self._most_mbps = most_mbps
        self._clock = clock
        self._changed = threading.Condition()  # guards the attributes below
        self._session: bytes | None = None
        self._sealer: Sealer | None = None
        self._rate = YieldingRate(1.0, most_mbps)
        self._bucket = TokenBucket(1.0)
        self._load: LossyLoad | None = None
        self._next_rank = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wan-loose", daemon=True)
        self._thread.start()

    @property
    def mbps(self) -> float:
        """The present rate."""
        return self._rate.mbps

    @property
    def loss(self) -> float | None:
        """The share of datagrams lost recently; None if it is not known."""
        return self._rate.loss

    @property
    def sealed(self) -> int:
        """The count of datagrams under the present key."""
        sealer = self._sealer
        return 0 if sealer is None else sealer.number

    def use(self, secret: Secret) -> None:
        """Send under this session from now on."""
        start_mbps = self._start_mbps()
        with self._changed:
            if self._session == secret.session:
                return  # the numbers of one key must not begin again, since they are the nonce
            self._session, self._sealer = secret.session, Sealer(secret)
            self._rate = YieldingRate(start_mbps, self._most_mbps)
            self._bucket = TokenBucket(self._rate.mbps)
            self._changed.notify_all()

    def start(self, load: LossyLoad) -> None:
        """Send these blocks once reliable data are acknowledged; `stop` has ended the last ones."""
        with self._changed:
            self._load, self._next_rank = load, 0
            self._changed.notify_all()

    def stop(self) -> tuple[int, int] | None:
        """Stop sending the present update.

        Returns:
            The update's number and the first rank that was not sent; None if no update was being
            sent.
        """
        with self._changed:
            load, self._load = self._load, None
            self._changed.notify_all()
            if load is None:
                return None
            self.counts.unsent += len(load.ids) - self._next_rank
            return load.seq, self._next_rank

    def on_seen(self, session: bytes, seen: Seen) -> None:
        """Adapt the rate to the peer's report."""
        now_s = self._clock.now_s()
        with self._changed:
            if session == self._session:
                self._rate.on_seen(now_s, seen)
                self._bucket.set_rate(now_s, self._rate.mbps)

    def close(self) -> None:
        """End the sending thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                load = self._load
            if load is not None and self._is_drained(_GATE_S):
                self._send_all(load)

    def _has_work(self) -> bool:
        load = self._load
        left = load is not None and self._next_rank < len(load.ids)
        return self._closed or (left and self._sealer is not None)

    def _send_all(self, load: LossyLoad) -> None:
        per_datagram = blocks_per_datagram(load.block_bytes)
        while (found := self._next(load, per_datagram)) is not None:
            datagram, rank = found
            self._send(datagram, rank * load.bands // len(load.ids), load.bands)

    def _next(self, load: LossyLoad, per_datagram: int) -> tuple[bytes, int] | None:
        """Wait for the next datagram's time; return it and its first rank, or None at the end."""
        with self._changed:
            while True:
                rank, sealer = self._next_rank, self._sealer
                if self._closed or self._load is not load or rank >= len(load.ids):
                    return None
                if sealer is None:
                    return None
                now_s = self._clock.now_s()
                group = load.group(rank, per_datagram)
                size_bytes = load.block_bytes * len(group.ids)
                wait_s = self._bucket.take(now_s, size_bytes)
                if wait_s <= 0.0:
                    break
                self._changed.wait(max(wait_s, _NAP_S))
            datagram = sealer.seal(group.pack(int(now_s * 1e6)))
            self._next_rank += len(group.ids)
            self._rate.on_sent(len(datagram))
            self.counts.datagrams += 1
            self.counts.bytes_out += len(datagram)
            self.counts.blocks += len(group.ids)
            return datagram, rank
