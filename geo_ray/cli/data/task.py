"""The task that an option of ``geo-ray data`` names."""

from __future__ import annotations

import json
import math
from typing import Any

import click


def pairs_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """The values of a repeatable option NAME=VALUE, by name."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        pairs[key] = value
    return pairs


def named_task(use: str, options: tuple[str, ...]) -> dict[str, Any]:
    """What ``--task`` and ``--task-option`` say, as the section ``task`` of a configuration."""
    values = {key: _scalar(text) for key, text in pairs_of(options, "--task-option").items()}
    return {"use": use, "options": values}


def _scalar(text: str) -> Any:
    """Read a finite JSON number, true, false or null; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_plain = isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else text
