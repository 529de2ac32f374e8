"""Topologies by name or by file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from geo_ray.config.load import load_tree
from geo_ray.errors import ConfigError
from geo_ray.lab.topology import Topology

PRESETS: Final = Path(__file__).with_name("presets")
_SUFFIXES: Final = (".yaml", ".yml")
_ADVICE = "Correct what the message names; docs/lab.md lists the keys of a lab."


def preset_names() -> list[str]:
    """Names of the topologies that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_topology(source: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology.

    Args:
        source: the name of a preset, or the path of a YAML file.
        overrides: ``key.key=value`` each.

    Raises:
        ConfigError: no such preset or file, or its content is wrong.
    """
    if str(source) in preset_names():
        return load_tree(PRESETS / f"{source}.yaml", overrides, Topology, _ADVICE)
    path = Path(source)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"there is no preset '{source}'",
            fix=f"Name one of {', '.join(preset_names())}, or a YAML file.",
        )
    return load_tree(path, overrides, Topology, _ADVICE)
