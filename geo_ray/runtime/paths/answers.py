"""Where a region's request waits for its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from geo_ray.errors import DeadlineExceededError, GeoRayError, LinkDownError
from geo_ray.runtime.actors.deadlines import UNREACHABLE_S
from geo_ray.strategies.base import Reply

_LOOK_S: Final = 0.5  # between two looks at whether the averager's region is there


class Answers:
    """Passes answers, by the number of their update, from receiving threads to the waiting one.

    Args:
        region: this region.
        timeout_s: longest wait.
        is_reachable: whether there is a connection to a region at present.
        unreachable_s: how long the averager's region may be out of reach.
    """

    def __init__(
        self,
        region: str,
        timeout_s: float,
        is_reachable: Callable[[str], bool] = lambda region: True,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        self._region = region
        self._timeout_s = timeout_s
        self._is_reachable = is_reachable
        self._unreachable_s = unreachable_s
        self._changed = threading.Condition()
        self._here: dict[int, Reply | GeoRayError] = {}
        self._end: GeoRayError | None = None

    def give(self, reply: Reply) -> None:
        """Store the averager's answer for the thread that waits for it."""
        self._put(reply.seq, reply)

    def fail(self, seq: int, error: GeoRayError) -> None:
        """Let the wait for update ``seq``, which the averager refused, raise ``error``."""
        self._put(seq, error)

    def wait(self, seq: int, home: Callable[[], str]) -> Reply:
        """Return the answer to update ``seq`` once it is here.

        Args:
            seq: its number.
            home: gives the averager's region, which may change.

        Raises:
            DeadlineExceededError: it did not come in time.
            LinkDownError: the averager's region is out of reach, or the bridge is closing.
            GeoRayError: the update was refused, or what `end` was given.
        """
        began_s = reached_s = time.monotonic()
        while (answer := self._look(seq)) is None:
            now_s, peer = time.monotonic(), home()
            if peer == self._region or self._is_reachable(peer):
                reached_s = now_s
            elif now_s - reached_s > self._unreachable_s:
                raise LinkDownError(
                    f"region '{self._region}': the averager's region '{peer}' is out of reach "
                    f"since {self._unreachable_s:g} s; update {seq} is not answered"
                )
            if now_s - began_s > self._timeout_s:
                raise DeadlineExceededError(
                    f"region '{self._region}': the averager in '{peer}' did not answer update "
                    f"{seq} within train.step_timeout_s = {self._timeout_s:g} s; on a slow link a "
                    "large model may need longer"
                )
        if isinstance(answer, GeoRayError):
            raise answer
        return answer

    def _look(self, seq: int) -> Reply | GeoRayError | None:
        """Wait a little; the answer, if it is here. What is older is of no use to anybody."""
        with self._changed:
            if seq not in self._here and self._end is None:
                self._changed.wait(min(_LOOK_S, self._timeout_s))
            for old in [number for number in self._here if number < seq]:
                del self._here[old]
            if seq in self._here:
                return self._here.pop(seq)
            if self._end is not None:
                raise self._end
        return None

    def close(self) -> None:
        """Let every present and later `wait` fail because the bridge is closing."""
        self.end(LinkDownError(f"the bridge of region '{self._region}' is closing"))

    def end(self, error: GeoRayError) -> None:
        """Let every present and later `wait` raise ``error``; the first one counts."""
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()

    def _put(self, seq: int, answer: Reply | GeoRayError) -> None:
        with self._changed:
            self._here[seq] = answer
            self._changed.notify_all()
