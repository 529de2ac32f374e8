"""A configuration section of a custom class: ``use``, and the options of the class.

The class is a pydantic model like those of this library: its fields are its options, strictly
checked. ``use`` is `path/to/file.py:Class`, relative to the configuration's directory, or
`package.module:Class`. The digest of the file becomes part of the section, ``sha256``, so the
configuration of a run records the content of the file. A process of the run compares the digest
before it imports the file, and a run is not resumed with other content unnoticed.

A process that only reads a run imports nothing: it creates a `SavedClass` from the section.

The reader of a configuration passes the base of relative paths in pydantic's validation context;
see `context`.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializationInfo,
    Tag,
    ValidationInfo,
    WrapSerializer,
    WrapValidator,
    create_model,
)

from geo_ray.base.errors import ConfigChangedError, ConfigError, GeoRayError, OwnCodeError
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import (
    UserClass,
    error_place,
    error_summary,
    find_class,
    or_meant,
    source_digest,
    source_of,
)

_USE, _DIGEST = "use", "sha256"
_BASE_DIR, _MAY_CHANGE, _READ_ONLY = "base_dir", "may_change", "read_only"
_BY_KIND: Final = "kind"
_BY_USE: Final = "OwnClass"  # name of the class, for messages


class OwnClass(StrictModel):
    """The section as written: all other keys are options of the class."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(description="`path/to/file.py:Class` or `package.module:Class`")
    sha256: str | None = Field(
        None, description="digest of the file; filled in, and compared if given"
    )


class SavedClass(OwnClass):
    """The section of a class that was not imported.

    Enough to show a run; nothing can be run with it.
    """

    kind: str = Field(description="its name in the run's events")

    @property
    def traits(self) -> object:
        """Not available without the class.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.use} was not imported: commands that read a run execute none of its code",
            fix="Load the run's config.lock.yaml with geo_ray.load_config, which imports the "
            "class.",
        )


def context(
    base_dir: Path, *, may_change: Collection[str] = (), read_only: bool = False
) -> dict[str, Any]:
    """Return the validation context for reading a configuration.

    Args:
        base_dir: base of relative paths.
        may_change: files and modules, as in sections, whose class is accepted although the file has
            another digest than the section.
        read_only: import nothing, and create a `SavedClass` for each section; the configuration can
            be shown, but not run.
    """
    return {_BASE_DIR: base_dir, _MAY_CHANGE: may_change, _READ_ONLY: read_only}


def only_recorded(*sections: object) -> bool:
    """Return whether one of the sections is a saved section rather than a class."""
    return any(isinstance(section, SavedClass) for section in sections)


def section_type(classes: Sequence[type], load: OwnLoader) -> Any:
    """Return the type of a section whose ``kind`` or ``use`` selects the class.

    Args:
        classes: built-in classes, each with a literal ``kind``.
        load: creates objects of custom classes.
    """
    any_of_them: Any = Union[tuple(classes)]  # noqa: UP007
    built_in: Any = Annotated[any_of_them, Field(discriminator="kind")]
    own: Any = Annotated[OwnClass, WrapValidator(load), WrapSerializer(_dumped)]
    return Annotated[
        Annotated[built_in, Tag(_BY_KIND)] | Annotated[own, Tag(_BY_USE)],
        Discriminator(_which),
    ]


def _which(value: Any) -> str:
    """Return the tag of a section or of its object: by ``kind`` or by ``use``."""
    keys = type(value).model_fields if isinstance(value, BaseModel) else value
    return _BY_USE if isinstance(keys, Mapping) and _USE in keys else _BY_KIND


def _dumped(value: BaseModel, _: Any, info: SerializationInfo) -> Any:
    """Serialize to the section; a wrap serializer of pydantic."""
    return value.model_dump(mode="json" if info.mode == "json" else "python")


@dataclass(frozen=True, slots=True, eq=False)
class OwnLoader:
    """Creates objects from sections; a wrap validator of pydantic.

    Attributes:
        wanted: strategy or codec.
        protocol: the class must have every public member of it; if it is a base class rather than
            a `typing.Protocol`, the class must derive from it.
        traits_class: class of an object's property `traits`.
        taken: names of built-in classes.
        may_change: whether a run can be resumed with another content of the file.
    """

    wanted: UserClass
    protocol: type
    traits_class: type
    taken: Collection[str]
    may_change: bool

    def __call__(self, value: Any, _: Any, info: ValidationInfo) -> Any:
        """Create the object.

        Raises:
            ValueError: an option is invalid; names it.
            ConfigError: the class cannot be found, or lacks something.
            ConfigChangedError: the file differs from that of the section.
        """
        if isinstance(value, StrictModel) and not isinstance(value, OwnClass):
            return value
        section = OwnClass.model_validate(value)
        where = info.context or context(Path())
        if where[_READ_ONLY]:
            written = {"kind": section.use.rpartition(":")[2]} | section.model_dump()
            return SavedClass.model_validate(written)
        return self._object(section, where)

    def _object(self, section: OwnClass, where: Mapping[str, Any]) -> StrictModel:
        base_dir = where[_BASE_DIR]
        digest = source_digest(section.use, base_dir, self.wanted)
        named = section.use.rpartition(":")[0]
        if section.sha256 not in (None, digest) and named not in where[_MAY_CHANGE]:
            otherwise = (
                f"; or resume with the current one: --allow-change {named}."
                if self.may_change
                else ", or start a new run."
            )
            raise ConfigChangedError(
                f"{self.wanted.what} {section.use}: the file differs from that of the "
                "configuration",
                fix=f"Restore the file here and on every node{otherwise}",
            )
        kind = self.find(section.use, base_dir)
        made = _named(kind, section.use, digest, self._guarded)
        options = dict(section.model_extra or {})
        unknown = [key for key in options if key not in kind.model_fields]
        if unknown:
            hint = or_meant(unknown[0], kind.model_fields) or "; it takes no options"
            raise ValueError(f"{section.use} has no option {unknown[0]!r}{hint}")
        # Validate through JSON, like the rest of the configuration: strict, but lists become
        # tuples.
        found = made.model_validate_json(json.dumps(options))
        self._check_object(found, kind, section.use)
        return found

    def find(self, use: str, base_dir: Path) -> type[StrictModel]:
        """Return the class, after the checks that need no object.

        Raises:
            ConfigError: the class cannot be found, or lacks something.
        """
        name = f"{self.wanted.what} {use}"
        kind = find_class(use, base_dir, self.wanted)
        base = self.protocol if issubclass(self.protocol, StrictModel) else StrictModel
        if not issubclass(kind, base):
            raise ConfigError(
                f"{name} is not a class of options",
                fix=f"Derive it from {base.__module__}.{base.__name__}; its fields are its "
                "options.",
            )
        where = use.rpartition(":")[0]
        if not where.endswith(".py") and kind.__module__ != where:
            raise ConfigError(
                f"{name} is defined in {kind.__module__}, but the digest would be that of {where}",
                fix=f"Write use: {kind.__module__}:{kind.__name__}.",
            )
        members = dict(inspect.getmembers_static(kind)) | kind.model_fields
        asked = {k: v for k, v in vars(self.protocol).items() if k in self._members}
        missing = [key for key in self._members if key not in members]
        missing += sorted(kind.__abstractmethods__)
        if missing:
            raise ConfigError(
                f"{name} has no {', '.join(missing)}",
                fix=f"{self.wanted.page} shows the required members.",
            )
        for key, method in asked.items():
            if inspect.isfunction(method):
                _check_signature(name, key, method, members[key])
        hidden = [key for key in (_USE, _DIGEST) if key in kind.model_fields]
        if hidden:
            raise ConfigError(f"{name}: its option {hidden[0]!r} has the name of another key")
        return kind

    def _guarded(self, kind: type, use: str) -> dict[str, Callable[..., Any]]:
        """Return the methods of the protocol, each of which names the line that raised."""
        path = source_of(kind) or Path(use)
        members = dict(inspect.getmembers_static(kind))
        return {
            key: _blaming(members[key], f"{self.wanted.what} {use}: {key}", path)
            for key in self._members
            if inspect.isfunction(members.get(key))
        }

    @property
    def _members(self) -> list[str]:
        """Return the public members that the class must have: methods and properties."""
        inherited = vars(StrictModel) if issubclass(self.protocol, StrictModel) else {}
        return [k for k in vars(self.protocol) if not k.startswith("_") and k not in inherited]

    def _check_object(self, found: Any, kind: type, use: str) -> None:
        try:
            name, traits = found.kind, found.traits
        except Exception as error:
            where = error_place(error, source_of(kind) or Path(use))
            raise ConfigError(
                f"{self.wanted.what} {use}: {where}: {error_summary(error)}",
                fix="Correct this line; docs/reference/strategy-interface.md lists all traits.",
            ) from error
        if not isinstance(traits, self.traits_class):
            raise ConfigError(
                f"{self.wanted.what} {use}: `traits` returns {type(traits).__name__}, not "
                f"{self.traits_class.__module__}.{self.traits_class.__name__}",
                fix="Correct `traits`; docs/reference/strategy-interface.md lists all of them.",
            )
        if not isinstance(name, str) or not name or name in self.taken:
            raise ConfigError(
                f"{self.wanted.what} {use}: `kind` is {name!r}; it must differ from every "
                f"built-in {self.wanted.what}"
            )


@functools.cache
def _named(
    kind: type[StrictModel],
    use: str,
    digest: str,
    guarded: Callable[[type, str], dict[str, Callable[..., Any]]],
) -> type[StrictModel]:
    """Return a subclass whose objects know their section and name the line that raised."""
    fields: dict[str, Any] = {
        _USE: (Literal[use], use),
        _DIGEST: (Literal[digest], digest),
    }
    about: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    base: type[StrictModel] = types.new_class(
        kind.__name__, (kind,), exec_body=methodcaller("update", about | guarded(kind, use))
    )
    return create_model(kind.__name__, __base__=base, __module__=kind.__module__, **fields)


def _blaming(method: Callable[..., Any], name: str, path: Path) -> Callable[..., Any]:
    """Wrap a method so that its errors name it and the line of the user's file."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except GeoRayError:
            raise
        except Exception as error:
            raise OwnCodeError(
                f"{name} raised {error_summary(error)} ({error_place(error, path)})"
            ) from error

    return call


def _check_signature(name: str, method: str, wanted: Callable[..., Any], found: object) -> None:
    arguments = list(inspect.signature(wanted).parameters)
    text = f"{method}({', '.join(arguments[1:])})"
    if not inspect.isfunction(found):
        raise ConfigError(f"{name}: {method} is not a method; {text} is required")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{name}: {method} cannot be called as {text}: {error}") from error
