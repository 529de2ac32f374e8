"""Load a task from the configuration: built-in, from a package, or from the user's own file.

A task is checked when it is loaded (members, signatures, column types), so that a mistake is
reported before the run starts. Column types are written as in shards: `geo_ray.data.columns`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias, cast

from pydantic import Field, ValidationError

from geo_ray.base.describe import paragraph
from geo_ray.base.errors import GeoRayError, SchemaMismatchError, TaskLoadError
from geo_ray.base.explain import explain
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import UserClass, error_place, error_summary, find_class, source_of
from geo_ray.data.columns import ColumnType, Ragged
from geo_ray.data.tasks.base import Columns, Task


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
        array = columns[name]
        if isinstance(array, Ragged):
            found = str(array.type)
        else:
            found = f"{array.dtype}{list(array.shape[1:]) or ''}"
        if not array.shape or found != str(ColumnType.parse(text, name)):
            raise SchemaMismatchError(f"column {name!r} is {found}, the task has {text}")
        rows.setdefault(len(array), name)
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

_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "dataset": ("seed",),
    "groups": ("model",),
    "parallelize": ("model", "mesh"),
    "optimizer": ("params",),
    "scheduler": ("optimizer",),
    "train_step": ("model", "batch"),
    "training_state": ("model",),
}


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
    _check_own_steps(task, name)
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


def _check_own_steps(task: object, name: str) -> None:
    """Refuse methods of which a run would call only one (docs/guides/tasks.md)."""
    if hasattr(task, "train_step"):
        if unused := [each for each in ("optimizer", "scheduler") if hasattr(task, each)]:
            raise TaskLoadError(
                f"task {name} has both train_step and {' and '.join(unused)}",
                fix="Return the optimizers of train_step from training_state(model).",
            )
        return
    for method, needed in (("scheduler", "optimizer"), ("training_state", "train_step")):
        if hasattr(task, method) and not hasattr(task, needed):
            raise TaskLoadError(
                f"task {name} has {method}, which nothing calls without {needed}",
                fix=f"Define {needed}({', '.join(_OPTIONAL[needed])}), or remove {method}.",
            )


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
            ColumnType.parse(text, column)
        except SchemaMismatchError as error:
            raise TaskLoadError(f"task {name}: {error.message}", fix=error.fix) from error
    if label is None:
        return
    if label not in columns:
        raise TaskLoadError(
            f"task {name}: label_column {label!r} is not one of its columns, "
            f"{', '.join(sorted(columns))}",
            fix="Use one of the columns, or None if the data have no label.",
        )
    if not ColumnType.parse(columns[label], label).is_integer:
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


_OWN_LOOP: Final = "own_loop"  # see `geo_ray.experiment.experiment`
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
    if cfg.use == _OWN_LOOP:
        raise TaskLoadError(
            "the regions of this run have joined from training loops of their own, so geo_ray does "
            "not know the model's class",
            fix="Load the run's model.safetensors into the model of your loop.",
        )
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
    spec = ColumnType.parse(wanted, column)
    width = spec.length or 1
    options = _options_class(find_class(cfg.use, base_dir, _TASK, BUILT_IN), cfg)
    for name, info in options.model_fields.items():
        if info.annotation is not int:
            continue
        changed = cfg.model_copy(update={"options": {**cfg.options, name: width}})
        try:
            given = ColumnType.parse(load_task(changed, base_dir).columns.get(column, ""), column)
        except GeoRayError:
            continue
        if (given.scalar, given.length or 1) == (spec.scalar, width):
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
