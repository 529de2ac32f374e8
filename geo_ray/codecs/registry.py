"""All codecs by name. A new one is a module in this package and a line in this table.

A run's codecs are chosen by the `codec` section of its configuration: `strategies/config.py`.
"""

from __future__ import annotations

from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.base.plugins import Plugins
from geo_ray.codecs.base import Codec

CODECS: Final = Plugins[type[Codec]](
    {
        "identity": "geo_ray.codecs.identity:Identity",
        "fp16": "geo_ray.codecs.fp16:Fp16",
        "bf16": "geo_ray.codecs.bf16:Bf16",
        "int8": "geo_ray.codecs.int8:Int8",
        "int4": "geo_ray.codecs.int4:Int4",
        "topk": "geo_ray.codecs.topk:TopK",
        "chunked_topk": "geo_ray.codecs.chunked_topk:ChunkedTopK",
        "randomk": "geo_ray.codecs.randomk:RandomK",
        "randomk_unbiased": "geo_ray.codecs.randomk:UnbiasedRandomK",
        "powersgd": "geo_ray.codecs.powersgd:PowerSgd",
        "bisparse": "geo_ray.codecs.bisparse:BiSparse",
        "nonzeros": "geo_ray.codecs.nonzeros:NonZeros",
        "dgt": "geo_ray.codecs.dgt:Dgt",
    }
)
"""All codecs of the library."""


def sections_of(kind: str | None) -> dict[str, dict[str, str]]:
    """Return the ``codec`` section with one codec both ways, or up only if it suits no answers.

    Args:
        kind: a codec of the library, or None.
    """
    if kind is None:
        return {}
    section = {"kind": kind}
    both = CODECS[kind]().traits.suits_answers
    return {"up": section, "down": section} if both else {"up": section}


def codec_of(kind: str) -> Codec:
    """Return a codec with its default options, by the name in a payload.

    The bytes contain the options that a decoder needs, so this decodes payloads of any sender.

    Raises:
        FrameError: this release has no such codec.
    """
    found = CODECS.get(kind)
    if found is None:
        raise FrameError(f"a payload is coded as {kind!r}, which this release cannot read")
    return found()
