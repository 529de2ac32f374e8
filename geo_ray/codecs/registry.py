"""All codecs by name. A new one is a file in this package and a line in each of the two lists."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
from geo_ray.errors import FrameError

OneCodec = (
    Identity
    | Fp16
    | Bf16
    | Int8
    | Int4
    | TopK
    | ChunkedTopK
    | RandomK
    | UnbiasedRandomK
    | PowerSgd
    | BiSparse
    | NonZeros
    | Dgt
)
"""The class of any codec."""

AnyCodec = Annotated[OneCodec, Field(discriminator="kind")]
"""A codec's section of a configuration: ``kind`` chooses the class."""

CODECS: dict[str, type[OneCodec]] = {
    "identity": Identity,
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
    "chunked_topk": ChunkedTopK,
    "randomk": RandomK,
    "randomk_unbiased": UnbiasedRandomK,
    "powersgd": PowerSgd,
    "bisparse": BiSparse,
    "nonzeros": NonZeros,
    "dgt": Dgt,
}


def codec_of(kind: str) -> OneCodec:
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
