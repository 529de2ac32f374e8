"""A section of the configuration that names a class of the user's: ``use``, and its own options.

The class is a pydantic model as those of this library are: its fields are its options, strictly
checked. ``use`` is `path/to/file.py:Class`, relative to the configuration's directory, or
`package.module:Class`. The digest of the file becomes a part of the section, ``sha256``; so the
configuration of a run tells with which content it was made. A process of the run compares the
digest before it imports the file, and a run is not resumed with another content unnoticed.

A process that only reads a run imports nothing: it takes a `SavedClass` from the section.

Whoever reads a configuration says where relative paths start with pydantic's validation context:
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
_BY_USE: Final = "OwnClass"  # the name of the class, by which messages find it


class OwnClass(StrictModel):
    """The section as it is written: all other keys are options of the class."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(description="`path/to/file.py:Class` or `package.module:Class`")
    sha256: str | None = Field(
        None, description="digest of the file; filled in, and compared if it is given"
    )


class SavedClass(OwnClass):
    """The section of a class that was not imported.

    Enough to show a run; nothing can be run with it.
    """

    kind: str = Field(description="its name in the run's events")

    @property
    def traits(self) -> object:
        """Only the class itself knows them.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.use} was not imported: commands that read a run execute none of its code",
            fix="Load the run's config.lock.yaml with geo_ray.load_config, which imports it.",
        )


def context(
    base_dir: Path, *, may_change: Collection[str] = (), read_only: bool = False
) -> dict[str, Any]:
    """The validation context for reading a configuration.

    Args:
        base_dir: where relative paths start.
        may_change: files and modules, as sections name them, of which a class is taken although
            the file has another digest than the section says.
        read_only: import nothing, and make a `SavedClass` of each section; the configuration can
            be shown, and nothing can be run with it.
    """
    return {_BASE_DIR: base_dir, _MAY_CHANGE: may_change, _READ_ONLY: read_only}


def only_recorded(*sections: object) -> bool:
    """Whether one of the sections is what a run has written down, and not the class itself."""
    return any(isinstance(section, SavedClass) for section in sections)


def section_type(classes: Sequence[type], load: OwnLoader) -> Any:
    """The type of a section whose ``kind`` or ``use`` chooses the class.

    Args:
        classes: of the library, each with a literal ``kind``.
        load: makes objects of the user's classes.
    """
    any_of_them: Any = Union[tuple(classes)]  # noqa: UP007
    built_in: Any = Annotated[any_of_them, Field(discriminator="kind")]
    own: Any = Annotated[OwnClass, WrapValidator(load), WrapSerializer(_dumped)]
    return Annotated[
        Annotated[built_in, Tag(_BY_KIND)] | Annotated[own, Tag(_BY_USE)],
        Discriminator(_which),
    ]


def _which(value: Any) -> str:
    """The tag of a section, or of the object that it has become: by ``kind`` or by ``use``."""
    keys = type(value).model_fields if isinstance(value, BaseModel) else value
    return _BY_USE if isinstance(keys, Mapping) and _USE in keys else _BY_KIND


def _dumped(value: BaseModel, _: Any, info: SerializationInfo) -> Any:
    """The section again, as pydantic's wrap serializers are called."""
    return value.model_dump(mode="json" if info.mode == "json" else "python")


@dataclass(frozen=True, slots=True, eq=False)
class OwnLoader:
    """Makes objects of sections, as pydantic's wrap validators are called.

    Attributes:
        wanted: strategy or codec.
        protocol: what the class must have: every public member of it. A class that derives from
            it, where it is no `typing.Protocol` but a base class.
        traits_class: class of the property `traits` of an object.
        taken: names that the library's own classes have.
        may_change: whether a run can be resumed with another content of the file.
    """

    wanted: UserClass
    protocol: type
    traits_class: type
    taken: Collection[str]
    may_change: bool

    def __call__(self, value: Any, _: Any, info: ValidationInfo) -> Any:
        """The object.

        Raises:
            ValueError: an option is wrong; names it.
            ConfigError: the class cannot be found, or lacks something.
            ConfigChangedError: the file is not the one that the section was made with.
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
                f"; or resume with the present one: --allow-change {named}."
                if self.may_change
                else ", or begin a new run."
            )
            raise ConfigChangedError(
                f"{self.wanted.what} {section.use}: the file is not the one that the "
                "configuration was made with",
                fix=f"Restore the file here and on every node{otherwise}",
            )
        kind = self.find(section.use, base_dir)
        made = _named(kind, section.use, digest, self._guarded)
        options = dict(section.model_extra or {})
        unknown = [key for key in options if key not in kind.model_fields]
        if unknown:
            hint = or_meant(unknown[0], kind.model_fields) or "; it takes no options"
            raise ValueError(f"{section.use} has no option {unknown[0]!r}{hint}")
        # Through JSON, as the rest of the configuration: strict, but a list may be a tuple.
        found = made.model_validate_json(json.dumps(options))
        self._check_object(found, kind, section.use)
        return found

    def find(self, use: str, base_dir: Path) -> type[StrictModel]:
        """The class itself, checked for what can be seen without an object.

        Raises:
            ConfigError: it cannot be found, or lacks something.
        """
        name = f"{self.wanted.what} {use}"
        kind = find_class(use, base_dir, self.wanted)
        base = self.protocol if issubclass(self.protocol, StrictModel) else StrictModel
        if not issubclass(kind, base):
            raise ConfigError(
                f"{name} is no class of options",
                fix=f"Derive it from {base.__module__}.{base.__name__}; its fields are its "
                "options.",
            )
        where = use.rpartition(":")[0]
        if not where.endswith(".py") and kind.__module__ != where:
            raise ConfigError(
                f"{name} is defined in {kind.__module__}, and the digest would be that of {where}",
                fix=f"Write use: {kind.__module__}:{kind.__name__}.",
            )
        members = dict(inspect.getmembers_static(kind)) | kind.model_fields
        asked = {k: v for k, v in vars(self.protocol).items() if k in self._members}
        missing = [key for key in self._members if key not in members]
        missing += sorted(kind.__abstractmethods__)
        if missing:
            raise ConfigError(
                f"{name} lacks {', '.join(missing)}",
                fix=f"{self.wanted.page} shows what it must have.",
            )
        for key, method in asked.items():
            if inspect.isfunction(method):
                _check_signature(name, key, method, members[key])
        hidden = [key for key in (_USE, _DIGEST) if key in kind.model_fields]
        if hidden:
            raise ConfigError(f"{name}: its option {hidden[0]!r} has the name of another key")
        return kind

    def _guarded(self, kind: type, use: str) -> dict[str, Callable[..., Any]]:
        """The methods of the protocol, each naming the line that raised."""
        path = source_of(kind) or Path(use)
        members = dict(inspect.getmembers_static(kind))
        return {
            key: _blaming(members[key], f"{self.wanted.what} {use}: {key}", path)
            for key in self._members
            if inspect.isfunction(members.get(key))
        }

    @property
    def _members(self) -> list[str]:
        """The public members that the class must have: its methods and properties."""
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
                f"{self.wanted.what} {use}: `traits` gives {type(traits).__name__}, not "
                f"{self.traits_class.__module__}.{self.traits_class.__name__}",
                fix="Correct `traits`; docs/reference/strategy-interface.md lists all of them.",
            )
        if not isinstance(name, str) or not name or name in self.taken:
            raise ConfigError(
                f"{self.wanted.what} {use}: `kind` is {name!r}; it must be a name that no "
                f"{self.wanted.what} of the library has"
            )


@functools.cache
def _named(
    kind: type[StrictModel],
    use: str,
    digest: str,
    guarded: Callable[[type, str], dict[str, Callable[..., Any]]],
) -> type[StrictModel]:
    """The same class, of which objects know where they come from, and whose line raised."""
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
    """The method; what it raises names it and the line of the user's file."""

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
        raise ConfigError(f"{name}: {method} is no method; {text} is wanted")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{name}: {method} cannot be called as {text}: {error}") from error
