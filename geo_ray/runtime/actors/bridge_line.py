"""A region's way to its bridge, whose connection may break, and which may be replaced.

A connection that breaks says nothing about the bridge: it may live on. So it is dialled again, for
as long as nobody has told of another bridge. The controller is told for how long that has been in
vain, and takes the bridge for dead after a while.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

from geo_ray.errors import GeoRayError, LinkDownError, TransportError
from geo_ray.runtime.actors.deadlines import UNREACHABLE_S
from geo_ray.runtime.actors.uplink import Uplink
from geo_ray.transport.lan.client import LanClient

_DIAL_S: Final = 1.0  # longest attempt, and least time between two
_STEADY_S: Final = 5.0  # what breaks sooner was no mending


class BridgeLine:
    """Gives the present uplink; for one thread that asks, and any that tell.

    Args:
        region: this region.
        client: the connection to its first bridge.
    """

    def __init__(self, region: str, client: LanClient) -> None:
        self._region = region
        self._changed = threading.Condition()
        self._end: GeoRayError | None = None
        self._old: list[Uplink] = []
        self._dialled: Uplink | None = None  # this line's own to close
        self._lost_s: float | None = None
        self._dialled_s = -_STEADY_S
        self.uplink = Uplink(client)

    @property
    def away_s(self) -> float | None:
        """For how long the bridge has not been reached; None: it is, or nobody has tried."""
        lost_s = self._lost_s
        is_lost = lost_s is not None and self.uplink.is_lost
        return time.monotonic() - lost_s if lost_s is not None and is_lost else None

    def use(self, client: LanClient) -> None:
        """There is another bridge: the one before is lost."""
        with self._changed:
            self._follow(Uplink(client))
            self._lost_s = None

    def drop_old(self) -> None:
        """Free the memory that was shared with earlier bridges: nothing that is needed lies there.

        A bridge may have died while nothing was asked of it, so that nobody has noticed.
        """
        with self._changed:
            old, self._old = self._old, []
        for uplink in old:
            uplink.close()

    def end(self, error: GeoRayError) -> None:
        """Let every present and later `await_next` raise ``error``."""
        with self._changed:
            self._end = self._end or error
            dialled, self._dialled = self._dialled, None
            self._changed.notify_all()
        if dialled is not None:
            dialled.close()

    def await_next(self) -> Uplink:
        """Return an uplink that is not lost, once there is one.

        Raises:
            LinkDownError: there was none for so long that nobody waits any more.
            GeoRayError: what `end` was given.
        """
        began_s = time.monotonic()
        with self._changed:
            if self.uplink.is_lost and began_s - self._dialled_s > _STEADY_S:
                self._lost_s = began_s
        while True:
            with self._changed:
                lost = self.uplink
                if not lost.is_lost:
                    return lost
                if self._end is not None:
                    raise self._end
                if time.monotonic() - began_s > UNREACHABLE_S:
                    raise LinkDownError(
                        f"the bridge of region '{self._region}' is lost, and there was no other "
                        f"one within {UNREACHABLE_S:g} s"
                    )
                pause_s = self._dialled_s + _DIAL_S - time.monotonic()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
            self._dial(lost)

    def _dial(self, lost: Uplink) -> None:
        """Try the same bridge again; nobody who tells of another one waits for that."""
        fresh: Uplink | None = None
        with suppress(TransportError):  # it is dead, or who has its port now is somebody else
            fresh = lost.again(_DIAL_S)
        with self._changed:
            self._dialled_s = time.monotonic()
            if fresh is not None and self.uplink is lost and self._end is None:
                self._follow(fresh)
                self._dialled = fresh
                return
        if fresh is not None:
            fresh.close()

    def _follow(self, uplink: Uplink) -> None:
        self._old.append(self.uplink)
        self.uplink = uplink
        self._changed.notify_all()
