"""The way of a region's update to the averager and of the answer back: what every path offers.

A bridge has one `UpdatePath`, chosen when the bridge is built (`geo_ray.runtime.paths.build`):

    direct    the averager has one home; updates and answers are single messages
    standby   the averager may move; the same, and a log for its standby
    overlay   the updates of a round are summed on their way

The path's `UpdateStage` says when an update leaves and when it is taken in: at once (the plain
stage), in turns (`transfers`), or in two parts, of which one may be lost (`differential`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from geo_ray.errors import GeoRayError, InvariantError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import Begun, ChangeMembers, ChangePace
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

Route = Callable[[str, Message], None]
"""Takes a message of another region: (its sender, the message)."""

Routes = Mapping[str, Route]
"""Handlers by kind of message."""

Pass = Callable[[Update], None]
"""Takes an update that a stage lets pass."""


@dataclass(frozen=True, slots=True)
class UpdateStage:
    """When an update leaves its region and is taken in; the defaults are the plain stage.

    Attributes:
        depart: (update, ship, again) in its region: ship it when it may leave, if ever. Its payload
            stays as it is until it is answered. Again: an earlier home had answered it already.
        answered: an answer is in its region; gives it as the region shall see it.
        recall: stop sending what is left of the last update; gives what did not leave, as a header.
        arrive: (update, take, again) at the averager's home: take it in when it is its turn.
        beside: an answer leaves the averager's home; gives it with all that goes beside it.
        on_moved: the averager has moved: nobody at its new home knows what was asked before.
        on_address: (region, address): where a region's endpoint is.
        routes: handlers of the stage's messages.
        export: (last) what the averager's part of a checkpoint must hold of the stage, as plain
            values; ``last(region)`` is the newest update that the averager has taken in.
        status: (links) adds traffic beside the endpoint's to its counters; gives its own.
        close: end all threads.
    """

    depart: Callable[[Update, Pass, bool], None] = lambda update, ship, again: ship(update)
    answered: Callable[[Reply], Reply] = lambda reply: reply
    recall: Callable[[], Meta] = lambda: {"seq": None}
    arrive: Callable[[Update, Pass, bool], None] = lambda update, take, again: take(update)
    beside: Callable[[Reply], Reply] = lambda reply: reply
    on_moved: Callable[[], None] = lambda: None
    on_address: Callable[[str, Address], None] = lambda region, address: None
    routes: Routes = field(default_factory=dict)
    export: Callable[[Callable[[str], tuple[int, int]]], dict[str, object]] = lambda last: {}
    status: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda links: {}
    close: Callable[[], None] = lambda: None


class UpdatePath(Protocol):
    """How one region's updates get to the averager; see the module's docstring."""

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives at present."""

    @property
    def stage(self) -> UpdateStage:
        """Its stage; the bridge hands messages, addresses and the end on to it."""

    def exchange(self, update: Update) -> Reply:
        """Bring an update of the own region to the averager; blocks until it is answered.

        Returns:
            The answer.

        Raises:
            GeoRayError: it was refused, not answered in time, or the path closes.
        """

    def routes(self) -> Routes:
        """Handlers of its own messages."""

    def request_stop(self) -> None:
        """Let the averager, which is here, tell all regions to finish."""

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Let the averager, which is here, begin a checkpoint; False if it cannot be now."""

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """The controller has seen that ``region`` is dead.

        Args:
            region: which.
            comes_back: only its bridge is, and there will be another: the averager that lived there
                moves, and the region is waited for.
        """

    def tell_members(self, op: ChangeMembers | Begun | ChangePace) -> None:
        """What the controller has to tell the averager, which is here, of its members.

        Raises:
            InvariantError: members cannot change here (`why_fixed`, `why_nobody_joins`).
            GeoRayError: the averager refuses it.
        """

    def status(self) -> dict[str, Any]:
        """The averager's version and open requests if it is here, and counters: plain values."""

    def close(self) -> None:
        """End all threads; whoever waits for an answer is told."""


class StagedPath(Protocol):
    """What a stage may ask of its path; all but the first three at the averager's home only."""

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives at present."""

    def send(self, to: str, message: Message) -> None:
        """Send a message to another region."""

    def give(self, reply: Reply) -> None:
        """Hand an answer to the own region, which waits for it."""

    def version(self) -> int:
        """Commits so far, and those that are bound to come."""

    def skip(self, region: str, epoch: int, seq: int) -> None:
        """Answer an update without taking it in."""

    def take_sum(self, parts: tuple[Update, ...], total_P: Tensor) -> list[Reply] | None:
        """Take in a sum of updates; None if it must come in parts.

        Raises:
            GeoRayError: the averager refuses it.
        """

    def deliver(self, reply: Reply) -> None:
        """Send an answer on its way."""

    def refuse(self, update: Update, error: GeoRayError) -> None:
        """Tell an update's region that it was refused."""

    def fail(self, error: Exception, doing: str) -> None:
        """A thread of the stage has met an error of which nobody else would hear."""


StageMaker = Callable[[StagedPath], UpdateStage]
"""Builds a path's stage; the path calls it in its constructor."""


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
