"""The library's source, parsed once for all architecture tests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceFile:
    """One parsed file: ``name`` is the module's, such as ``geo_ray.transport.wire.frames``."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, text: str, path: Path | None = None) -> SourceFile:
        return cls(name, path or Path(f"{name}.py"), text, ast.parse(text))

    @property
    def package(self) -> str:
        """The first name below ``geo_ray``: ``wan`` for ``geo_ray.transport.wire.frames``."""
        return self.name.removeprefix("geo_ray").removeprefix(".").split(".")[0]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree; to walk it again takes ten times as long."""
        return tuple(ast.walk(self.tree))

    def imports(self) -> tuple[tuple[int, str], ...]:
        """Return (line, dotted name) of everything imported, wherever in the file.

        ``from a import b`` is ``a.b``, whether b is a module or a name in one.
        """
        return self._imports

    @cached_property
    def _imports(self) -> tuple[tuple[int, str], ...]:
        return tuple(self._found_imports())

    def _found_imports(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    is_package = self.path.name == "__init__.py"
                    above = self.name.split(".")
                    above = above[: len(above) - node.level + is_package]
                    base = ".".join([*above, base] if base else above)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def library() -> list[SourceFile]:
    files = []
    for path in sorted((ROOT / "geo_ray").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        files.append(SourceFile.parse(name, path.read_text(), path))
    return files


@pytest.fixture(scope="session")
def source_file() -> type[SourceFile]:
    """The class, for tests that show a rule refusing a made-up file."""
    return SourceFile


@pytest.fixture(scope="session")
def standard_modules() -> frozenset[str]:
    return frozenset(sys.stdlib_module_names)
