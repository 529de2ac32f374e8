"""When chunks go out and over how many streams, learned from the link's own traffic."""

from __future__ import annotations

from typing import Final

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.flow.estimator import LinkEstimate, LinkEstimator
from geo_ray.transport.flow.stream_count import StreamCount, Stretch
from geo_ray.transport.flow.window import Window

_LONG_RTTS: Final = 8.0
_LONG_S: Final = 0.4
_SHORT_RTTS: Final = 1.5
_NEAR_S: Final = 0.003  # a link with a shorter round trip is no wide-area link
_FIRST_FAR: Final = 4
_MOST_NEAR: Final = 4
_MANY: Final = 32
_FIRST_FLIGHT_BYTES: Final = 13 * 1024  # with frame and TLS records less than 10 x 1448
_SHORTEST_BYTES: Final = 16 * 1024
_CHUNKS_IN_WINDOW: Final = 8
_WIDER: Final = 4  # longest chunk on a fast link, over that of others
_CHUNKS_IN_WIDE: Final = 64
_WIDEST: Final = 16  # the same between two processes of one host
_LARGEST_CHUNK_BYTES: Final = 1024**2  # peers take no longer ones
_WIDE_S: Final = 0.02  # a chunk on one host takes no longer than that
_ON_HOST_BYTES: Final = 32 * 1024**2  # least window on one host
_KERNEL_BYTES: Final = 512 * 1024  # limit of unsent bytes in the kernel, over all streams
_MOST_STALL_FACTOR: Final = 64.0
_PROMPT: Final = 4.0
_CALM: Final = 0.9
_ESTIMATE_EVERY_S: Final = 1.0
_PING_MAX_S: Final = 0.05
_PING_MIN_S: Final = 0.01


class FlowControl:
    """The window, stream count and chunk size of one direction of a link; outlives connections.

    Args:
        config: bounds.
        is_shaped: an emulated link needs neither window nor streams: it is a queue of its own.
        unix_offset_s: see `Window`.

    Attributes:
        window: how much may be under way.
        streams: how many data streams there should be.
        estimate: what was learned about the link, as of a second ago; any thread may read it.
    """

    def __init__(
        self, config: TransportConfig, *, is_shaped: bool, unix_offset_s: float = 0.0
    ) -> None:
        self.window = Window(_CHUNKS_IN_WINDOW * _SHORTEST_BYTES, unix_offset_s)
        self._now_s = 0.0
        self._estimator = LinkEstimator()
        self.estimate: LinkEstimate = self._estimator.snapshot(0.0)
        self._estimated_s = 0.0
        self._config = config
        self._is_shaped = is_shaped
        self._has_one_address = False
        self._count: StreamCount | None = None
        self._begun_s: float | None = None
        self._acked_bytes = 0
        self._waited_s = 0.0
        self._looked_s = 0.0
        self._was_waiting = False
        self._had_more = False
        self._is_whole = True
        self._stall_factor = 1.0

    def connected(self, *, one_address: bool) -> None:
        """A connection has begun; both of its ends have one address, or not."""
        self._has_one_address = one_address

    @property
    def is_on_host(self) -> bool:
        """Whether the peer is on this host: its address is, and no tunnel that begins here.

        There is no line to share. What delays heartbeats is a busy processor, which fewer bytes
        under way, or more streams, would not help; every chunk costs it some time.
        """
        base_s = self.window.base_rtt_s
        near = self._has_one_address and base_s is not None and base_s < _NEAR_S
        return near and not self._is_shaped

    @property
    def streams(self) -> int:
        """The number of data streams wanted now."""
        smallest = self._config.min_streams
        if self._is_shaped or self._count is None or self.is_on_host:
            return smallest
        return self._count.target

    def chunk_bytes(self, streams: int) -> int:
        """Return the longest chunk for that many streams: small chunks wait less for a slow stream.

        With many, a chunk is what TCP sends at once after a pause (ten segments, RFC 6928). A small
        window is that of a slow link, where a heartbeat waits for the chunk before it.
        """
        if self.is_on_host:
            # A relay on this host may lead over a slow line: only what was seen to pass is wide.
            peak_mbps = self.estimate.goodput_peak_mbps or 0.0
            fast_bytes = int(peak_mbps * 1e6 / 8 * _WIDE_S / max(1, streams))
            wide_bytes = min(fast_bytes, _WIDEST * self._config.chunk_bytes)
            return min(_LARGEST_CHUNK_BYTES, max(self._config.chunk_bytes, wide_bytes))
        if streams >= _MANY:
            return min(self._config.chunk_bytes, _FIRST_FLIGHT_BYTES)
        share_bytes, most_bytes = 1024**2 // max(1, streams), self._config.chunk_bytes
        if not self._is_shaped:
            window_bytes = int(self.window.size_bytes)
            share_bytes = min(share_bytes, window_bytes // _CHUNKS_IN_WINDOW)
            # Where a window holds that many of them, nobody waits long for one; each has its cost.
            wide_bytes = min(_WIDER * most_bytes, window_bytes // _CHUNKS_IN_WIDE)
            most_bytes = max(most_bytes, wide_bytes)
        return max(_SHORTEST_BYTES, min(most_bytes, share_bytes))

    def shares(self, streams: int) -> int:
        """Return into how many chunks a message is cut at least: one for each of its streams.

        After a pause TCP sends a few segments and waits for a round trip, or spreads them over a
        part of it, whatever the line could take: on each stream alone. So an update that is small
        beside the window is there after half a round trip only if all streams carry a part of it.
        """
        return 1 if self._is_shaped or self.is_on_host else max(1, streams)

    def unsent_bytes(self, streams: int) -> int:
        """Return how many unsent bytes a stream's kernel buffer may hold."""
        return max(16 * 1024, min(256 * 1024, _KERNEL_BYTES // max(1, streams)))

    def ping_every_s(self) -> float | None:
        """The interval between heartbeats while the link is busy; None takes the usual one."""
        base_s = self.window.base_rtt_s
        if self._begun_s is None or base_s is None:
            return None
        return min(_PING_MAX_S, max(_PING_MIN_S, base_s / 4))

    @property
    def stall_limit_s(self) -> float:
        """How long chunks of a stream may make no progress before the stream is given up.

        A chunk is acknowledged as a whole. Where one takes longer than the limit every new stream
        would be given up like the last one, so the limit doubles each time, until chunks arrive
        in a small part of it again.
        """
        return self._config.silence_limit_s * self._stall_factor

    def on_stall(self) -> None:
        """Take in that streams were given up since they made no progress."""
        self._stall_factor = min(_MOST_STALL_FACTOR, 2.0 * self._stall_factor)

    def on_chunk(self, took_s: float) -> None:
        """Take in how long a chunk took from the sender to its acknowledgement."""
        if self._stall_factor > 1.0 and took_s < self._config.silence_limit_s / _PROMPT:
            self._stall_factor = max(1.0, _CALM * self._stall_factor)

    def may_send(self, in_flight_bytes: int) -> bool:
        """Return whether the window has room for a chunk."""
        if self._is_shaped or (self.is_on_host and in_flight_bytes < _ON_HOST_BYTES):
            return True
        return in_flight_bytes < self.window.room_bytes(self._now_s)

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Take in a heartbeat's round trip; the first one tells the distance of the peer."""
        self._now_s = now_s
        self.window.on_rtt(now_s, rtt_s)
        self._estimator.on_rtt(now_s, rtt_s)
        if self._count is None:
            smallest, largest = self._config.min_streams, self._config.max_streams
            if rtt_s > _NEAR_S:
                self._count = StreamCount(smallest, largest, _FIRST_FAR)
            else:
                self._count = StreamCount(smallest, max(smallest, min(largest, _MOST_NEAR)), 1)

    def on_acked(self, now_s: float, size_bytes: int, in_flight_bytes: int) -> None:
        """Take in an acknowledgement of chunks; ``in_flight_bytes`` were under way before."""
        self._acked_bytes += size_bytes
        self._estimator.on_delivered(now_s, size_bytes, self._had_more)
        self.window.on_acked(size_bytes, in_flight_bytes)

    def on_segments(self, now_s: float, sent: int, retransmitted: int) -> None:
        """Take in what the kernel has sent since the last call, over all streams."""
        self._estimator.on_segments(now_s, sent, retransmitted)

    def look(
        self, now_s: float, streams: int, *, is_busy: bool, has_more: bool, waits: bool
    ) -> None:
        """Observe the link's state at the end of a turn of the loop.

        Args:
            now_s: the time.
            streams: data streams that are open.
            is_busy: whether anything is under way or waits.
            has_more: whether something waits that is not under way.
            waits: whether it waits for a stream although the window has room.
        """
        self._now_s, self._had_more = now_s, has_more
        if now_s - self._estimated_s >= _ESTIMATE_EVERY_S:
            self._estimated_s = now_s
            self.estimate = self._estimator.snapshot(now_s)
        if self._was_waiting:
            self._waited_s += now_s - self._looked_s
        self._looked_s, self._was_waiting = now_s, waits
        if self._begun_s is None:
            if is_busy:
                self._begin(now_s, is_whole=True)
                self.window.begin(now_s)
            return
        base_s = self.window.base_rtt_s or 0.0
        if not is_busy:
            self._end(now_s, streams, base_s)
            self._begun_s = None
            self._was_waiting = False
        elif now_s - self._begun_s > max(_LONG_S, _LONG_RTTS * base_s):
            self._is_whole = False
            self._end(now_s, streams, base_s)
            self._begin(now_s, is_whole=False)

    def _begin(self, now_s: float, *, is_whole: bool) -> None:
        self._begun_s, self._is_whole = now_s, is_whole
        self._acked_bytes, self._waited_s = 0, 0.0

    def _end(self, now_s: float, streams: int, base_s: float) -> None:
        if self._begun_s is None or self._count is None:
            return
        lasted_s = now_s - self._begun_s
        # The tail of a long transfer is neither a whole burst nor a full stretch.
        is_tail = not self._is_whole and lasted_s < max(_LONG_S, _LONG_RTTS * base_s)
        if is_tail or self._acked_bytes < self._config.chunk_bytes:
            return
        waited = self._waited_s / lasted_s if lasted_s > 0.0 else 0.0
        if self._is_whole and lasted_s > _SHORT_RTTS * base_s:
            # After a pause TCP begins slowly on every stream, with the data in the kernel already.
            waited = 1.0
        most = self._config.max_streams
        if self.window.has_met_queue:
            most = int(self.window.size_bytes) // _FIRST_FLIGHT_BYTES
        stretch = Stretch(self._acked_bytes, lasted_s, streams, waited, self._is_whole, most)
        self._count.observe(now_s, stretch)
