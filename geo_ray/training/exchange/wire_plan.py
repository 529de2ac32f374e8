"""How payloads are coded on their way: what both ends of an exchange agree on beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geo_ray.codecs.base import Codec
from geo_ray.errors import ConfigDriftError
from geo_ray.strategies.base import Sends


@dataclass(frozen=True, slots=True)
class WirePlan:
    """The codecs of a run, and what they must know of its strategy.

    Attributes:
        up: codec of updates; None sends them as they are.
        down: codec of replies; None sends them as they are.
        sends: what the strategy's payloads are.
        in_rounds: whether a round has one answer for all regions.
        seed: the run's seed.
        fragments: parts of the model that are sent one at a time, each a stream of its own.
        last_error: relative error that the last exchange may have; 0: it goes in full.
    """

    up: Codec | None = None
    down: Codec | None = None
    sends: Sends = "change"
    in_rounds: bool = False
    seed: int = 0
    fragments: int = 1
    last_error: float = 0.0

    @property
    def keeps_reference(self) -> bool:
        """Whether both ends remember the last reply's payload, to send differences from it."""
        return self.differs(self.up) or self.differs(self.down)

    def differs(self, codec: Codec | None) -> bool:
        """Whether what goes through ``codec`` is a difference from the reference.

        A lossless codec is given the payload itself: a difference would be rounded.
        """
        return self.sends == "model" and self.is_lossy(codec)

    @property
    def owes_replies(self) -> bool:
        """Whether what a reply has lost must be added to the next.

        A mean of the regions' models builds on what they hold, so what they were not told is gone
        from it. But a model that the averager makes of its own memory (`ama`) has it still: the
        difference from the reference contains it, and it would count twice.
        """
        return self.sends == "change" or self.in_rounds

    @property
    def last_reply_error(self) -> float:
        """The same for the answers; 0 where each region gets its own about one model.

        They leave all regions equal to the bit, which only full precision does then.
        """
        return self.last_error if self.sends == "change" or self.in_rounds else 0.0

    @property
    def owes(self) -> bool:
        """Whether something may be owed after the last round, unless that is the last word."""
        codecs = [codec for codec in (self.up, self.down) if codec is not None]
        return any(codec.traits.lossy and not codec.traits.feeds_back for codec in codecs)

    @staticmethod
    def is_lossy(codec: Codec | None) -> bool:
        """Whether ``codec`` does not give back the very bits."""
        return codec is not None and codec.traits.lossy

    def export(self) -> dict[str, object]:
        """The codecs as plain values, for a checkpoint."""
        return {"up": _name(self.up), "down": _name(self.down)}

    def check(self, saved: object) -> None:
        """Refuse state that belongs to other codecs.

        Args:
            saved: what `export` gave; None for a checkpoint that knew no codecs.

        Raises:
            ConfigDriftError: if they are not the present ones.
        """
        found = saved if isinstance(saved, Mapping) else {"up": "none", "down": "none"}
        for direction, wanted in self.export().items():
            if found.get(direction) != wanted:
                raise ConfigDriftError(
                    f"codec.{direction} is {wanted}, the checkpoint was made with "
                    f"{found.get(direction)}; what it owes to other regions cannot be taken over",
                    fix="Resume with the codecs of the checkpoint, or begin a new run.",
                )


def _name(codec: Codec | None) -> str:
    return "none" if codec is None else repr(codec)
