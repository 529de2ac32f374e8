"""The sources of a preparation file as they stand there, for messages: their words, their lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.config.load import read_text
from geo_ray.config.yaml_text import parse_yaml
from geo_ray.data.prepare.yaml_line import flow


@dataclass(frozen=True)
class WrittenSource:
    """One source of a column, before statistics and words of files are put in.

    Attributes:
        where: file and line, such as ``prepare.yaml, line 4``.
        keys: what the file says of it.
    """

    where: str
    keys: Mapping[str, Any]

    def changed(self, changes: Mapping[str, Any]) -> str:
        """The source on one line of YAML, with some keys changed or added."""
        return flow({**self.keys, **changes})


WrittenSources = Mapping[tuple[str, str], WrittenSource]
"""(column of the task, column of the files) -> its source."""


def written_sources(path: Path | None) -> WrittenSources:
    """The sources of a preparation file that `geo_ray.data.prepare.config` could read.

    Args:
        path: the file; None, if there is none, has no sources.
    """
    if path is None:
        return {}
    tree: Any = parse_yaml(read_text(path), str(path))
    found: dict[tuple[str, str], WrittenSource] = {}
    for name, given in tree.value["columns"].items():
        for number, keys in enumerate(given if isinstance(given, list) else [given]):
            place = (name, number) if isinstance(given, list) else (name,)
            line = tree.origins[("columns", *place)]
            found.setdefault((name, keys["column"]), WrittenSource(f"{path}, {line}", keys))
    return found
