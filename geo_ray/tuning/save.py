"""`tune.json`: the trials of a search, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from geo_ray.observe.events.schema import finite
from geo_ray.tuning.result import Tuning
from geo_ray.util.atomic_file import save_text


def save_tuning(tuning: Tuning, path: Path) -> Path:
    """Write it whole or not at all; numbers that are not finite become null.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    content = {
        "objectives": list(tuning.objectives),
        "goal": asdict(tuning.goal),
        "wanted": tuning.wanted,
        "gain": tuning.gain,
        "best": None if tuning.best is None else tuning.best.id,
        "base": None if tuning.base is None else tuning.base.id,
        "front": [row.id for row in tuning.front],
        "trials": [asdict(row) for row in tuning.rows],
    }
    return save_text(path, json.dumps(finite(content), indent=1) + "\n")
