"""Run a user's .py file as a module. The only place where geo_ray executes a file by its path."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from geo_ray.errors import GeoRayError, TaskLoadError
from geo_ray.util.blame import import_advice, place, summary
from geo_ray.util.nearest import nearest


class _Source(importlib.abc.SourceLoader):
    """Serves bytes read once, so that what runs is what was hashed, and no bytecode is written."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: object) -> bytes:
        return self._source


def import_file(
    path: Path, what: str = "task", error_class: type[GeoRayError] = TaskLoadError
) -> ModuleType:
    """Import the file under a module name made of its path and content.

    The same content of the same file is run once per process; an edited file is a new module.

    Args:
        path: the file.
        what: it is for, in messages.
        error_class: of the errors.

    Raises:
        GeoRayError: the file cannot be read or raises; names the file and the line. One of geo_ray
            that the file raises passes as it is.
    """
    path = path.absolute()
    source = read_source(path, what, error_class)
    name = "geo_ray_user_" + hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(path, source))
    if spec is None or spec.loader is None:
        raise error_class(
            f"{what} file {path} cannot be loaded as a Python module",
            fix="Name a file that ends in .py.",
        )
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pydantic resolve annotations through sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, GeoRayError) or not isinstance(error, Exception | SystemExit):
            raise
        raise error_class(
            f"{place(error, path)} failed while it was imported: {summary(error)}",
            fix=import_advice(error),
        ) from error
    return module


def read_source(path: Path, what: str, error_class: type[GeoRayError]) -> bytes:
    """Read a user's file without running it.

    Args:
        path: the file, absolute.
        what: as for `import_file`.
        error_class: as for `import_file`.

    Raises:
        GeoRayError: the file cannot be read; names the nearest file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            near = nearest(path.name, sorted(each.name for each in path.parent.glob("*.py")))
            problem = f"does not exist; did you mean {near}?" if near else "does not exist"
        raise error_class(
            f"{what} file {path} {problem}",
            fix="Correct the path. A relative one starts at the configuration file's directory; "
            "on a command line without a configuration, at the working directory.",
        ) from error
