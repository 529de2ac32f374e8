"""YAML text <-> plain JSON values, without dangerous or surprising features.

The text is read as parser events; no object is ever constructed from a tag. Scalars follow the
YAML 1.2 core schema, so ``no`` is text, ``1e-3`` is a number and ``12:30`` is text. Rejected, with
the line: duplicate keys, anchors and aliases, tags, NaN and infinities, several documents, deep
nesting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from geo_ray.base.canonical import JSONObject, JSONValue
from geo_ray.base.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_INT_DIGITS = 30

_BROKEN = "Check the named line and the previous one: indentation, brackets, quotes and colons."
_BROKEN_VALUE = "Close brackets and quotes; put quotes around text with YAML syntax."
_TOO_MUCH = "Give a configuration; it has fewer values, in shallow sections."

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_LINE_END = re.compile("[\x85\u2028\u2029\ufeff]")
_NOT_FINITE = re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.nan|\.NaN|\.NAN)$")


@dataclass(frozen=True)
class YamlTree:
    """A parsed value and, for messages, the origin of each of its parts ("line 7")."""

    value: JSONValue
    origins: dict[KeyPath, str] = field(default_factory=dict)


def parse_yaml(text: str, source: str, *, flow_only: bool = False) -> YamlTree:
    """Read one YAML document.

    Args:
        text: the document; an empty one is ``None``.
        source: the name of the text in messages, such as the file's.
        flow_only: reject block collections (for values on a command line).

    Raises:
        ConfigError: names source, line and reason.
    """
    fix = _BROKEN_VALUE if flow_only else _BROKEN
    try:
        try:
            return _tree(text, source, flow_only, _LOADER)
        except (yaml.YAMLError, ValueError):
            # The Python parser has better messages, and joins surrogates.
            return _tree(text, source, flow_only, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        detail = " ".join(part for part in (error.context, error.problem) if part)
        if error.problem == "expected the node content, but found '-'":
            detail = "a line that begins with '-' is inside brackets that are still open: remove "
            detail += "the opening [ or {, or separate the items with commas instead of dashes"
        raise ConfigError(f"{where}: not valid YAML: {detail}", fix=fix) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # Escapes such as "\UFFFFFFFF" leave the parser as bare ValueErrors.
        raise ConfigError(f"{source}: not valid YAML: {error}", fix=fix) from None


def _tree(text: str, source: str, flow_only: bool, loader: Any) -> YamlTree:
    reader = _Reader(source, flow_only)
    return YamlTree(reader.document(yaml.parse(text, Loader=loader)), reader.origins)


class _Reader:
    """Builds one value from events; keeps the line of every part."""

    def __init__(self, source: str, flow_only: bool) -> None:
        self.origins: dict[KeyPath, str] = {}
        self._source = source
        self._flow_only = flow_only
        self._num_values = 0

    def document(self, events: Iterator[Any]) -> JSONValue:
        value: JSONValue = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._refused(
                        event, "a second document (`---`)", "Keep one, and remove the line `---`."
                    )
                value = self._value(next(events), events, ())
        return value

    def _value(self, event: Any, events: Iterator[Any], path: KeyPath) -> JSONValue:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self._refused(event, f"more than {MAX_VALUES} values", _TOO_MUCH)
        if len(path) > MAX_DEPTH:
            raise self._refused(event, f"nesting deeper than {MAX_DEPTH}", _TOO_MUCH)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused(
                event,
                "anchors (&) and aliases (*)",
                "Repeat the value where it is needed, or put text with & or * in quotes.",
            )
        if event.tag is not None:
            raise self._refused(
                event,
                f"the tag {event.tag[:60]!r}; only plain values are allowed",
                "Remove the tag, or put text that begins with ! in quotes.",
            )
        self.origins[path] = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if self._flow_only and not event.flow_style:
            raise self._refused(
                event, "a block", "Put quotes around text that has a colon or a dash."
            )
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(events, path)
        return self._mapping(events, path)

    def _list(self, events: Iterator[Any], path: KeyPath) -> JSONValue:
        items: list[JSONValue] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._value(event, events, (*path, len(items))))
        return items

    def _mapping(self, events: Iterator[Any], path: KeyPath) -> JSONValue:
        items: JSONObject = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._key(event)
            if key in items:
                first = self.origins[(*path, key)]
                raise self._refused(
                    event,
                    f"the key {key!r} twice; the first is in {first}",
                    "Remove one of the two, or merge them.",
                )
            items[key] = self._value(next(events), events, (*path, key))
            # A section or list begins at the line of its key.
            self.origins[(*path, key)] = f"line {event.start_mark.line + 1}"
        return items

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag or event.anchor:
            raise self._refused(event, "a key that is not plain text", "Write the key as a word.")
        if event.implicit[0] and not event.value:
            raise self._refused(event, "an empty key", "Write a word before the colon.")
        return self._unicode(event)

    def _scalar(self, event: Any) -> JSONValue:
        text = self._unicode(event)
        if not event.implicit[0]:
            return text
        if _NULL.match(text):
            return None
        if _BOOL.match(text):
            return text.lower() == "true"
        if _INT.match(text):
            if len(text) > MAX_INT_DIGITS:
                raise self._refused(
                    event,
                    f"an integer of more than {MAX_INT_DIGITS} digits",
                    "Write a smaller number, or put it in quotes if it is text.",
                )
            return int(text)
        if _NOT_FINITE.match(text) or (_FLOAT.match(text) and not math.isfinite(float(text))):
            raise self._refused(
                event,
                f"the number {text[:40]}; it must be finite",
                "Write a finite number, or null where null means that there is no limit.",
            )
        return float(text) if _FLOAT.match(text) else text

    def _unicode(self, event: Any) -> str:
        text: str = event.value
        try:  # JSON writes characters beyond the first plane as two escapes; join them
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            raise self._refused(
                event, "half a surrogate pair", "Write the character itself, or both halves."
            ) from None

    def _refused(self, event: Any, what: str, fix: str) -> ConfigError:
        line = event.start_mark.line + 1
        return ConfigError(f"{self._source}, line {line}: not accepted: {what}", fix=fix)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `parse_yaml` would read as something else; no anchors."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the attribute's declared form

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes these line ends raw outside of double quotes, and reads them as spaces.
        style = '"' if _LINE_END.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _kind, _pattern in (
    ("null", _NULL),
    ("bool", _BOOL),
    ("int", _INT),
    ("float", _FLOAT),
    ("float", _NOT_FINITE),
):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)


def write_yaml(value: JSONValue) -> str:
    """Format ``value`` for `parse_yaml`, with keys in the given order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


MAX_FILE_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A configuration that is not in a file but read like one.

    Attributes:
        text: YAML.
        parent: base of its relative paths.
        name: name in messages.
    """

    text: str
    parent: Path
    name: str = "the configuration given"

    def __str__(self) -> str:
        return self.name


ConfigSource: TypeAlias = Path | ConfigText


def read_text(path: ConfigSource) -> str:
    """Return the text of a configuration.

    Raises:
        ConfigError: the file cannot be read, or is larger than `MAX_FILE_BYTES`.
    """
    if isinstance(path, ConfigText):
        return path.text
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "Save the file as UTF-8."
        raise ConfigError(f"{path}: not UTF-8 text: {error}", fix=fix) from None
    except (OSError, ValueError) as error:
        fix = "Give a YAML file that exists and can be read."
        raise ConfigError(f"{path}: cannot be read: {error}", fix=fix) from None
    if len(data) > MAX_FILE_BYTES:
        fix = "Give a configuration; data and tables have other files."
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", fix=fix)
    return text
