"""`geo_ray.init_project`: a project that runs, to change into one's own."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from geo_ray.api.inputs import FilePath
from geo_ray.errors import ConfigError, RunDirectoryError
from geo_ray.util.atomic_file import save_text

STARTERS = ("quickstart", "csv", "language_model", "own")
_SHARED = {
    "quickstart": ("quickstart.yaml", "planned.yaml", "auto.yaml", "cluster.yaml"),
}
"""Configurations that come with geo_ray and go into a starter's ``configs``."""

_CODE = ".in"  # Python files are kept under another name: they are no part of the library


def init_project(
    directory: FilePath = ".", starter: str = "quickstart", *, force: bool = False
) -> tuple[Path, ...]:
    """Write a project that runs: configuration, task and README.

    Args:
        directory: where; made if it is not there.
        starter: one of `STARTERS`: quickstart, csv, language_model or own.
        force: replace files that are there.

    Returns:
        The files written.

    Raises:
        ConfigError: there is no such starter, or a file is there already.
        RunDirectoryError: a file cannot be written.
    """
    if starter not in STARTERS:
        raise ConfigError(
            f"there is no starter {starter!r}", fix=f"Choose among {', '.join(STARTERS)}."
        )
    root = resources.files("geo_ray") / "starters"
    files = _files_below(root / starter)
    for name in _SHARED.get(starter, ()):
        files[f"configs/{name}"] = root / "configs" / name
    texts = {Path(directory) / name: source for name, source in sorted(files.items())}
    taken = [path for path in texts if path.exists()]
    if taken and not force:
        raise ConfigError(
            f"{taken[0]} is there already", fix="Name another directory, or add --force."
        )
    for path, source in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot make {path.parent}: {error.strerror}") from error
        save_text(path, source.read_text(encoding="utf-8"))
    return tuple(texts)


def _files_below(folder: Traversable, prefix: str = "") -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for item in folder.iterdir():
        if item.is_dir():
            found |= _files_below(item, f"{prefix}{item.name}/")
        else:
            found[prefix + item.name.removesuffix(_CODE)] = item
    return found
