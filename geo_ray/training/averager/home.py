"""Where the averager lives."""

from __future__ import annotations

from typing import NamedTuple


class AveragerHome(NamedTuple):
    """The region whose bridge hosts the averager, and how often the averager has moved.

    There is one home at the start of a run, and one more with every takeover. Whoever knows a home
    of a higher epoch follows no lower one.

    Attributes:
        region: its name.
        epoch: 1 for the home that the configuration names; grows by 1 with every takeover.
    """

    region: str
    epoch: int = 1
