"""What parts of checkpoints are called."""

from __future__ import annotations

import re
from typing import Final

AVERAGER_PART: Final = "averager"
_SHARD = re.compile(r"^(.+)-ps[0-9]+(\.safetensors)?$")


def shard_part_name(region: str, index: int) -> str:
    """Name of the part of one shard."""
    return f"{region}-ps{index}"


def region_of(part: str) -> str | None:
    """The region whose server wrote a part, from its name or its file's; None for the averager."""
    match = _SHARD.match(part)
    return None if match is None else match[1]
