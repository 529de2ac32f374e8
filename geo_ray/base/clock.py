"""Clocks as dependencies: state machines never read a clock, their callers pass the time."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final, Protocol


class Clock(Protocol):
    """A clock that can be read and slept on."""

    def now_s(self) -> float:
        """Seconds since an arbitrary, fixed origin; never goes back."""

    def sleep_s(self, duration_s: float) -> None:
        """Return after ``duration_s`` seconds of this clock (at once if it is not positive)."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.monotonic()

    def sleep_s(self, duration_s: float) -> None:
        """See `Clock.sleep_s`."""
        if duration_s > 0:
            time.sleep(duration_s)


class BootClock(SystemClock):
    """A clock that also counts while the machine is suspended; for leases.

    Linux stops its monotonic clock during a suspend. Systems that do not have a clock of this kind
    use the monotonic clock.
    """

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        boot_clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


class VirtualClock:
    """The simulator's clock, which only moves explicitly."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        """Advance the clock without waiting."""
        self.advance_to_s(self._now_s + max(0.0, duration_s))

    def advance_to_s(self, when_s: float) -> None:
        """Set the time to ``when_s``.

        Raises:
            ValueError: the time is in the past.
        """
        if when_s < self._now_s:
            raise ValueError(f"virtual time would go back from {self._now_s} to {when_s}")
        self._now_s = when_s


COMMAND_BEGAN_UNIX_S: Final = ContextVar[float | None]("command_began_unix_s", default=None)
"""Time of day at which the current command began; None without a command."""


def command_began_unix_s() -> float:
    """Return the start of a run's start-up time: the beginning of the command, or now."""
    began = COMMAND_BEGAN_UNIX_S.get()
    return time.time() if began is None else min(began, time.time())
