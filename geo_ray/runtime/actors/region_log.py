"""Turns what happens in a region into events."""

from __future__ import annotations

from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.strategies.base import Reply
from geo_ray.training.server.effects import SendUpdate, StepDone


class RegionLog:
    """Steps and exchanges of one region, with their times.

    Args:
        event_buffer: takes the events.
    """

    def __init__(self, event_buffer: EventBuffer) -> None:
        self._buffer = event_buffer
        self._began_s = self._applied_s = event_buffer.now_s()

    def begin(self) -> None:
        """Workers are given a step."""
        self._began_s = self._buffer.now_s()

    def step(self, done: StepDone) -> None:
        """A step is applied."""
        now_s = self._buffer.now_s()
        self._buffer.add("step", **done.event(self._began_s, self._applied_s, now_s))
        self._applied_s = now_s
        for cause in done.refused:
            self._buffer.add("step_refused", step=done.step, cause=cause)
        if done.noise is not None:
            self._buffer.add("noise", **done.noise.fields())

    def exchange(self, send: SendUpdate, reply: Reply, began_s: float, num_params: int) -> None:
        """An answer is here.

        Args:
            send: the request.
            reply: the answer.
            began_s: when the request began.
            num_params: of what was exchanged.
        """
        if reply.dropped:
            self._buffer.add("update_dropped", seq=reply.seq, bytes_out=0)
            return
        event = send.event(send.update, reply, began_s, 4 * num_params)
        self._buffer.add("exchange", **event)
