"""Regions that are process groups are simulated as separate workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import geo_ray
from geo_ray.base.errors import ConfigError

CONFIG: dict[str, Any] = {
    "name": "groups",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {}, "batch_size": 4},
    "optimizer": {"kind": "adamw"},
    "strategy": {"kind": "diloco", "interval": 2},
    "train": {"steps": 4, "eval_every": 2},
}


def test_ranks_are_simulated_as_workers(tmp_path: Path) -> None:
    found = []
    for name, size in (("groups", {"group": {"ranks_per_node": 3}}), ("workers", {"workers": 3})):
        regions = [{"name": region, **size} for region in ("eu", "us")]
        tree = CONFIG | {"name": name, "regions": regions}
        found.append(geo_ray.simulate(tree, base_dir=tmp_path).summary)
    groups, workers = found
    assert groups.samples == 4 * 2 * 3 * 4
    assert groups.digest == workers.digest
    assert groups.eval == workers.eval


def test_loops_of_users_are_not_simulated(tmp_path: Path) -> None:
    regions = [{"name": "eu", "group": {}}, {"name": "us", "join": True}]
    with pytest.raises(ConfigError, match="own training loops cannot be simulated: us"):
        geo_ray.simulate(CONFIG | {"regions": regions}, base_dir=tmp_path)
