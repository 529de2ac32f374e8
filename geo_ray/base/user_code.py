"""Loads custom classes and files, and attributes exceptions to lines of user code.

A class is named as `package.module:Class` or `path/to/file.py:Class`. `import_file` is the only
place where geo_ray executes a file by its path.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType

from geo_ray.base.errors import GeoRayError, TaskLoadError
from geo_ray.base.text import nearest_word


def error_line(error: BaseException, path: Path) -> int | None:
    """Return the deepest line of `path` on the error's traceback, or None."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def error_place(error: BaseException, path: Path) -> str:
    """Return "path:line", or the path alone when the line is unknown."""
    line = error_line(error, path)
    return str(path) if line is None else f"{path}:{line}"


def error_summary(error: BaseException) -> str:
    """Return "KeyError: 'image'": the type and the message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def import_advice(error: BaseException) -> str:
    """Return the fix for a module that failed to import."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"Install {error.name} here and on every node, or correct the import. If it is your "
            "own file, "
            "add its directory to PYTHONPATH; `ray job submit --working-dir` does so."
        )
    if isinstance(error, SyntaxError):
        return "Correct the named line: it is not valid Python."
    if isinstance(error, SystemExit):
        return 'Put the code that exits Python under `if __name__ == "__main__":`.'
    return "Correct the named line; importing the file in a Python shell shows the whole traceback."


def source_of(kind: type) -> Path | None:
    """Return the file that defines a class, or None if it has none."""
    try:
        name = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    return Path(name) if name else None


class _Source(importlib.abc.SourceLoader):
    """Loads bytes that were read once, so that the hashed code runs; writes no bytecode."""

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
    """Import the file under a module name derived from its path and content.

    A file with the same content is executed once per process; an edited file is a new module.

    Args:
        path: the file.
        what: purpose of the file, in messages.
        error_class: class of the errors.

    Raises:
        GeoRayError: the file cannot be read, or raises; names the file and the line. A geo_ray
            error raised by the file is not wrapped.
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
            fix="Give a file that ends in .py.",
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
            f"{error_place(error, path)} failed while it was imported: {error_summary(error)}",
            fix=import_advice(error),
        ) from error
    return module


def read_source(path: Path, what: str, error_class: type[GeoRayError]) -> bytes:
    """Read a user file without executing it.

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
            near = nearest_word(path.name, sorted(each.name for each in path.parent.glob("*.py")))
            problem = f"does not exist; did you mean {near}?" if near else "does not exist"
        raise error_class(
            f"{what} file {path} {problem}",
            fix="Correct the path. A relative path starts at the configuration file's directory; "
            "on a command line without a configuration, at the working directory.",
        ) from error


@dataclass(frozen=True, slots=True)
class UserClass:
    """Kind of a custom class.

    Attributes:
        what: its name in messages: task, strategy or codec.
        error_class: class of the errors.
        page: file that shows an example.
    """

    what: str
    error_class: type[GeoRayError]
    page: str


def find_class(
    use: str, base_dir: Path, wanted: UserClass, built_in: Mapping[str, str] | None = None
) -> type:
    """Import the module or execute the file, and return the class.

    Args:
        use: the user's notation.
        base_dir: base of a relative path to a file.
        wanted: kind of the class.
        built_in: names of built-in classes, if any.

    Raises:
        GeoRayError: of `UserClass.error_class`; names the file or attribute, and the nearest one.
    """
    names = built_in or {}
    where, colon, attribute = names.get(use, use).rpartition(":")
    if not colon:
        raise _no_class(use, wanted, names)
    module = _module_at(where, use, base_dir, wanted)
    found = vars(module).get(attribute)
    if not isinstance(found, type):
        state = "is not a class" if attribute in vars(module) else "does not exist"
        classes = _classes_of(module)
        raise wanted.error_class(
            f"{attribute!r} of {where} {state}{or_meant(attribute, classes)}",
            fix=f"Use an existing class, such as {where}:{classes[0]}."
            if classes
            else f"Define a class in {where}; {wanted.page} shows the required methods.",
        )
    return found


def find_function(use: str, base_dir: Path, wanted: UserClass) -> FunctionType:
    """Import the module or execute the file, and return the function.

    Args:
        use: ``path/to/file.py:function`` or ``package.module:function``.
        base_dir: base of a relative path to a file.
        wanted: kind of the function.

    Raises:
        GeoRayError: of `UserClass.error_class`; names the file or attribute, and the nearest one.
    """
    where, colon, attribute = use.rpartition(":")
    if not colon:
        raise wanted.error_class(
            f"{wanted.what} {use!r} names no function",
            fix="Write path/to/file.py:function or package.module:function.",
        )
    module = _module_at(where, use, base_dir, wanted)
    found = vars(module).get(attribute)
    if not isinstance(found, FunctionType):
        state = "is not a function" if attribute in vars(module) else "does not exist"
        functions = [name for name, each in vars(module).items() if isinstance(each, FunctionType)]
        raise wanted.error_class(
            f"{attribute!r} of {where} {state}{or_meant(attribute, functions)}",
            fix=f"Define the function in {where}; {wanted.page} has an example.",
        )
    return found


def innermost_line(error: BaseException, function: FunctionType) -> str:
    """Return the deepest line of a function's file on the error's traceback, as "path:line"."""
    return error_place(error, Path(function.__code__.co_filename))


def _module_at(where: str, use: str, base_dir: Path, wanted: UserClass) -> ModuleType:
    if where.endswith(".py"):
        return import_file(base_dir / where, wanted.what, wanted.error_class)
    return _import_module(where, use, wanted)


def source_digest(use: str, base_dir: Path, wanted: UserClass) -> str:
    """Compute the SHA-256 (hex) of the file that `find_class` would execute, without executing it.

    Args:
        use: as for `find_class`.
        base_dir: as for `find_class`.
        wanted: as for `find_class`.

    Raises:
        GeoRayError: of `UserClass.error_class`; the file or module does not exist.
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
                f"{wanted.what} {use!r}: {where} is not a module with its own file",
                fix="Use the module that defines the class, or a .py file.",
            )
        path = Path(spec.origin)
    return hashlib.sha256(read_source(path, wanted.what, wanted.error_class)).hexdigest()


def or_meant(word: str, valid: Iterable[str]) -> str:
    """Return a hint about a word that is not valid."""
    choices = sorted(valid)
    if not choices:
        return ""
    near = nearest_word(word, choices, least=0.5)
    return f"; did you mean {near!r}?" if near else f"; valid: {', '.join(choices)}"


def _no_class(use: str, wanted: UserClass, built_in: Iterable[str]) -> GeoRayError:
    what = wanted.what
    if use.endswith(".py"):
        return wanted.error_class(
            f"{what} {use!r} names a file but no class", fix=f"Write {use}:Class."
        )
    return wanted.error_class(
        f"no built-in {what} {use!r}{or_meant(use, built_in)}",
        fix=f"Use a built-in {what}, package.module:Class, or path/to/file.py:Class.",
    )


def _module_spec(name: str, use: str, wanted: UserClass) -> ModuleSpec:
    """Find a module like the import system, but without importing its packages."""
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
        f"{wanted.what} {use!r}: no module {name!r}",
        fix="Install the package here and on every node, or use a .py file.",
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
            f"{what} {use!r}: importing {name} failed: {error_summary(error)}",
            fix=import_advice(error),
        ) from error


def _classes_of(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if isinstance(value, type)
           and value.__module__ == module.__name__)  # fmt: skip
    return [name for name in own if not name.startswith("_")]
