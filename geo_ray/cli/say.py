"""Output of commands: text, with control characters escaped, and JSON."""

from __future__ import annotations

import re
from typing import Final

import click

from geo_ray.base.text import printable

_CONTROL: Final = re.compile("[\\x7f-\\x9f]")


def say(text: str, *, err: bool = False) -> None:
    """Print text; characters that control a terminal are escaped.

    Args:
        text: one or more lines.
        err: whether to print on standard error.
    """
    click.echo(printable(text), err=err)


def say_json(text: str, *, nl: bool = True) -> None:
    """Print JSON text without characters that control a terminal.

    JSON itself requires the escape of characters below 0x20, but not of 0x7f to 0x9f.

    Args:
        text: the JSON.
        nl: whether to end it with a newline.
    """
    click.echo(_CONTROL.sub(_escape, text), nl=nl)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
