"""What a notebook shows of a result: one plain table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_view(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One titled table; every text is plain text.

    Args:
        title: in a line above it.
        headings: of its columns.
        rows: as many cells each.
    """
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div><strong>{escape(title)}</strong>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
