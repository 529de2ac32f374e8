"""All codecs by name. A new one is a file in this package and a line here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.errors import FrameError
from geo_ray.sync.codecs.fp16 import Fp16
from geo_ray.sync.codecs.identity import Identity

OneCodec = Identity | Fp16
"""The class of any codec."""

AnyCodec = Annotated[OneCodec, Field(discriminator="kind")]
"""A codec's section of a configuration: ``kind`` chooses the class."""

CODECS: dict[str, type[OneCodec]] = {
    "identity": Identity,
    "fp16": Fp16,
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
