"""geo_ray: train one PyTorch model on data that must stay in several cloud regions.

The names listed here are the public interface; docs/guides/python.md describes them, and
docs/reference/generated/python.md lists the other public modules. Each name is imported on first
use, so that ``import geo_ray`` stays fast. ``__init__.pyi`` declares the same names
for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from geo_ray.base.version import __version__ as __version__

_WHERE: Final = {
    "load_config": "api.config",
    "shard_data": "api.data",
    "simulate": "api.train",
    "train": "api.train",
    "serve": "api.train",
    "join": "joining.site",
    "GroupRank": "runtime.group_task",
    "Run": "api.run",
    "open_run": "api.run",
    "status": "api.status",
    "stop": "api.status",
    "members": "api.status",
    "checkpoints": "api.status",
    "report": "api.status",
    "watch": "api.live",
    "profile": "api.plan",
    "plan": "api.plan",
    "compare": "api.compare",
    "tune": "api.tune",
    "up": "api.clusters",
    "down": "api.clusters",
    "Experiment": "experiment.experiment",
    "Task": "data.tasks.base",
    "Dataset": "data.tasks.base",
    "Ragged": "data.columns",
    "Options": "base.model:StrictModel",
    "Strategy": "strategies.base",
    "Codec": "codecs.base",
    "Event": "telemetry.events",
    "GeoRayError": "base.errors",
}
"""The module below `geo_ray` that defines each public name, with the name if it differs there."""

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'geo_ray' has no attribute {name!r}")
    module, _, own = _WHERE[name].partition(":")
    found = getattr(importlib.import_module(f"geo_ray.{module}"), own or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Every public name, for completion."""
    return sorted(set(globals()) | set(_WHERE))
