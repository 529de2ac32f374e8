"""All codecs by name. A new one is a file in this package and a line in one list.

A run's codecs are chosen by the `codec` section of its configuration: `strategies/config.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from geo_ray.base.errors import ConfigError, FrameError
from geo_ray.base.user_code import UserClass
from geo_ray.base.user_section import OwnLoader, section_type
from geo_ray.codecs.base import Codec, CodecTraits
from geo_ray.codecs.bf16 import Bf16
from geo_ray.codecs.bisparse import BiSparse
from geo_ray.codecs.chunked_topk import ChunkedTopK
from geo_ray.codecs.dgt import Dgt
from geo_ray.codecs.fp16 import Fp16
from geo_ray.codecs.identity import Identity
from geo_ray.codecs.int4 import Int4
from geo_ray.codecs.int8 import Int8
from geo_ray.codecs.nonzeros import NonZeros
from geo_ray.codecs.powersgd import PowerSgd
from geo_ray.codecs.randomk import RandomK, UnbiasedRandomK
from geo_ray.codecs.topk import TopK

CLASSES: Final[tuple[type[Codec], ...]] = (
    Identity,
    Fp16,
    Bf16,
    Int8,
    Int4,
    TopK,
    ChunkedTopK,
    RandomK,
    UnbiasedRandomK,
    PowerSgd,
    BiSparse,
    NonZeros,
    Dgt,
)
"""All codecs of the library."""

CODECS: Final[dict[str, type[Codec]]] = {each().kind: each for each in CLASSES}
"""The same by name."""

LOAD: Final = OwnLoader(
    UserClass("codec", ConfigError, "examples/own_codec.py"),
    Codec,
    CodecTraits,
    CODECS,
    may_drift=False,
)
"""Makes a codec of the user's from its section."""

if TYPE_CHECKING:
    AnyCodec = Codec  # all that anybody may know of it
else:
    AnyCodec = section_type(CLASSES, LOAD)
    """A codec's section of a configuration: ``kind`` or ``use`` chooses the class."""


def sections_of(kind: str | None) -> dict[str, dict[str, str]]:
    """The ``codec`` section with one codec both ways, or up alone if it does not suit answers.

    Args:
        kind: a codec of the library; None for none.
    """
    if kind is None:
        return {}
    section = {"kind": kind}
    both = CODECS[kind]().traits.suits_answers
    return {"up": section, "down": section} if both else {"up": section}


def codec_of(kind: str) -> Codec:
    """A codec with its default options, by the name that came with a payload.

    What a decoder must know of the sender's options is in the bytes, so this decodes whatever the
    sender's options were.

    Raises:
        FrameError: this release has no such codec.
    """
    found = CODECS.get(kind)
    if found is None:
        raise FrameError(f"a payload is coded as {kind!r}, which this release cannot read")
    return found()
