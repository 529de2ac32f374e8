"""Public classes have names of their own."""

from __future__ import annotations

import ast
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


def test_test_files_have_names_of_their_own(root: Path) -> None:
    """They are no packages: two of one name cannot be collected together."""
    names = [path.name for path in (root / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
