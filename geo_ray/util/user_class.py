"""Find a class that the user names: `package.module:Class`, or `path/to/file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from geo_ray.errors import GeoRayError
from geo_ray.util.blame import import_advice, summary
from geo_ray.util.nearest import nearest
from geo_ray.util.user_file import import_file


@dataclass(frozen=True, slots=True)
class UserClass:
    """What kind of thing is looked for.

    Attributes:
        what: its name in messages: task, strategy or codec.
        error_class: of the errors.
        page: file that shows how one is written.
    """

    what: str
    error_class: type[GeoRayError]
    page: str


def find_class(
    use: str, base_dir: Path, wanted: UserClass, built_in: Mapping[str, str] | None = None
) -> type:
    """Import the module or run the file, and take the class.

    Args:
        use: as the user wrote it.
        base_dir: where a relative path to a file starts.
        wanted: what it is to be.
        built_in: short names, if the library has such.

    Raises:
        GeoRayError: of `UserClass.error_class`; names the file or attribute, and the nearest valid
            one.
    """
    names = built_in or {}
    where, colon, attribute = names.get(use, use).rpartition(":")
    what = wanted.what
    if not colon:
        if use.endswith(".py"):
            raise wanted.error_class(
                f"{what} {use!r} names a file but no class", fix=f"Write {use}:Class."
            )
        raise wanted.error_class(
            f"there is no built-in {what} {use!r}{or_meant(use, names)}",
            fix=f"Name a built-in {what}, package.module:Class, or path/to/file.py:Class.",
        )
    if where.endswith(".py"):
        module = import_file(base_dir / where, what, wanted.error_class)
    else:
        module = _import_module(where, use, wanted)
    found = vars(module).get(attribute)
    if not isinstance(found, type):
        state = "is no class" if attribute in vars(module) else "does not exist"
        classes = _classes_of(module)
        raise wanted.error_class(
            f"{attribute!r} of {where} {state}{or_meant(attribute, classes)}",
            fix=f"Name a class that is there, say {where}:{classes[0]}."
            if classes
            else f"Define a class in {where}; {wanted.page} shows what it needs.",
        )
    return found


def source_digest(kind: type, use: str, base_dir: Path) -> str:
    """SHA-256 (hex) of the file that defines a class which `find_class` found."""
    where = use.rpartition(":")[0]
    path = base_dir / where if where.endswith(".py") else Path(inspect.getfile(kind))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def or_meant(word: str, valid: Iterable[str]) -> str:
    """What is to be said of a word that is not among the valid ones."""
    choices = sorted(valid)
    if not choices:
        return ""
    near = nearest(word, choices, least=0.5)
    return f"; did you mean {near!r}?" if near else f"; there is: {', '.join(choices)}"


def _import_module(name: str, use: str, wanted: UserClass) -> ModuleType:
    what = wanted.what
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{name}.".startswith(f"{error.name}.")
        ):
            raise wanted.error_class(
                f"{what} {use!r}: there is no module {error.name!r}",
                fix="Install the package here and on every node, or name a .py file.",
            ) from error
        raise wanted.error_class(
            f"{what} {use!r}: importing {name} failed: {summary(error)}", fix=import_advice(error)
        ) from error


def _classes_of(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if isinstance(value, type)
           and value.__module__ == module.__name__)  # fmt: skip
    return [name for name in own if not name.startswith("_")]
