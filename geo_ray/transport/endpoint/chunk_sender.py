"""Decides which chunk goes out on which stream, and which is sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from geo_ray.errors import FrameError
from geo_ray.transport.endpoint.outbox import Chunk
from geo_ray.transport.endpoint.session_side import SessionSide
from geo_ray.transport.endpoint.stream import Stream
from geo_ray.transport.wire.fields import counts
from geo_ray.transport.wire.message import ALL_LANES, CONTROL_LANE, DATA_LANES, RESEND
from geo_ray.transport.wire.meta import Meta

_TIMES_SENT: Final = 3
_LATE_FACTOR: Final = 2.5
_LATE_MIN_S: Final = 0.05
_BLEND: Final = 0.1


class ChunkSender:
    """Sends the chunks of a connection; only the loop's thread may use it.

    Args:
        link_id: id of the connection.
        session: session of the connection.
        write: hands a stream's buffers to the kernel; must not raise if the stream fails.

    Attributes:
        late_s: a chunk that was not acknowledged for that many seconds is sent again when streams
            are idle; learned from other chunks.
    """

    def __init__(self, link_id: str, session: SessionSide, write: Callable[[Stream], None]) -> None:
        self.late_s = 1.0
        self._link_id = link_id
        self._session = session
        self._write = write

    def run(self, control: Stream, streams: Sequence[Stream], now_s: float) -> None:
        """Hand out chunks as long as there are chunks, room and window.

        The window is the link's, whatever the streams. Control messages do not wait for data, but
        for a window's worth of their own: at most two windows are under way.

        Args:
            control: stream for control messages; it takes all chunks while there is no data stream.
            streams: data streams that take chunks.
            now_s: the time.
        """
        session, flow = self._session, self._session.flow
        size_bytes, shares = flow.chunk_bytes(len(streams)), flow.shares(len(streams))
        while control.has_room():
            chunk = None
            if flow.may_send(session.in_flight_bytes(CONTROL_LANE)):
                chunk = self._next(CONTROL_LANE, size_bytes, now_s)
            if chunk is None and not streams and flow.may_send(session.in_flight_bytes(ALL_LANES)):
                chunk = self._next(DATA_LANES, size_bytes, now_s)
            if chunk is None:
                break
            self._hand(control, chunk, now_s)
        ready = [stream for stream in streams if stream.has_room()]
        while ready:
            for stream in list(ready):
                if not flow.may_send(session.in_flight_bytes(ALL_LANES)):
                    return
                chunk = self._next(DATA_LANES, size_bytes, now_s, shares)
                if chunk is None:
                    chunk = self._late(stream, [control, *streams], now_s)
                if chunk is None:
                    return
                self._hand(stream, chunk, now_s)
                if not stream.has_room():
                    ready.remove(stream)

    def take_acks(self, meta: Meta, streams: Sequence[Stream], now_s: float) -> None:
        """Take in an acknowledgement of the peer's.

        Raises:
            FrameError: the acknowledgement makes no sense.
        """
        flat, delivered = counts(meta, "chunks"), counts(meta, "delivered")
        if len(flat) % 3:
            raise FrameError("an acknowledgement is cut short")
        keys = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        before_bytes = self._session.in_flight_bytes(ALL_LANES)
        acked = self._session.acknowledged(self._link_id, keys, delivered)
        for stream in streams:
            for key in keys:
                if stream.chunks.pop(key, None) is not None:
                    stream.progress_s = now_s
        if not acked:
            return
        for chunk in acked:
            if chunk.times_sent == 1:
                took_s = now_s - chunk.sent_s
                late_s = max(_LATE_MIN_S, _LATE_FACTOR * took_s)
                self.late_s += _BLEND * (late_s - self.late_s)
                self._session.flow.on_chunk(took_s)
        size_bytes = sum(chunk.size_bytes for chunk in acked)
        self._session.flow.on_acked(now_s, size_bytes, before_bytes)

    def _next(self, lanes: range, size_bytes: int, now_s: float, shares: int = 1) -> Chunk | None:
        return self._session.next_chunk(self._link_id, lanes, size_bytes, now_s, shares)

    def _late(self, stream: Stream, holders: list[Stream], now_s: float) -> Chunk | None:
        """Return a chunk that has been under way for too long, when nothing new is to be sent."""
        before_s = now_s - self.late_s
        chunk = self._session.straggler(self._link_id, before_s, _TIMES_SENT, now_s, stream.chunks)
        if chunk is not None:
            for holder in holders:  # see `Chunk.frame`
                if chunk.key in holder.chunks and not holder.is_idle:
                    holder.keep_copies()
        return chunk

    def _hand(self, stream: Stream, chunk: Chunk, now_s: float) -> None:
        if not stream.chunks:
            stream.progress_s = now_s
        stream.chunks[chunk.key] = chunk
        traffic = chunk.entry.message.traffic if chunk.times_sent == 1 else RESEND
        stream.put(chunk.frame(), traffic)
        self._write(stream)
