"""The ``codec`` section of a configuration."""

from __future__ import annotations

from pydantic import Field

from geo_ray.config.base import Model
from geo_ray.sync.codecs.registry import AnyCodec


class CodecConfig(Model):
    """How payloads are made small on their way between regions; none sends fp32 as it is."""

    up: AnyCodec | None = Field(None, description="updates, from a region to the averager")
    down: AnyCodec | None = Field(None, description="replies, from the averager to a region")
