"""`compare.json`: the rows of a comparison and all its runs, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from geo_ray.comparison.run import Comparison
from geo_ray.observe.events.schema import finite
from geo_ray.util.atomic_file import save_text


def save_comparison(comparison: Comparison, path: Path) -> None:
    """Write it whole or not at all; numbers that are not finite become null.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    content = {
        "metric": comparison.metric,
        "links": comparison.links,
        "rows": [asdict(r) | {"standing": comparison.standing(r)} for r in comparison.rows],
        "runs": [outcome.model_dump() for outcome in comparison.outcomes],
        "tuning": [outcome.model_dump() for outcome in comparison.tuning],
    }
    save_text(path, json.dumps(finite(content), indent=1) + "\n")
