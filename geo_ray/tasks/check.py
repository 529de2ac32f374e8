"""Does an object keep the Task protocol? Found out when it is loaded, not in mid-run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from geo_ray.errors import SchemaMismatchError, TaskLoadError
from geo_ray.tasks.columns import parse_column_type

METHODS: Mapping[str, tuple[str, ...]] = {
    "model": ("seed",),
    "collate": ("columns", "device"),
    "loss": ("model", "batch"),
    "evaluate": ("model", "batch"),
    "metrics": ("stats",),
}
"""The methods that every task has, with their arguments."""

_COLUMNS = 'Write for example columns = {"image": "float32[64]", "label": "int64"}.'

_OPTIONAL: Mapping[str, tuple[str, ...]] = {"dataset": ("seed",), "groups": ("model",)}


def check_task(task: object, name: str) -> None:
    """Check members, signatures and the schema of a task; calls none of its methods.

    Args:
        task: the object.
        name: how the user named it, for the message.

    Raises:
        TaskLoadError: naming everything that is missing, or the first thing that is wrong.
    """
    missing = [f"{method}({', '.join(METHODS[method])})" for method in METHODS
               if not callable(getattr(task, method, None))]  # fmt: skip
    missing += [attr for attr in ("columns", "label_column") if not hasattr(task, attr)]
    if missing:
        raise TaskLoadError(
            f"task {name} lacks {', '.join(missing)}",
            fix="Define them in the class; docs/tasks.md has an example of each.",
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
            f"task {name}: {method} is no method",
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
            f"task {name}: label_column {label!r} is none of its columns, "
            f"{', '.join(sorted(columns))}",
            fix="Name one of the columns, or None if the data have no label.",
        )
    kind = parse_column_type(columns[label])
    if kind.dtype.kind not in "iu" or kind.length is not None:
        raise TaskLoadError(
            f"task {name}: label_column {label!r} must be one integer per row, not "
            f"{columns[label]}",
            fix="Name a column such as int64, or None if rows are not to be told apart by it.",
        )
