"""Writes dashboards and alerts into a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import yaml

from geo_ray.observe.dashboards.alerts import alert_rules
from geo_ray.observe.dashboards.grafana import dashboards
from geo_ray.util.atomic_file import save_text, unwritable

ALERTS_FILE: Final = "geo_ray_alerts.yaml"


def write_dashboards(folder: Path) -> list[Path]:
    """Write the files, each whole or not at all; give their paths.

    Raises:
        RunDirectoryError: one cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in dashboards().items()}
    texts[ALERTS_FILE] = yaml.safe_dump(alert_rules(), sort_keys=False, width=100)
    return [save_text(folder / name, text) for name, text in texts.items()]
