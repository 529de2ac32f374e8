"""The task that an option of ``geo-ray data`` names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from geo_ray.tasks.base import Task


def pairs_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """The values of a repeatable option NAME=VALUE, by name."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        pairs[key] = value
    return pairs


def load_named_task(use: str, options: tuple[str, ...]) -> Task:
    """The task of ``--task`` with its options; a file's path starts at the current directory.

    Raises:
        TaskLoadError: it cannot be loaded.
    """
    from geo_ray.tasks.load import TaskConfig, load_task

    values = {key: _scalar(text) for key, text in pairs_of(options, "--task-option").items()}
    return load_task(TaskConfig(use=use, options=values), Path.cwd())


def _scalar(text: str) -> Any:
    """Read a finite JSON number, true, false or null; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_plain = isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else text
