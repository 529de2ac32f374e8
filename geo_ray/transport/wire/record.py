"""Records as headers: one table of fields defines both writing and reading a header.

    SKIP = Record(Skip, Known("region"), "attempt seq=number")
    SKIP.write(skip)                     # {"attempt": 2, "number": 7}
    SKIP.read(header, region="eu")       # Skip("eu", 2, 7), or a FrameError that names the field

A text in the table names fields whose kinds are the types of the record's attributes, each with its
name in the header if that differs. The header has the fields in the table's order. Other fields of
a header are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, get_type_hints

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Kind, Meta, wrong
from geo_ray.transport.wire.frames import Buffer

T = TypeVar("T")
ALWAYS: Final = object()
"""Marks a field without default, which is always written."""

_KINDS: Final[Mapping[Any, Kind[Any]]] = {
    int: fields.count,
    float: fields.number,
    bool: fields.flag,
    str: fields.text,
    bytes: fields.data,
    int | None: fields.optional_count,
    float | None: fields.optional_number,
    str | None: fields.optional_text,
    list[int]: fields.counts,
    list[str]: fields.texts,
}


class ValueCodec(Protocol[T]):
    """Writes a value into a header and reads it back.

    Attributes:
        names: of its fields.
    """

    names: tuple[str, ...]

    def write(self, value: T) -> Meta:
        """The value's fields."""

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> T:
        """The inverse of `write`.

        Args:
            meta: a header that has the value's fields, and perhaps others.
            payload: bytes beside the header.
            known: what the reader knows; see `Known`.

        Raises:
            FrameError: a field is missing, or of the wrong type or range.
        """


class Field:
    """A field of a header, or several that are the parts of one value.

    Args:
        name: the record's attribute; empty if the codec is about several attributes.
        kind: of the field; a codec, if there are several.
        wire: the name in the header, where that is another one.
        default: the value that is left out, and read where the fields are missing.
        null: whether the value may be None, which is None in all fields.
        limit: the value known to the reader that a count is below.
    """

    def __init__(
        self,
        name: str,
        kind: Kind[Any] | ValueCodec[Any],
        wire: str = "",
        *,
        default: object = ALWAYS,
        null: bool = False,
        limit: str = "",
    ) -> None:
        self.name = name
        self.names = (wire or name,) if isinstance(kind, Kind) else kind.names
        self._kind = kind
        self._default = default
        self._null = null
        self._limit = limit

    def write(self, record: Any, meta: Meta) -> None:
        """Put the fields of a record into a header."""
        value = getattr(record, self.name) if self.name else record
        if self._default is not ALWAYS and value == self._default:
            return
        if isinstance(self._kind, Kind):
            meta[self.names[0]] = list(value) if isinstance(value, tuple) else value
        elif self._null and value is None:
            meta.update(dict.fromkeys(self.names))
        else:
            meta.update(self._kind.write(value))

    def read(self, meta: Meta, known: dict[str, Any]) -> Any:
        """The value, of a header that has the fields."""
        if self._default is not ALWAYS and not any(name in meta for name in self.names):
            return self._default
        if self._null and all(meta.get(name, ALWAYS) is None for name in self.names):
            return None
        if not isinstance(self._kind, Kind):
            return self._kind.read(meta, **known)
        value = self._kind(meta, self.names[0])
        if self._limit and value >= known[self._limit]:
            raise wrong(self.names[0], value, f"below {known[self._limit]}")
        return value


@dataclass(frozen=True, slots=True)
class Known:
    """An attribute that is not in the header: the reader knows it, such as who sent the message.

    Attributes:
        name: the record's attribute.
        known: the reader's name for it, where that is another one.
    """

    name: str
    known: str = ""


class Record(Generic[T]):
    """The codec of a record.

    Args:
        made: its class, or a function that makes one.
        table: its fields.
        fixed: attributes that are always the same, and so not in the header.
    """

    def __init__(
        self, made: Callable[..., T], *table: str | Field | Known, **fixed: object
    ) -> None:
        self.made = made
        self._fixed = fixed
        self._known = [line for line in table if isinstance(line, Known)]
        self._fields: list[Field] = []
        types = get_type_hints(made)
        for line in table:
            if isinstance(line, Field):
                self._fields.append(line)
            elif isinstance(line, str):
                pairs = [each.partition("=") for each in line.split()]
                self._fields += [Field(name, _KINDS[types[name]], wire) for name, _, wire in pairs]
        self.names = tuple(name for field in self._fields for name in field.names)

    def write(self, value: T) -> Meta:
        """See `ValueCodec`."""
        meta: Meta = {}
        for field in self._fields:
            field.write(value, meta)
        return meta

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> T:
        """See `ValueCodec`."""
        known["payload"] = payload
        attributes: dict[str, Any] = {}
        for field in self._fields:
            found = field.read(meta, known)
            if field.name:
                attributes[field.name] = found
            else:
                attributes |= found
        for line in self._known:
            attributes[line.name] = known[line.known or line.name]
        return self.made(**attributes, **self._fixed)


class Rows(Generic[T]):
    """The codec of a sequence of records of one kind: a list per field, all of one length.

    Args:
        row: the codec of one record.
        shared: fields that are equal in all rows, and appear in the header once.
        least: fewest rows.
        most: most rows.
        distinct: a field that differs in all rows.
        sparse: fields whose lists are empty where they are None in all rows.
    """

    def __init__(
        self,
        row: ValueCodec[T],
        *shared: Field,
        least: int = 0,
        most: int = 2**31,
        distinct: str = "",
        sparse: str = "",
    ) -> None:
        self._row = row
        self._shared = shared
        self._bounds = (least, most)
        self._distinct = distinct
        self._sparse = frozenset(sparse.split())
        self.names = (*row.names, *(name for field in shared for name in field.names))

    def write(self, value: Sequence[T]) -> Meta:
        """See `ValueCodec`."""
        headers = [self._row.write(row) for row in value]
        meta: Meta = {}
        for name in self._row.names:
            column: list[Any] = [header[name] for header in headers]
            is_empty = name in self._sparse and all(item is None for item in column)
            meta[name] = [] if is_empty else column
        for field in self._shared:
            field.write(value[0], meta)
        return meta

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> tuple[T, ...]:
        """See `ValueCodec`."""
        known |= {field.name: field.read(meta, known) for field in self._shared}
        columns = {name: fields.column(meta, name) for name in self._row.names}
        sizes = {name: len(column) for name, column in columns.items()}
        num = max(sizes.values())
        least, most = self._bounds
        fit = all(
            size == num or (size == 0 and name in self._sparse) for name, size in sizes.items()
        )
        if not fit or not least <= num <= most:
            raise FrameError(f"lists of a header do not fit together; lengths: {sizes}")
        found = []
        for i in range(num):
            row = {name: column[i] if column else None for name, column in columns.items()}
            found.append(self._row.read(row, payload, **known))
        if self._distinct and len(set(columns[self._distinct])) < num:
            raise wrong(self._distinct, columns[self._distinct], "all different")
        return tuple(found)


class Only(Generic[T]):
    """The codec of one record as `Rows` of one."""

    def __init__(self, row: ValueCodec[T]) -> None:
        self._rows = Rows(row, least=1, most=1)
        self.names = row.names

    def write(self, value: T) -> Meta:
        """See `ValueCodec`."""
        return self._rows.write((value,))

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> T:
        """See `ValueCodec`."""
        return self._rows.read(meta, payload, **known)[0]


class CountList:
    """The codec of a tuple of counts, which have a name each."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def write(self, value: Sequence[int]) -> Meta:
        """See `ValueCodec`."""
        return dict(zip(self.names, value, strict=True))

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> tuple[int, ...]:
        """See `ValueCodec`."""
        return tuple(fields.count(meta, name) for name in self.names)


class OneOf(Generic[T]):
    """The codec of a record of one of several classes; a field says of which.

    Args:
        tag: that field.
        records: the classes' codecs by its value.
    """

    def __init__(self, tag: str, records: Mapping[str, Record[Any]]) -> None:
        self._tag = tag
        self._records = records
        self._values = {record.made: value for value, record in records.items()}
        self.names: tuple[str, ...] = (tag,)

    def write(self, value: T) -> Meta:
        """See `ValueCodec`."""
        if (found := self._values.get(type(value))) is None:
            raise FrameError(f"there is no message for {value!r:.100}")
        return {self._tag: found, **self._records[found].write(value)}

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> T:
        """See `ValueCodec`."""
        value = fields.text(meta, self._tag)
        if value not in self._records:
            raise wrong(self._tag, value, f"one of {', '.join(self._records)}")
        found: T = self._records[value].read(meta, payload, **known)
        return found
