"""Files, folders and constructors stay small enough to find one's way in."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median
from typing import Any

MAX_LIBRARY_LINES = 500
MAX_FOLDER_FILES = 22
ONE_A_FILE = {"strategies": 32, "cli": 26, "api": 26}  # one algorithm, command, verb a file
MAX_TEST_LINES = 600
MAX_MEDIAN_LINES = 120
MAX_CONSTRUCTOR_ARGUMENTS = 8


def test_library_files_are_small(library: list[Any], root: Path) -> None:
    """Run with ``-s`` or ``-rP`` for the table."""
    sized = [file for file in library if file.path.name != "__init__.py"]
    sized.sort(key=lambda file: -file.num_lines)
    for file in sized:
        print(f"{file.num_lines:5d}  {file.path.relative_to(root)}")
    middle = median(file.num_lines for file in sized)
    print(f"{len(sized)} files, {sum(f.num_lines for f in sized)} lines, median {middle}")
    assert not [file.name for file in sized if file.num_lines > MAX_LIBRARY_LINES]
    assert middle < MAX_MEDIAN_LINES


def test_folders_are_small(root: Path) -> None:
    """A stranger finds the right file for a question at the first or second guess."""
    crowded = {}
    for folder in [root / "geo_ray", *(p for p in (root / "geo_ray").rglob("*") if p.is_dir())]:
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        name = str(folder.relative_to(root / "geo_ray"))
        if count > ONE_A_FILE.get(name, MAX_FOLDER_FILES):
            crowded[name] = count
    assert not crowded


def test_test_files_are_small(root: Path) -> None:
    long = {
        str(path.relative_to(root)): lines
        for path in (root / "tests").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MAX_TEST_LINES
    }
    assert not long


def test_test_files_have_names_of_their_own(root: Path) -> None:
    """They are no packages: two of one name cannot be collected together."""
    names = [path.name for path in (root / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_constructors_are_small(library: list[Any]) -> None:
    """Dataclasses and pydantic models write no constructor, so they are exempt by themselves."""
    large = []
    for file in library:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    spec = method.args
                    count = len(spec.posonlyargs + spec.args + spec.kwonlyargs) - 1
                    count += (spec.vararg is not None) + (spec.kwarg is not None)
                    if count > MAX_CONSTRUCTOR_ARGUMENTS:
                        large.append(f"{file.name}.{node.name}: {count} arguments")
    assert not large
