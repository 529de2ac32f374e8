"""A region's way to its bridge, which may be replaced while the region goes on."""

from __future__ import annotations

import threading
import time

from geo_ray.errors import GeoRayError, LinkDownError
from geo_ray.runtime.actors.deadlines import UNREACHABLE_S
from geo_ray.runtime.actors.uplink import Uplink
from geo_ray.transport.lan.client import LanClient


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
        self.uplink = Uplink(client)

    def use(self, client: LanClient) -> None:
        """There is another bridge: the one before is lost."""
        with self._changed:
            self._old.append(self.uplink)
            self.uplink = Uplink(client)
            self._changed.notify_all()

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
            self._changed.notify_all()

    def await_next(self) -> Uplink:
        """Return an uplink that is not lost, once there is one.

        Raises:
            LinkDownError: there was none for so long that nobody waits any more.
            GeoRayError: what `end` was given.
        """
        deadline_s = time.monotonic() + UNREACHABLE_S
        with self._changed:
            while self.uplink.is_lost:
                left_s = deadline_s - time.monotonic()
                if self._end is not None:
                    raise self._end
                if left_s <= 0:
                    raise LinkDownError(
                        f"the bridge of region '{self._region}' is lost, and there was no other "
                        f"one within {UNREACHABLE_S:g} s"
                    )
                self._changed.wait(left_s)
            return self.uplink
