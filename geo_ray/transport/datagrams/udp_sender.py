"""Sends an update's lossy blocks to one peer: in order, paced, and only while nothing else is due.

A thread per peer. It waits until the reliable part is acknowledged, then spends what the link has
left over (`geo_ray.transport.datagrams.pacing`). The next update stops it at once; what has not
left by then is reported, so that it is not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.datagrams.datagram import BlockGroup, Sealer, Secret, blocks_per_datagram
from geo_ray.transport.datagrams.pacing import Seen, TokenBucket, YieldingRate

_GATE_S: Final = 0.25  # how long one look at the reliable road may wait
_NAP_S: Final = 0.002  # shortest sleep of the pacing


@dataclass(frozen=True, slots=True)
class LossyLoad:
    """The lossy blocks of an update.

    Attributes:
        epoch: of the sender.
        seq: the update's number.
        ids: number of each block within the vector, by rank.
        data: the blocks' bytes, by rank, one after the other.
        block_bytes: of each.
        bands: ranges of rank, for marking.
    """

    epoch: int
    seq: int
    ids: Sequence[int]
    data: memoryview
    block_bytes: int
    bands: int = 1

    def group(self, first_rank: int, count: int) -> BlockGroup:
        """``count`` blocks from ``first_rank`` on, or as many as there are."""
        stop = min(len(self.ids), first_rank + count)
        size = self.block_bytes
        blocks = [self.data[rank * size : (rank + 1) * size] for rank in range(first_rank, stop)]
        return BlockGroup(self.epoch, self.seq, first_rank, self.ids[first_rank:stop], blocks)


@dataclass(slots=True)
class SenderCounts:
    """What was sent.

    Attributes:
        datagrams: how many.
        bytes_out: their bytes.
        blocks: lossy blocks in them.
        unsent: blocks that an update left behind.
    """

    datagrams: int = 0
    bytes_out: int = 0
    blocks: int = 0
    unsent: int = 0


class UdpSender:
    """See the module's docstring.

    Args:
        send: (datagram, band, bands); never blocks for long.
        is_drained: waits so many seconds at most; whether nothing reliable is due to the peer.
        start_mbps: a first guess at what the link bears, asked when a session begins.
        most_mbps: bound on the rate; None for none.
        clock: for pacing.
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
        self._changed = threading.Condition()  # guards what follows
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
        """Share of datagrams that got lost of late, if it is known."""
        return self._rate.loss

    def use(self, secret: Secret) -> None:
        """Send under this session from now on."""
        start_mbps = self._start_mbps()
        with self._changed:
            if self._session == secret.session:
                return  # the numbers of a key must not begin again
            self._session, self._sealer = secret.session, Sealer(secret)
            self._rate = YieldingRate(start_mbps, self._most_mbps)
            self._bucket = TokenBucket(self._rate.mbps)
            self._changed.notify_all()

    def start(self, load: LossyLoad) -> None:
        """Send these blocks, once the reliable road is drained; `stop` has ended the last ones."""
        with self._changed:
            self._load, self._next_rank = load, 0
            self._changed.notify_all()

    def stop(self) -> tuple[int, int] | None:
        """Send no more of the present update.

        Returns:
            The update's number, and the first rank that did not leave; None if there was none.
        """
        with self._changed:
            load, self._load = self._load, None
            self._changed.notify_all()
            if load is None:
                return None
            self.counts.unsent += len(load.ids) - self._next_rank
            return load.seq, self._next_rank

    def on_seen(self, session: bytes, seen: Seen) -> None:
        """The peer tells what has arrived."""
        now_s = self._clock.now_s()
        with self._changed:
            if session == self._session:
                self._rate.on_seen(now_s, seen)
                self._bucket.set_rate(now_s, self._rate.mbps)

    def close(self) -> None:
        """End the thread."""
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
        """The next datagram, when its time has come, and its first rank; None at the end."""
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
