"""Configuration sections `strategy` and `codec`, and the requirements of a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, TypeAdapter

from geo_ray.base.errors import ConfigError
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import UserClass
from geo_ray.base.user_section import OwnLoader, context, section_type
from geo_ray.codecs.base import Codec, CodecTraits
from geo_ray.codecs.registry import CODECS
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.traits import Traits

_ERROR_IN_ROUNDS: Final = 0.03
_ERROR_ONE_BY_ONE: Final = 1e-4


_OWN_STRATEGY: Final = OwnLoader(
    UserClass("strategy", ConfigError, "examples/own_strategy.py"),
    Strategy,
    Traits,
    STRATEGIES,
    may_change=True,
)
_OWN_CODEC: Final = OwnLoader(
    UserClass("codec", ConfigError, "examples/own_codec.py"),
    Codec,
    CodecTraits,
    CODECS,
    may_change=False,
)

if TYPE_CHECKING:
    AnyStrategy = Strategy  # the interface that callers may use
    AnyCodec = Codec
else:
    AnyStrategy = section_type([*STRATEGIES.values()], _OWN_STRATEGY)
    """The ``strategy`` section of a configuration: ``kind`` or ``use`` chooses the class."""
    AnyCodec = section_type([*CODECS.values()], _OWN_CODEC)
    """A codec's section of a configuration, in the same way."""


def default_section(section: Mapping[str, object], base_dir: Path) -> dict[str, Any]:
    """Return a ``strategy`` section with all defaults, as plain values.

    Args:
        section: with ``kind`` or ``use``.
        base_dir: where relative paths start.

    Raises:
        ConfigError: the user's class cannot be used.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(AnyStrategy)
    found = adapter.validate_python(section, context=context(base_dir))
    plain: dict[str, Any] = adapter.dump_python(found, mode="json")
    return plain


class CodecConfig(StrictModel):
    """Encoding of payloads between regions; without a codec they are sent as fp32."""

    up: AnyCodec | None = Field(None, description="updates, from a region to the averager")
    down: AnyCodec | None = Field(None, description="answers, from the averager to a region")

    last_error: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="largest relative error of the final exchange, which sends all remaining "
        "coding errors; 0: full precision; null: 0.03 in rounds, else 0.0001",
    )

    def last_error_of(self, strategy: Strategy) -> float:
        """Return the largest relative error of the last exchange.

        A round has one answer, which leaves all regions equal whatever its error. Where each region
        has its own answer, regions differ by the loss of their answers, which is as small as
        rounding.
        """
        if self.last_error is not None:
            return self.last_error
        return _ERROR_IN_ROUNDS if strategy.traits.in_rounds else _ERROR_ONE_BY_ONE

    def problems(self, strategy: Strategy, num_regions: int) -> Iterator[str]:
        """Yield why codecs do not fit a strategy, or that it lacks its codec.

        Args:
            strategy: the run's.
            num_regions: of the run.
        """
        if self.down is not None and self.down.traits.up_only:
            yield f"codec.down: {self.down.kind} is for codec.up only"
        for direction, codec in (("up", self.up), ("down", self.down)):
            if codec is not None:
                yield from _codec_problems(f"codec.{direction}", codec, strategy)
        needed = strategy.traits.region.needs_codec
        if needed is not None and self.up is None and num_regions > 1:
            yield (
                f"codec.up: strategy '{strategy.kind}' requires a codec: set one, "
                f"such as {{kind: {needed}}}"
            )


def _codec_problems(key: str, codec: Codec, strategy: Strategy) -> Iterator[str]:
    """Yield why one codec does not fit."""
    own, traits, name = codec.traits, strategy.traits, f"strategy '{strategy.kind}'"
    if traits.sends not in own.sends or (own.rounds_only and not traits.in_rounds):
        wanted = " or ".join(f"{sends}s" for sends in own.sends)
        note = " that all regions apply together, as with bsp" if own.rounds_only else ""
        yield (
            f"{key}: {codec.kind} is for {wanted}{note}; {name} sends {traits.sends}s"
            f"{'' if traits.in_rounds else ' that come one by one'}: use topk, or another strategy"
        )
        return
    needs_whole = own.differential is not None or own.with_shapes is not None
    if needs_whole and traits.exchange.fragments > 1:
        yield (
            f"{key}: {codec.kind} splits updates of the whole model; {name} sends it in "
            f"{traits.exchange.fragments} fragments: use another codec, or another strategy"
        )
    # Each region applies its own changes exactly, so others must receive all of them.
    must_add_up = traits.sends == "change" and not traits.in_rounds
    if must_add_up and (own.feeds_back or own.forgets):
        other = "an option that sends it again" if own.forgets else "randomk or topk"
        yield (
            f"{key}: with {codec.kind} as configured no region knows what was lost, so the regions "
            f"of {name} would not end with the same model: use {other}"
        )


def shards_problems(strategy: Strategy, shards: Mapping[str, int]) -> Iterator[str]:
    """Yield which regions shard the model, if the strategy needs it in one piece.

    Args:
        strategy: the run's.
        shards: of the parameter server, by region.
    """
    cut = [region for region, count in shards.items() if count > 1]
    if strategy.traits.region.whole_model and cut:
        yield (
            f"regions: strategy '{strategy.kind}' needs a model in one piece: set ps_shards: 1 in "
            f"{', '.join(cut)}"
        )
