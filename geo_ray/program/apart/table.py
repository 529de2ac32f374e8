"""Where the instances and bridges of a program are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from geo_ray.errors import FrameError
from geo_ray.transport.wire.sockets import Address


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One state of it.

    Attributes:
        number: a higher one is newer.
        regions: of all instances.
        nodes: addresses of those that stand.
        bridges: addresses for the processes of their own region.
    """

    number: int = 0
    regions: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, Address] = field(default_factory=dict)
    bridges: Mapping[str, Address] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """For `pack`."""
        return [self.number, dict(self.regions), dict(self.nodes), dict(self.bridges)]

    @classmethod
    def of_plain(cls, plain: Any) -> NodeTable:
        """The inverse of `plain`.

        Raises:
            FrameError: it is none.
        """
        try:
            number, regions, nodes, bridges = plain
            return cls(int(number), dict(regions), _addresses(nodes), _addresses(bridges))
        except (TypeError, ValueError) as error:
            raise FrameError(f"what was to be a table of nodes is none: {error}") from error


def _addresses(plain: Any) -> dict[str, Address]:
    return {str(name): (str(host), int(port)) for name, (host, port) in dict(plain).items()}
