"""Reading a typed tree from a JSON file that somebody may have edited; what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from geo_ray.config.explain import explain
from geo_ray.config.yaml_text import KeyPath, parse_yaml
from geo_ray.errors import ConfigError, GeoRayError, RunDirectoryError

T = TypeVar("T", bound=BaseModel)

_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_COMPLAINTS: Final = 5
_MOST_BYTES_SEARCHED: Final = 1_000_000


def load_json(path: Path, root: type[T], what: str, wrong: Callable[[str], GeoRayError]) -> T:
    """Read a file.

    Args:
        path: the file; read up to 16 MiB.
        root: the class of the whole tree.
        what: it is, for messages.
        wrong: makes the error from its message.

    Raises:
        GeoRayError: of ``wrong``; the file cannot be read, or is not valid: names the first keys.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise wrong(f"{what} {path} is larger than {_MOST_BYTES} bytes")
        return root.model_validate_json(data)
    except OSError as error:
        raise wrong(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise wrong(f"{what} {path} is not valid: {complaints(error, root, data)}") from None


def load_run_json(path: Path, root: type[T]) -> T | None:
    """Read one of the small files that a run leaves; None if it is not there.

    Raises:
        RunDirectoryError: the file cannot be read, or is of another kind.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {error.strerror or error}",
            fix="Check the permissions of the file.",
        ) from None
    try:
        return root.model_validate_json(data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {complaints(error, root, data)}",
            fix="Remove the file if it was edited; the run's other files are enough for a report.",
        ) from None


def complaints(error: ValidationError, root: type[BaseModel], text: bytes | str) -> str:
    """The first things that are wrong with a file, on one line.

    Args:
        error: what ``root`` said about the file.
        root: the class of the whole tree.
        text: the file, JSON or YAML.
    """
    lines = explain(error, root, _origins(text))
    more = [f"and {len(lines) - _MOST_COMPLAINTS} more"] if len(lines) > _MOST_COMPLAINTS else []
    return "; ".join([*lines[:_MOST_COMPLAINTS], *more])


def _origins(text: bytes | str) -> dict[KeyPath, str]:
    """The line of each key; none if the file is too large to look, or not readable at all."""
    if len(text) > _MOST_BYTES_SEARCHED:
        return {}
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        return parse_yaml(decoded, "").origins
    except (ConfigError, UnicodeDecodeError):
        return {}
