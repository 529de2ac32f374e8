"""Tracks which start of a peer this side talks to: pure bookkeeping."""

from __future__ import annotations

from geo_ray.errors import PeerRefusedError
from geo_ray.transport.wire.fields import count, text
from geo_ray.transport.wire.meta import Meta


class Incarnation:
    """The newest start of a peer that has connected.

    Args:
        peer: the peer's region.

    Attributes:
        epoch: the epoch of that start; -1 before the first.
    """

    def __init__(self, peer: str) -> None:
        self.epoch = -1
        self._peer = peer
        self._instance = ""

    def is_same(self, hello: Meta) -> bool:
        """Return whether a hello comes from the known start; False for a newer one.

        Raises:
            PeerRefusedError: the hello comes from an older start, or from a second endpoint of the
                same epoch.
            FrameError: the hello is malformed.
        """
        epoch, instance = count(hello, "epoch"), text(hello, "instance")
        if epoch < self.epoch:
            raise PeerRefusedError(
                f"region {self._peer} comes with epoch {epoch}, but its epoch {self.epoch} "
                "was here already"
            )
        if epoch == self.epoch and instance != self._instance:
            raise PeerRefusedError(
                f"two endpoints claim to be region {self._peer} in epoch {epoch}: "
                f"{instance!r:.100} and {self._instance!r}",
                fix="Give a restarted endpoint a higher epoch.",
            )
        return epoch == self.epoch

    def replace(self, hello: Meta) -> bool:
        """Make the hello's sender the present start; return whether there was another before."""
        had_one = self.epoch >= 0
        self.epoch, self._instance = count(hello, "epoch"), text(hello, "instance")
        return had_one
