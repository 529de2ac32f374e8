"""What differential transmission needs of a codec: blocks that may be lost, and rules for them."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from geo_ray.codecs.coded import Coded
from geo_ray.codecs.common.dgt_blocks import BlockFormat


class DifferentialCodec(Protocol):
    """A codec whose encodings have lossy blocks; `geo_ray.codecs.dgt.Dgt` describes the options."""

    @property
    def kind(self) -> str:
        """The codec's name in configurations and on the wire."""

    @property
    def elements(self) -> int:
        """Elements of a block."""

    @property
    def loose(self) -> Literal["udp", "drop", "reliable"]:
        """How lossy blocks are sent."""

    @property
    def loose_values(self) -> BlockFormat:
        """Number format of lossy blocks."""

    @property
    def late(self) -> Literal["put_back", "merge"]:
        """What becomes of blocks that come late or never."""

    @property
    def late_max(self) -> int:
        """Number of updates by which a block may be late with ``late: merge``."""

    @property
    def late_scaled(self) -> bool:
        """Whether late blocks count less."""

    @property
    def grace_s(self) -> float:
        """How long a complete update waits for its lossy blocks, in seconds."""

    @property
    def rate_mbps(self) -> float | None:
        """Upper bound of the rate of datagrams, in 10^6 bit/s; None for no bound."""

    @property
    def dscp(self) -> bool:
        """Whether datagrams are marked by band."""

    def decode(self, coded: Coded) -> Tensor:
        """See `geo_ray.codecs.base.Codec.decode`; blocks that are missing count as zeros."""

    def subset(self, coded: Coded, places: Tensor) -> Coded:
        """Return an encoding that holds only the lossy blocks at ``places``."""

    def observe(self, memory: dict[str, Tensor], loss: float) -> None:
        """Take in the training loss before the next `encode`."""

    def tell_share(self, memory: dict[str, Tensor], share: float) -> None:
        """Use the averager's ``share`` of reliable blocks from the next vector on."""
