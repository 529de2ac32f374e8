"""What the bridges of an averager that may move tell each other (`StandbyNode`)."""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.errors import GeoRayError
from geo_ray.strategies.base import Reply
from geo_ray.training.averager.log import LogEntry, Skip, TakeIn
from geo_ray.training.averager.twin import AveragerTwin


@dataclass(frozen=True, slots=True)
class AveragerRequest:
    """To the averager: do this.

    Attributes:
        op: what.
        again: an earlier home had done and answered it: it must not be given up now.
    """

    op: TakeIn | Skip
    again: bool = False


@dataclass(frozen=True, slots=True)
class AveragerAnswer:
    """From the home of ``epoch``: an answer, its number in the log, how far the standby is."""

    epoch: int
    reply: Reply
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class AveragerRefusal:
    """From the home of ``epoch``: update ``seq`` is refused."""

    epoch: int
    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class LogAppend:
    """To the standby: the next entry.

    Attributes:
        epoch: of the home.
        entry: the entry.
        counts: see `ShipEntry`; known at the sender only.
    """

    epoch: int
    entry: LogEntry
    counts: bool = True


@dataclass(frozen=True, slots=True)
class LogTwin:
    """To who is to stand by: the averager as it was after entry ``number``."""

    epoch: int
    number: int
    twin: AveragerTwin


@dataclass(frozen=True, slots=True)
class LogAck:
    """To the averager: everything up to ``number`` is here.

    Attributes:
        epoch: of the home.
        number: of the newest entry.
        follows: whether there is an averager here that carries entries out; else nothing is here.
    """

    epoch: int
    number: int
    follows: bool = True


@dataclass(frozen=True, slots=True)
class AveragerLost:
    """To the standby: whether the home of ``epoch`` is lost."""

    epoch: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewAverager:
    """From the new home; with the newest update of the receiver that is known there."""

    epoch: int
    last: tuple[int, int]


StandbyMessage = (
    AveragerRequest
    | AveragerAnswer
    | AveragerRefusal
    | LogAppend
    | LogTwin
    | LogAck
    | AveragerLost
    | NewAverager
)
