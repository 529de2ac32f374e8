"""Find a class that the user names: `package.module:Class`, or `path/to/file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from geo_ray.errors import GeoRayError
from geo_ray.util.blame import import_advice, summary
from geo_ray.util.nearest import nearest
from geo_ray.util.user_file import import_file, read_source


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
        raise _no_class(use, wanted, names)
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


def source_digest(use: str, base_dir: Path, wanted: UserClass) -> str:
    """Compute the SHA-256 (hex) of the file that `find_class` would run; runs nothing.

    Args:
        use: as for `find_class`.
        base_dir: as for `find_class`.
        wanted: as for `find_class`.

    Raises:
        GeoRayError: of `UserClass.error_class`; there is no such file or module.
    """
    where, colon, _ = use.rpartition(":")
    if not colon:
        raise _no_class(use, wanted, {})
    if where.endswith(".py"):
        path = (base_dir / where).absolute()
    else:
        spec = _module_spec(where, use, wanted)
        if not spec.has_location or spec.origin is None:
            raise wanted.error_class(
                f"{wanted.what} {use!r}: {where} is no module with a file of its own",
                fix="Name the module that defines the class, or a .py file.",
            )
        path = Path(spec.origin)
    return hashlib.sha256(read_source(path, wanted.what, wanted.error_class)).hexdigest()


def or_meant(word: str, valid: Iterable[str]) -> str:
    """What is to be said of a word that is not among the valid ones."""
    choices = sorted(valid)
    if not choices:
        return ""
    near = nearest(word, choices, least=0.5)
    return f"; did you mean {near!r}?" if near else f"; there is: {', '.join(choices)}"


def _no_class(use: str, wanted: UserClass, built_in: Iterable[str]) -> GeoRayError:
    what = wanted.what
    if use.endswith(".py"):
        return wanted.error_class(
            f"{what} {use!r} names a file but no class", fix=f"Write {use}:Class."
        )
    return wanted.error_class(
        f"there is no built-in {what} {use!r}{or_meant(use, built_in)}",
        fix=f"Name a built-in {what}, package.module:Class, or path/to/file.py:Class.",
    )


def _module_spec(name: str, use: str, wanted: UserClass) -> ModuleSpec:
    """Find a module as the import system does; in contrast to it, import no package on the way."""
    package, _, last = name.rpartition(".")
    places = None
    if package:
        places = _module_spec(package, use, wanted).submodule_search_locations
        if places is None:
            raise _no_module(name, use, wanted)
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    found = (find(name, places, None) for find in finders if find is not None)
    spec: ModuleSpec | None = next((each for each in found if each is not None), None)
    if spec is None or not last:
        raise _no_module(name, use, wanted)
    return spec


def _no_module(name: str, use: str, wanted: UserClass) -> GeoRayError:
    return wanted.error_class(
        f"{wanted.what} {use!r}: there is no module {name!r}",
        fix="Install the package here and on every node, or name a .py file.",
    )


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
            raise _no_module(error.name, use, wanted) from error
        raise wanted.error_class(
            f"{what} {use!r}: importing {name} failed: {summary(error)}", fix=import_advice(error)
        ) from error


def _classes_of(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if isinstance(value, type)
           and value.__module__ == module.__name__)  # fmt: skip
    return [name for name in own if not name.startswith("_")]
