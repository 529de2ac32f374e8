"""Keeps what the actors of a failed run printed, before their cluster and its files are gone."""

from __future__ import annotations

from pathlib import Path

RAY_MESSAGES = "ray-messages.out"
"""File of the local cluster with what Ray told the driver about its nodes."""

_MAX_FILES = 40
_MAX_BYTES = 1_000_000


def keep_logs(cluster_root: Path, target: Path) -> list[Path]:
    """Copy the ends of all actors' output below ``cluster_root`` that is not empty.

    And what Ray told the driver.

    Args:
        cluster_root: directory of the local cluster.
        target: directory to make and fill.

    Returns:
        The copies; empty if nobody printed anything or it cannot be copied.
    """
    told = cluster_root / RAY_MESSAGES
    found = [told] if told.exists() else []
    found += [
        path
        for pattern in ("worker-*.out", "worker-*.err")
        for path in sorted(cluster_root.glob(f"*/session_2*/logs/{pattern}"))
        if _says_something(path)
    ]
    kept: list[Path] = []
    for path in found[:_MAX_FILES]:
        try:
            target.mkdir(exist_ok=True)
            copy = target / path.name
            copy.write_bytes(path.read_bytes()[-_MAX_BYTES:])
        except OSError:  # the run's own error matters more than its logs
            break
        kept.append(copy)
    return kept


def _says_something(path: Path) -> bool:
    """Whether there is more than the lines that Ray itself begins every file with."""
    with path.open(errors="replace") as file:
        return any(line.strip() and not line.startswith(":") for line in file)
