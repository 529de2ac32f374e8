"""Asks actors for news again and again; one that is slow to answer holds nobody else up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from geo_ray.clock import Clock, SystemClock
from geo_ray.errors import LeaseLostError
from geo_ray.runtime.cluster.ray_failures import failure_of

Handle = Any  # a Ray actor handle; Ray gives it no useful type
Key = tuple[str, str]
"""(role, region)."""


@dataclass(frozen=True, slots=True)
class _Question:
    handle: Handle
    ref: Any
    asked_s: float


@dataclass(slots=True)
class Polls:
    """One open question per actor.

    Attributes:
        timeout_s: who has not answered for that long is lost.
        clock: measures it.
        driver: who asks: epoch of the driver's lease.
    """

    timeout_s: float
    clock: Clock = field(default_factory=SystemClock)
    driver: int = 0
    _open: dict[Key, _Question] = field(default_factory=dict)

    def ask(
        self, handles: Mapping[Key, Handle], wait_s: float
    ) -> tuple[dict[Key, dict[str, Any]], dict[Key, str]]:
        """Ask everybody who is not asked yet, and take the answers that come within ``wait_s``.

        Returns:
            Answers, and why somebody is lost, by (role, region), in the order of ``handles``.

        Raises:
            LeaseLostError: they listen to another driver by now.
            HeadLostError: Ray itself does not answer.
            InvariantError: for every other failure of a call.
        """
        now_s = self.clock.now_s()
        kept = {k: q for k, q in self._open.items() if handles.get(k) is q.handle}
        for key, handle in handles.items():
            if key not in kept:
                kept[key] = _Question(handle, handle.poll.remote(self.driver), now_s)
        ready, _ = ray.wait([q.ref for q in kept.values()], num_returns=len(kept), timeout=wait_s)
        came, now_s = set(ready), self.clock.now_s()
        answers: dict[Key, dict[str, Any]] = {}
        lost: dict[Key, str] = {}
        for key in handles:
            question = kept[key]
            if question.ref in came:
                del kept[key]
                try:
                    answers[key] = ray.get(question.ref)
                except ray.exceptions.RayError as error:
                    failure = failure_of(error)
                    was_overtaken = isinstance(failure.raised, LeaseLostError)
                    if was_overtaken or not (failure.is_lost or failure.raised):
                        raise failure.as_error() from error
                    lost[key] = failure.cause
            elif now_s - question.asked_s >= self.timeout_s:
                del kept[key]
                lost[key] = f"it did not answer within {self.timeout_s:g} s"
        self._open = kept
        return answers, lost

    def silent_s(self) -> dict[Key, float]:
        """For how many seconds who is asked has not answered, by (role, region)."""
        now_s = self.clock.now_s()
        return {key: now_s - question.asked_s for key, question in self._open.items()}
