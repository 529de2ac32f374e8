"""`compare.json`: the rows of a comparison and all its runs, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from geo_ray.compare.run import Comparison
from geo_ray.errors import RunDirectoryError
from geo_ray.observe.events.schema import finite


def save_comparison(comparison: Comparison, path: Path) -> None:
    """Write it whole or not at all; numbers that are not finite become null.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    content = {
        "metric": comparison.metric,
        "rows": [asdict(row) for row in comparison.rows],
        "runs": [outcome.model_dump() for outcome in comparison.outcomes],
        "tuning": [outcome.model_dump() for outcome in comparison.tuning],
    }
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(finite(content), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error
