"""The page `docs/reference/generated/errors.md`, made from the error classes.

``python -m geo_ray.testing.errors_page docs/reference/generated/errors.md`` writes it; a test
holds the file against
`page`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from operator import attrgetter
from pathlib import Path
from typing import Final

from geo_ray.base.errors import ConfigError, GeoRayError, InterruptedRunError, every_class

_WIDTH: Final = 118
_GAP: Final = "\0"  # stands for a space inside a code span, where no line may end

EXAMPLE: Final = ConfigError(
    "job.yaml: 2 problems:\n"
    '    train.steps (line 6): got "many", expected a whole number from 1 to 1000000000000\n'
    "    train.eval_evry (line 7): unknown key; did you mean eval_every?",
    fix="Correct them all. `geo-ray config schema train` shows what belongs there.",
)
"""What `geo-ray train` says of a file with two mistakes; a test makes the mistakes."""


def page() -> str:
    """The whole page."""
    roots = sorted(GeoRayError.__subclasses__(), key=attrgetter("exit_code"))
    parts = [_head(roots), _section(GeoRayError)]
    for root in roots:
        below = [kind for kind in every_class() if issubclass(kind, root)]
        parts += [f"# {root.chapter}", *(_section(kind) for kind in below)]
    return "\n\n".join(parts) + "\n"


def _head(roots: list[type[GeoRayError]]) -> str:
    form = str(GeoRayError("what went wrong, naming the key, shard, region or file", fix="FIX"))
    form = form.replace(f"[{GeoRayError.code}]", "[CODE]").replace("FIX", "what to do about it")
    chapters = "; ".join(f"{kind.exit_code} {kind.chapter}" for kind in roots)
    return "\n\n".join(
        [
            "<!-- Written by geo_ray/testing/errors_page.py from the error classes. -->",
            "# Errors",
            _filled(
                "Every error of geo_ray has a stable code, a process exit code and a remedy. The "
                "command line prints it to standard error as"
            ),
            _block(f"error {form}"),
            _filled(
                "and the process ends with the exit code of its section below. Several problems "
                "of one kind come together, a line for each:"
            ),
            _block(f"error {EXAMPLE}"),
            _filled("Codes do not change between releases; messages may."),
            _filled(
                f"Exit codes by chapter: {chapters}. A run that was stopped ends with "
                f"{InterruptedRunError.exit_code}, a command line with a wrong option with 2; 0 "
                "is success."
            ),
            _filled(
                "A *family* is the parent of other codes: code that catches errors may catch a "
                "whole family by its class in `geo_ray.base.errors`, and a person rarely sees its "
                "code."
            ),
        ]
    )


def _section(kind: type[GeoRayError]) -> str:
    family = ", a *family*" if kind.__subclasses__() else ""
    more = vars(kind).get("more", "")
    return "\n\n".join(
        [
            f"## {kind.code}",
            f"Exit code: {kind.exit_code}. Class: `{kind.__name__}`{family}.",
            _filled(f"**Meaning.** {_meaning(kind)}"),
            _filled(f"**Causes.** {kind.causes}"),
            _filled(f"**Mend.** {kind.advice} {more}"),
        ]
    )


def _meaning(kind: type[GeoRayError]) -> str:
    """The docstring without its lists."""
    return inspect.cleandoc(vars(kind)["__doc__"]).partition("\n\nArgs:")[0]


def _block(text: str) -> str:
    return textwrap.indent(text, "    ")


def _unbroken(span: re.Match[str]) -> str:
    return span[0].replace(" ", _GAP)


def _filled(text: str) -> str:
    """The text as lines; no line ends inside a code span, so that commands stay whole."""
    escaped = re.sub(r"`[^`]+`", _unbroken, " ".join(text.split()))
    lines = textwrap.fill(escaped, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_GAP, " ")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
