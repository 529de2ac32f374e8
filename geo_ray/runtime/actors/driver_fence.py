"""Which driver a process listens to: the one with the newest lease."""

from __future__ import annotations

import threading

from geo_ray.errors import LeaseLostError


class DriverFence:
    """Any thread may ask."""

    def __init__(self) -> None:
        self._newest = 0
        self._changed = threading.Condition()

    def check(self, driver: int) -> None:
        """A driver asks; those before it are refused from now on.

        Args:
            driver: epoch of its lease.

        Raises:
            LeaseLostError: a later one has asked.
        """
        with self._changed:
            if driver < self._newest:
                raise _overtaken(driver, self._newest)
            if driver > self._newest:
                self._newest = driver
                self._changed.notify_all()

    def wait(self, driver: int, longest_s: float) -> None:
        """Wait for a while, on behalf of a driver.

        Raises:
            LeaseLostError: a later one has asked, before or meanwhile.
        """
        with self._changed:
            if self._changed.wait_for(lambda: driver < self._newest, longest_s):
                raise _overtaken(driver, self._newest)


def _overtaken(driver: int, by: int) -> LeaseLostError:
    return LeaseLostError(
        f"the run was taken over by holder {by} of its lease; this process was holder {driver}"
    )
