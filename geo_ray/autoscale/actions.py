"""What the autoscaler does, with the reason and with what else it could have done."""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.providers.base import LaunchRequest, Pool


@dataclass(frozen=True, slots=True)
class Alternative:
    """A pool as it was judged.

    Attributes:
        pool: which.
        usd_per_hour: of one machine; None: no price is known.
        preemptions_per_h: that are expected of one.
        usd_per_million_rows: with what preemptions are expected to cost; None: no price is known.
        chosen: how many machines are taken from there.
        note: why none are, if it could not be taken.
    """

    pool: Pool
    usd_per_hour: float | None
    preemptions_per_h: float
    usd_per_million_rows: float | None
    chosen: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Machines are to be rented.

    Attributes:
        request: what is sent.
        region: of the run.
        reason: why.
        alternatives: all pools, the best first.
    """

    request: LaunchRequest
    region: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """A machine is to leave: nothing new is started there, and what runs goes home.

    Attributes:
        machine_id: which.
        region: of the run.
        reason: why.
        until_unix_s: when it will be gone at the latest.
    """

    machine_id: str
    region: str
    reason: str
    until_unix_s: float


@dataclass(frozen=True, slots=True)
class End:
    """A machine is to be given back.

    Attributes:
        machine_id: which.
        region: of the run; empty: not known.
        reason: why.
        only_idle: whether it stays if anything runs there by now.
    """

    machine_id: str
    region: str
    reason: str
    only_idle: bool = False


Action = Launch | Drain | End
