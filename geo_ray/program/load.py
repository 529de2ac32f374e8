"""Finds the program that a file has."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from geo_ray.errors import GeoRayError, ProgramLoadError
from geo_ray.program.graph import Program
from geo_ray.util.blame import place, summary
from geo_ray.util.user_class import or_meant
from geo_ray.util.user_file import import_file


def load_program(where: str, base_dir: Path | None = None) -> Program:
    """The program of ``FILE.py:NAME``: a `Program`, or a function that returns one.

    Args:
        where: the name may be left out if the file has one program.
        base_dir: where a relative path starts; None: the working directory.

    Raises:
        ProgramLoadError: there is none.
        ProgramError: it is there, and wrong.
    """
    file, _, name = where.partition(".py:")
    path = (base_dir or Path.cwd()) / (f"{file}.py" if name else where)
    if path.suffix != ".py":
        raise ProgramLoadError(f"{where} is no FILE.py or FILE.py:NAME")
    module = import_file(path, "program", ProgramLoadError)
    own = _programs(module)
    if not name:
        if len(own) != 1:
            listed = ", ".join(own) or "none"
            raise ProgramLoadError(f"{path.name} has not one program but {len(own)}: {listed}")
        (name,) = own
    found: Any = vars(module).get(name)
    if found is None:
        raise ProgramLoadError(f"{path.name} has no program {name!r}{or_meant(name, own)}")
    if not isinstance(found, Program) and callable(found):
        try:
            found = found()
        except GeoRayError:
            raise
        except Exception as error:
            raise ProgramLoadError(f"{place(error, path)}: {name}(): {summary(error)}") from error
    if not isinstance(found, Program):
        raise ProgramLoadError(f"{name} of {path.name} is no program, but {type(found).__name__}")
    return found


def _programs(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Program)]
