"""The way of a region's update to the averager and of the answer back: what every path offers.

A bridge has one `UpdatePath`, chosen when the bridge is built (`geo_ray.runtime.paths.build`):

    direct    the averager has one home; updates and answers are single messages
    standby   the averager may move; the same, and a log for its standby
    overlay   the updates of a round are summed on their way

On a direct path and one with a standby, an `UpdateStage` says when an update leaves and when it is
taken in: at once (`PlainStage`), in turns (`transfers`), or in two parts, of which one may be lost
(`differential`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from geo_ray.errors import GeoRayError, InvariantError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.home import AveragerHome
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

Route = Callable[[str, Message], None]
"""Takes a message of another region: (its sender, the message)."""

Routes = Mapping[str, Route]
"""Handlers by kind of message."""


class UpdatePath(Protocol):
    """How one region's updates get to the averager; see the module's docstring."""

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives at present."""

    def exchange(self, update: Update) -> Reply | None:
        """Bring an update of the own region to the averager; blocks until it is answered.

        Returns:
            The answer; None if nobody took the update in, or will.

        Raises:
            GeoRayError: it was refused, not answered in time, or the path closes.
        """

    def recall(self) -> Meta:
        """Stop sending what is left of the last update; what did not leave, as a header."""

    def routes(self) -> Routes:
        """Handlers of this path's messages; they may be called as soon as it is built."""

    def on_address(self, peer: str, address: Address) -> None:
        """The endpoint of ``peer`` is at ``address``."""

    def request_stop(self) -> None:
        """Let the averager tell all regions to finish."""

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Let the averager begin a checkpoint; False if it cannot be now."""

    def report_dead(self, region: str) -> None:
        """The controller has seen that ``region`` is dead and will not come back."""

    def status(self) -> dict[str, Any]:
        """The averager's home and version, and counters: plain values."""

    def count_into(self, links: Mapping[str, Any]) -> None:
        """Add traffic beside the endpoint's to the endpoint's counters."""

    def close(self) -> None:
        """End all threads; whoever waits for an answer is told."""


class UpdateStage(Protocol):
    """When an update leaves its region, when the averager takes it in, and what its answer holds.

    The first half is asked in the region that an update is of, the other at the averager's home.
    """

    def depart(self, update: Update, ship: Callable[[Update], None], *, again: bool) -> None:
        """Send an update of the own region.

        Args:
            update: which; its payload must stay as it is until it is answered.
            ship: sends it; called when it may leave, if ever.
            again: an earlier home of the averager had answered it already.
        """

    def answered(self, reply: Reply) -> Reply:
        """An answer for the own region is here; as the region shall see it."""

    def recall(self) -> Meta:
        """See `UpdatePath.recall`."""

    def arrive(self, update: Update, take: Callable[[Update], None], *, again: bool) -> None:
        """An update is at the averager's home.

        Args:
            update: which.
            take: takes it in; called when it is its turn, if ever.
            again: an earlier home of the averager had answered it already.
        """

    def beside(self, reply: Reply) -> Reply:
        """An answer leaves the averager's home; with all that goes beside it."""

    def on_moved(self) -> None:
        """The averager has moved: nobody at its new home knows of what was asked before."""

    def routes(self) -> Routes:
        """Handlers of this stage's messages."""

    def on_address(self, peer: str, address: Address) -> None:
        """See `UpdatePath.on_address`."""

    def status(self) -> dict[str, Any]:
        """Counters."""

    def count_into(self, links: Mapping[str, Any]) -> None:
        """See `UpdatePath.count_into`."""

    def close(self) -> None:
        """End all threads."""


class StagedPath(Protocol):
    """What a stage may ask of the path that it belongs to."""

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives at present."""

    def send(self, to: str, message: Message) -> None:
        """Send a message to another region."""

    def give(self, reply: Reply) -> None:
        """Hand an answer to the own region, which waits for it."""

    def version(self) -> int:
        """At the averager's home: commits so far, and those that are bound to come."""

    def skip(self, region: str, epoch: int, seq: int) -> None:
        """At the averager's home: answer an update without taking it in."""

    def take_sum(self, parts: tuple[Update, ...], total_P: Tensor) -> list[Reply] | None:
        """At the averager's home: take in a sum of updates; None if it must come in parts.

        Raises:
            GeoRayError: the averager refuses it.
        """

    def deliver(self, reply: Reply) -> None:
        """At the averager's home: send an answer on its way."""

    def refuse(self, update: Update, error: GeoRayError) -> None:
        """At the averager's home: tell an update's region that it was refused."""


StageMaker = Callable[[StagedPath], UpdateStage]
"""Builds a path's stage; the path calls it in its constructor."""


class PlainStage:
    """Every update leaves at once and is taken in when it comes."""

    def depart(self, update: Update, ship: Callable[[Update], None], *, again: bool) -> None:
        """See `UpdateStage`, as for all that follows."""
        ship(update)

    def answered(self, reply: Reply) -> Reply:
        """The answer as it is."""
        return reply

    def recall(self) -> Meta:
        """Nothing is on its way in parts."""
        return {"seq": None}

    def arrive(self, update: Update, take: Callable[[Update], None], *, again: bool) -> None:
        """Take it in."""
        take(update)

    def beside(self, reply: Reply) -> Reply:
        """The answer as it is."""
        return reply

    def on_moved(self) -> None:
        """Nothing was asked."""

    def routes(self) -> Routes:
        """There are none."""
        return {}

    def on_address(self, peer: str, address: Address) -> None:
        """The endpoint knows it."""

    def status(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def count_into(self, links: Mapping[str, Any]) -> None:
        """Everything passes the endpoint."""

    def close(self) -> None:
        """There is nothing to end."""


def joined(*tables: Routes) -> dict[str, Route]:
    """One table of handlers.

    Raises:
        InvariantError: two of them handle messages of one kind.
    """
    found: dict[str, Route] = {}
    for table in tables:
        twice = sorted(found.keys() & table.keys())
        if twice:
            raise InvariantError(f"messages of the kinds {twice} have two handlers")
        found |= table
    return found
