"""Lines for people that may name what was read from files, records or clouds."""

from __future__ import annotations

import click

from geo_ray.observe.text import printable


def say(text: str, *, err: bool = False) -> None:
    """Print a text; characters that control a terminal are escaped.

    Args:
        text: one or more lines.
        err: on standard error.
    """
    click.echo(printable(text), err=err)
