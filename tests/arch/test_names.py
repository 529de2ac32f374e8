"""Public classes have names of their own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any


def public_classes(files: list[Any]) -> dict[str, list[str]]:
    """Modules that define a public class, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(file.name)
    return found


def test_no_two_public_classes_have_one_name(library: list[Any]) -> None:
    assert {n: where for n, where in public_classes(library).items() if len(where) > 1} == {}


# ------------------------------------------------------------------ words of names


def words_of(name: str) -> list[str]:
    """``AveragerState`` and ``averager_state`` are made of ``averager`` and ``state``."""
    parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)
    return [part.lower() for part in parts]


def words_in_names(files: list[Any]) -> set[str]:
    """The words that names of public classes and of modules are made of."""
    found: set[str] = set()
    for file in files:
        for part in file.name.split(".")[1:]:
            found.update(words_of(part))
    for name in public_classes(files):
        found.update(words_of(name))
    return found


def listed_words(root: Path) -> set[str]:
    """Words that the architecture page explains, or lists as used in their usual sense."""
    page = (root / "docs" / "architecture.md").read_text()
    table = page[page.index("## Words\n") : page.index("## One step")]
    explained = {word for row in re.findall(r"^\| (.+?) \|", table, flags=re.M)
                 for word in re.findall(r"[a-z]+", row.lower())}  # fmt: skip
    usual = page[page.index("## Words in names") :]
    return explained | set(re.findall(r"[a-z]+", re.sub(r"^##.*$", "", usual, flags=re.M)))


def test_names_are_made_of_words_that_the_glossary_has(library: list[Any], root: Path) -> None:
    """A new word is a decision: use one that is there, or add it to docs/architecture.md."""
    assert words_in_names(library) - listed_words(root) == set()


def test_names_are_split_into_words() -> None:
    assert words_of("S3Store") == ["s", "store"]
    assert words_of("TlsBytes") == ["tls", "bytes"]
    assert words_of("upload_coordinator") == ["upload", "coordinator"]
