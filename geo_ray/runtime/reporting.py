"""`RunServices`: what the parts of a run loop need from it. The controller implements it."""

from __future__ import annotations

from typing import Any, Protocol

from geo_ray.runs.requests import MemberRequest


class StatusLine(Protocol):
    """Shows the current activity of a run."""

    def __call__(self, text: str, /) -> None:
        """Show a line to the user; an empty one clears it."""
        ...


class MemberRequests(Protocol):
    """Source of membership requests from users."""

    def __call__(self) -> list[MemberRequest]:
        """Return the requests since the last call."""
        ...


class PlanServices(Protocol):
    """The run loop's interface for replanning."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Record an event at the current time."""
        ...

    def show(self, text: str) -> None:
        """Show a line to the user; an empty one clears it."""
        ...

    def set_interval(self, interval: int) -> None:
        """Set the number of local steps between exchanges, for all regions."""
        ...

    def move_averager(self) -> None:
        """Move the averager to its standby's region."""
        ...


class RunServices(PlanServices, Protocol):
    """The run loop's interface for its watches and its membership."""

    @property
    def is_ending(self) -> bool:
        """Whether the run was asked to finish or to halt."""
        ...

    def now_s(self) -> float:
        """Return the current time of the run's clock."""
        ...

    def ask_averager(self, method: str, *arguments: Any) -> Any:
        """Call the bridge that hosts the averager and wait for its answer.

        Returns:
            The answer; None if the averager is lost and will be replaced, or if the request no
            longer applies to its state.
        """
        ...

    def process_news(self) -> None:
        """Process the pending events of all servers and bridges."""
        ...

    def admit_region(self, region: str, step: int, attempt: int) -> None:
        """Admit a region as a member.

        Args:
            region: its name.
            step: step of the state that it starts from.
            attempt: attempt of its processes.
        """
        ...

    def drop_region(self, region: str) -> None:
        """Continue without a region that has left."""
        ...

    def lose_region(self, region: str, cause: str) -> None:
        """Continue without a region that is lost."""
        ...


def no_requests() -> list[MemberRequest]:
    """Return no requests: the run has no source of membership requests."""
    return []


def show_nothing(text: str) -> None:
    """Show nothing: the run has no watcher."""
