"""Load a task from the configuration: built-in, from a package, or from the user's own file.

A task is checked when it is loaded (members, signatures, column types), so that a mistake is
reported before the run starts. Column types are written as in shards: "int64", "float32[64]".
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
from pydantic import Field, ValidationError

from geo_ray.base.describe import paragraph
from geo_ray.base.errors import GeoRayError, SchemaMismatchError, TaskLoadError
from geo_ray.base.explain import explain
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import UserClass, error_place, error_summary, find_class, source_of
from geo_ray.data.tasks.base import Columns, Task

_PATTERN = re.compile(r"(bool|u?int(?:8|16|32|64)|float(?:16|32|64))(?:\[([1-9][0-9]{0,8})\])?")


@dataclass(frozen=True)
class ColumnSpec:
    """A parsed column type: dtype, and the length of each row's list (None for a scalar)."""

    dtype: np.dtype[Any]
    length: int | None

    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of one row: () or (length,)."""
        return () if self.length is None else (self.length,)


def parse_column_type(text: str) -> ColumnSpec:
    """Parse "uint8[784]" and the like.

    Raises:
        SchemaMismatchError: the text is not a column type.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SchemaMismatchError(
            f"{text!r} is not a column type",
            fix='Write a NumPy dtype and an optional length: "int64", "float32[64]", "uint8[784]".',
        )
    length = match.group(2)
    return ColumnSpec(np.dtype(match.group(1)), int(length) if length else None)


def check_task_columns(types: Mapping[str, str], columns: Columns) -> None:
    """Check names, dtypes, row shapes and equal row counts of a table.

    Raises:
        SchemaMismatchError: naming the first column that differs and how.
    """
    if set(types) != set(columns):
        raise SchemaMismatchError(
            f"columns are {', '.join(sorted(columns))}; the task has {', '.join(sorted(types))}"
        )
    rows: dict[int, str] = {}
    for name, text in types.items():
        expected, array = parse_column_type(text), columns[name]
        found = f"{array.dtype}{list(array.shape[1:]) or ''}"
        if array.ndim == 0 or array.dtype != expected.dtype:
            raise SchemaMismatchError(f"column {name!r} is {found}, the task has {text}")
        if array.shape[1:] != expected.row_shape():
            raise SchemaMismatchError(f"column {name!r} is {found}, the task has {text}")
        rows.setdefault(int(array.shape[0]), name)
    if len(rows) > 1:
        counts = ", ".join(f"{name!r} {count}" for count, name in rows.items())
        raise SchemaMismatchError(f"columns differ in their number of rows: {counts}")


METHODS: Mapping[str, tuple[str, ...]] = {
    "model": ("seed",),
    "collate": ("columns", "device"),
    "loss": ("model", "batch"),
    "evaluate": ("model", "batch"),
    "metrics": ("stats",),
}
"""The required methods of a task and their arguments."""

_COLUMNS = 'Write for example columns = {"image": "float32[64]", "label": "int64"}.'

_OPTIONAL: Mapping[str, tuple[str, ...]] = {"dataset": ("seed",), "groups": ("model",)}


def check_task(task: object, name: str) -> None:
    """Check members, signatures and the schema of a task without calling its methods.

    Args:
        task: the task object.
        name: the user's name for the task, for the message.

    Raises:
        TaskLoadError: naming all missing members, or the first error.
    """
    missing = [f"{method}({', '.join(METHODS[method])})" for method in METHODS
               if not callable(getattr(task, method, None))]  # fmt: skip
    missing += [attr for attr in ("columns", "label_column") if not hasattr(task, attr)]
    if missing:
        raise TaskLoadError(
            f"task {name} has no {', '.join(missing)}",
            fix="Define them in the class; docs/guides/tasks.md has an example of each.",
        )
    for method, arguments in {**METHODS, **_OPTIONAL}.items():
        _check_signature(task, method, arguments, name)
    _check_schema(task, name)


def _check_signature(task: object, method: str, arguments: tuple[str, ...], name: str) -> None:
    function = getattr(task, method, None)
    if function is None:
        return
    if not callable(function):
        raise TaskLoadError(
            f"task {name}: {method} is not a method",
            fix=f"Define {method}({', '.join(arguments)}), or give the attribute another name.",
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        wanted = f"{method}({', '.join(arguments)})"
        raise TaskLoadError(
            f"task {name}: {method} cannot be called as {wanted}: {error}",
            fix=f"Define it as `def {method}(self, {', '.join(arguments)})`.",
        ) from error


def _check_schema(task: object, name: str) -> None:
    columns, label = getattr(task, "columns", None), getattr(task, "label_column", None)
    if not isinstance(columns, Mapping) or not columns:
        raise TaskLoadError(
            f"task {name}: columns must be a non-empty mapping of column name to type",
            fix=_COLUMNS,
        )
    for column, text in columns.items():
        if not isinstance(column, str) or not isinstance(text, str):
            raise TaskLoadError(
                f"task {name}: columns must map text to text, found {column!r}: {text!r}",
                fix=_COLUMNS,
            )
        try:
            parse_column_type(text)
        except SchemaMismatchError as error:
            raise TaskLoadError(
                f"task {name}: column {column!r}: {error.message}", fix=error.fix
            ) from error
    if label is None:
        return
    if label not in columns:
        raise TaskLoadError(
            f"task {name}: label_column {label!r} is not one of its columns, "
            f"{', '.join(sorted(columns))}",
            fix="Use one of the columns, or None if the data have no label.",
        )
    kind = parse_column_type(columns[label])
    if kind.dtype.kind not in "iu" or kind.length is not None:
        raise TaskLoadError(
            f"task {name}: label_column {label!r} must be one integer per row, not "
            f"{columns[label]}",
            fix="Use an integer column such as int64, or None if the rows have no labels.",
        )


Scalar: TypeAlias = str | int | float | bool | None

BUILT_IN: Mapping[str, str] = {
    "digits": "geo_ray.data.tasks.digits:Digits",
    "bytelm": "geo_ray.data.tasks.bytelm:ByteLM",
    "ctr": "geo_ray.data.tasks.ctr:Ctr",
    "images": "geo_ray.data.tasks.images:Images",
}
"""Short names of the built-in tasks."""


_TASK: Final = UserClass("task", TaskLoadError, "docs/guides/tasks.md")


class TaskConfig(StrictModel):
    """The task to train, and its options."""

    use: str = Field(
        description="A built-in task (digits, bytelm, ctr, images), `package.module:Class`, or"
        " `path/to/file.py:Class` (relative to the configuration file)."
    )
    options: dict[str, Scalar] = Field(
        default_factory=dict, description="Options of the task: the fields of its class `Options`."
    )


def load_task(cfg: TaskConfig, base_dir: Path) -> Task:
    """Import, build and check a task.

    Args:
        cfg: the task's name and options.
        base_dir: the folder of a relative file path.

    Raises:
        TaskLoadError: naming the file, attribute or option, and the nearest valid one.
    """
    kind = find_class(cfg.use, base_dir, _TASK, BUILT_IN)
    options = _build_options(kind, cfg)
    try:
        task = kind(options)
    except GeoRayError:
        raise
    except Exception as error:
        where = error_place(error, source_of(kind) or Path(cfg.use))
        raise TaskLoadError(
            f"task {cfg.use} cannot be built: {where}: {error_summary(error)}",
            fix="Correct the line; a task is built as CLASS(options), with its own `Options`.",
        ) from error
    check_task(task, cfg.use)
    return cast(Task, task)


def option_for(cfg: TaskConfig, base_dir: Path, column: str, wanted: str) -> str | None:
    """Find the option of a task that determines the list length of a column.

    Args:
        cfg: a task that can be loaded.
        base_dir: as for `load_task`.
        column: one of its columns, whose lists have the wrong length.
        wanted: the required type of the column.

    Returns:
        The option and its value, such as ``features=31``, that gives the column that type;
        None if no single option does.
    """
    spec = parse_column_type(wanted)
    width = spec.length or 1
    options = _options_class(find_class(cfg.use, base_dir, _TASK, BUILT_IN), cfg)
    for name, info in options.model_fields.items():
        if info.annotation is not int:
            continue
        changed = cfg.model_copy(update={"options": {**cfg.options, name: width}})
        try:
            given = parse_column_type(load_task(changed, base_dir).columns.get(column, ""))
        except GeoRayError:
            continue
        if (given.dtype, given.length or 1) == (spec.dtype, width):
            return f"{name}={width}"
    return None


def _options_class(kind: type, cfg: TaskConfig) -> type[StrictModel]:
    options = getattr(kind, "Options", None)
    if not (isinstance(options, type) and issubclass(options, StrictModel)):
        raise TaskLoadError(
            f"task {cfg.use} has no nested class Options derived from geo_ray.Options",
            fix="Add `class Options(geo_ray.Options): ...` to the task; it may have no fields.",
        )
    return options


def _build_options(kind: type, cfg: TaskConfig) -> StrictModel:
    options = _options_class(kind, cfg)
    try:
        # Through JSON, like the rest of the configuration: strict, but a path may be text.
        return options.model_validate_json(json.dumps(cfg.options))
    except ValidationError as error:
        wrong = explain(error, options, {}, ("task", "options"))
        count = "1 invalid option" if len(wrong) == 1 else f"{len(wrong)} invalid options"
        raise TaskLoadError(
            "\n    ".join([f"task {cfg.use}: {count}:", *wrong]),
            fix=_options_text(cfg.use, options),
        ) from error


def _options_text(use: str, options: type[StrictModel]) -> str:
    fields = options.model_fields
    if not fields:
        return f"Remove them: {use} has no options."
    lines = [line for name, info in fields.items() for line in paragraph(name, info)]
    return "\n    ".join([f"{use} has these options:", *lines])
