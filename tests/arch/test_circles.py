"""No module imports, by whatever way, one that imports it; what only type checkers see counts."""

from __future__ import annotations

from typing import Any

import pytest


def graph_of(files: list[Any]) -> dict[str, set[str]]:
    """Which modules of the library each one imports, at the top, within functions, for types."""
    names = {file.name for file in files}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for file in files:
        for _, target in file.imports():
            module = target if target in names else target.rpartition(".")[0]
            if module in names and module != file.name:
                graph[file.name].add(module)
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """One circle as a list of modules; empty if there is none."""
    done: set[str] = set()
    for start in sorted(graph):
        way: list[str] = []
        waiting = [(start, False)]
        while waiting:
            name, leave = waiting.pop()
            if leave:
                way.pop()
                done.add(name)
            elif name in way:
                return [*way[way.index(name) :], name]
            elif name not in done:
                way.append(name)
                waiting.append((name, True))
                waiting.extend((target, False) for target in sorted(graph[name]))
    return []


def of_folders(graph: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """The same imports between folders; modules deeper than that count for their folder."""

    def folder(module: str) -> str:
        return ".".join(module.split(".")[:-1][:depth])

    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        own = folder(name)
        others = {folder(target) for target in targets} - {own}
        found.setdefault(own, set()).update(others)
    return found


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_folder_imports_one_that_imports_it(library: list[Any], depth: int) -> None:
    """At every level: packages, and the folders in them."""
    graph = graph_of([file for file in library if file.path.name != "__init__.py"])
    assert circle_in(of_folders(graph, depth)) == []


def test_the_library_has_no_circle(library: list[Any]) -> None:
    assert circle_in(graph_of(library)) == []


def test_the_rule_finds_one_that_only_type_checkers_see(source_file: Any) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from geo_ray.b import B"
    files = [
        source_file.parse("geo_ray.a", text),
        source_file.parse("geo_ray.b", "from geo_ray.c import C"),
        source_file.parse("geo_ray.c", "def f():\n    from geo_ray.a import A"),
    ]
    found = circle_in(graph_of(files))
    assert set(found) == {"geo_ray.a", "geo_ray.b", "geo_ray.c"}
    assert circle_in(graph_of(files[:2])) == []
