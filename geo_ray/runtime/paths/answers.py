"""Where a region's request waits for its answer."""

from __future__ import annotations

import threading
import time

from geo_ray.errors import DeadlineExceededError, GeoRayError, LinkDownError
from geo_ray.strategies.base import Reply


class Answers:
    """Passes answers, by the number of their update, from receiving threads to the waiting one.

    Args:
        region: this region.
        timeout_s: longest wait.
    """

    def __init__(self, region: str, timeout_s: float) -> None:
        self._region = region
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._here: dict[int, Reply | GeoRayError] = {}
        self._closed = False

    def give(self, reply: Reply) -> None:
        """Store the averager's answer for the thread that waits for it."""
        self._put(reply.seq, reply)

    def fail(self, seq: int, error: GeoRayError) -> None:
        """Let the wait for update ``seq``, which the averager refused, raise ``error``."""
        self._put(seq, error)

    def wait(self, seq: int, home: str) -> Reply:
        """Return the answer to update ``seq`` once it is here.

        Args:
            seq: its number.
            home: the averager's region, for the error.

        Raises:
            DeadlineExceededError: it did not come in time.
            LinkDownError: the bridge is closing.
            GeoRayError: the update was refused.
        """
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            while seq not in self._here:
                if self._closed:
                    raise LinkDownError(f"the bridge of region '{self._region}' is closing")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise DeadlineExceededError(
                        f"region '{self._region}': the averager in '{home}' did not answer "
                        f"update {seq} within train.step_timeout_s = {self._timeout_s:g} s; on a "
                        "slow link a large model may need longer"
                    )
            answer = self._here.pop(seq)
        if isinstance(answer, GeoRayError):
            raise answer
        return answer

    def close(self) -> None:
        """Let every present and later `wait` fail because the bridge is closing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, seq: int, answer: Reply | GeoRayError) -> None:
        with self._changed:
            self._here[seq] = answer
            self._changed.notify_all()
