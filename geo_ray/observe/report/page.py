"""One self-contained HTML page: nothing in it is fetched or run, whatever texts it holds."""

from __future__ import annotations

from html import escape
from pathlib import Path

from geo_ray.observe.report.style import STYLE
from geo_ray.util.atomic_file import save_text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, body: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - geo_ray</title><style>{STYLE}</style></head><body>"
        f"{body}</body></html>\n"
    )


def write_html(page: str, path: Path) -> Path:
    """Write a page whole or not at all; give its path.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    return save_text(path, page)
