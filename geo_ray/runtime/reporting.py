"""What the parts of a run loop ask of it: `RunServices`, which the controller implements."""

from __future__ import annotations

from typing import Any, Protocol

from geo_ray.runs.requests import MemberRequest


class StatusLine(Protocol):
    """Shows what a run does."""

    def __call__(self, text: str, /) -> None:
        """Show a line to the user; an empty one clears it."""
        ...


class MemberRequests(Protocol):
    """Takes what users ask of a run's members."""

    def __call__(self) -> list[MemberRequest]:
        """Return the requests since the last call."""
        ...


class RunServices(Protocol):
    """A run loop, as the watches and the membership of its run see it."""

    @property
    def is_ending(self) -> bool:
        """Whether the run is told to finish or to halt."""
        ...

    def now_s(self) -> float:
        """Return the time of the run's clock."""
        ...

    def emit(self, kind: str, **fields: Any) -> None:
        """Record an event of now."""
        ...

    def show(self, text: str) -> None:
        """Show a line to the user; an empty one clears it."""
        ...

    def ask_averager(self, method: str, *arguments: Any) -> Any:
        """Call the bridge that hosts the averager and wait for its answer.

        Returns:
            The answer; None if the averager is lost and will be replaced, or if the request no
            longer fits what the averager does.
        """
        ...

    def set_interval(self, interval: int) -> None:
        """Have all regions exchange after so many local steps."""
        ...

    def move_averager(self) -> None:
        """Have the averager move to its standby's region."""
        ...

    def hear_all(self) -> None:
        """Take in the news of all servers and bridges."""
        ...

    def admit_region(self, region: str, step: int, attempt: int) -> None:
        """Count a region as a member.

        Args:
            region: its name.
            step: the steps behind it.
            attempt: of its processes.
        """
        ...

    def drop_region(self, region: str) -> None:
        """Continue without a region that has left."""
        ...

    def lose_region(self, region: str, cause: str) -> None:
        """Continue without a region that is lost."""
        ...


def no_requests() -> list[MemberRequest]:
    """Return no requests: nobody asks to change the run's members."""
    return []


def show_nothing(text: str) -> None:
    """Show nothing: nobody watches the run."""
