"""Results as a line of text in a console and as an HTML table in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from html import escape

from geo_ray.base.model import StrictModel
from geo_ray.base.text import printable


class ShownModel(StrictModel):
    """A result record: one line as its repr and as text, a table in notebooks.

    Its fields are in `model_dump`.
    """

    @abstractmethod
    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """Return a line, and the headings and rows of a table below it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self.view()[0])}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        line, headings, rows = self.view()
        return html_view(f"{type(self).__name__} {line}", headings, rows)


def html_view(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a titled table; every text is plain text.

    Args:
        title: line above it.
        headings: headings of its columns.
        rows: cells of each row.
    """
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div><strong>{escape(title)}</strong>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
