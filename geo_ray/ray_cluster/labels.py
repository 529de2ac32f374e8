"""The only module that builds label selectors.

Ray accepts blanks inside ``in(a, b)`` but does not trim them, so that only the first value would
match. Therefore no other module writes a selector.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from geo_ray.base.errors import ConfigError

REGION_LABEL = "ray.io/availability-region"
TYPE_LABEL = "ray.io/node-group"
NODE_LABEL = "ray.io/node-id"
MACHINE_LABEL = "geo-ray/machine"
"""The cloud's name of a node's machine; used to match nodes and machines."""

Selector = dict[str, str]

_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_MAX_VALUE = 63


def check_region_name(name: str) -> str:
    """Return ``name`` if it can be the value of a node label.

    Raises:
        ConfigError: it cannot.
    """
    if len(name) > _MAX_VALUE or not _VALUE.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a region's name: it is the value of the node label {REGION_LABEL}",
            fix=f"Use 1 to {_MAX_VALUE} letters, digits, '-', '_' or '.', letters or digits at "
            "both ends.",
        )
    return name


def in_region(region: str) -> Selector:
    """Select the nodes of one region."""
    return {REGION_LABEL: check_region_name(region)}


def of_type(region: str, kind: str) -> Selector:
    """Select the nodes of one type in one region; Ray's own label names a group of like nodes."""
    return {**in_region(region), TYPE_LABEL: check_region_name(kind)}


def in_regions(regions: Iterable[str]) -> Selector:
    """Select the nodes of any of ``regions``.

    Raises:
        ConfigError: there are none, or a name cannot be a label value.
    """
    return {REGION_LABEL: f"in({_listed(regions)})"}


def outside_regions(regions: Iterable[str]) -> Selector:
    """Select the nodes of no region of ``regions``, including nodes without a region.

    Raises:
        ConfigError: there are none, or a name cannot be a label value.
    """
    return {REGION_LABEL: f"!in({_listed(regions)})"}


def on_node(node_id: str) -> Selector:
    """Select one node by its id in hexadecimal."""
    return {NODE_LABEL: node_id}


def label_flag(region: str) -> str:
    """Return the value of ``ray start --labels`` that assigns a node to ``region``."""
    return f"{REGION_LABEL}={check_region_name(region)}"


def _listed(regions: Iterable[str]) -> str:
    names = sorted({check_region_name(region) for region in regions})
    if not names:
        raise ConfigError("a label selector needs at least one region")  # Ray refuses in()
    return ",".join(names)
