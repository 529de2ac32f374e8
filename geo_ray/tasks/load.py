"""From a line of configuration to a task: built-in, from a package, or from the user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias, cast

from pydantic import Field, ValidationError

from geo_ray.config.base import StrictModel
from geo_ray.config.describe import paragraph
from geo_ray.config.explain import explain
from geo_ray.errors import GeoRayError, TaskLoadError
from geo_ray.tasks.base import Task
from geo_ray.tasks.check import check_task
from geo_ray.tasks.columns import parse_column_type
from geo_ray.util.blame import place, source_of, summary
from geo_ray.util.user_class import UserClass, find_class

Scalar: TypeAlias = str | int | float | bool | None

BUILT_IN: Mapping[str, str] = {
    "digits": "geo_ray.tasks.digits:Digits",
    "bytelm": "geo_ray.tasks.bytelm:ByteLM",
    "ctr": "geo_ray.tasks.ctr:Ctr",
    "images": "geo_ray.tasks.images:Images",
}
"""Short names of the built-in tasks."""


_TASK: Final = UserClass("task", TaskLoadError, "docs/tasks.md")


class TaskConfig(StrictModel):
    """Which task to train, and its options."""

    use: str = Field(
        description="A built-in task (digits, bytelm, ctr, images), `package.module:Class`, or"
        " `path/to/file.py:Class` (relative to the configuration file)."
    )
    options: dict[str, Scalar] = Field(
        default_factory=dict, description="Options of the task: its class's `Options` fields."
    )


def load_task(cfg: TaskConfig, base_dir: Path) -> Task:
    """Import, build and check a task.

    Args:
        cfg: what to load.
        base_dir: where a relative path to a file starts.

    Raises:
        TaskLoadError: names the file, attribute or option, and the nearest valid one.
    """
    kind = find_class(cfg.use, base_dir, _TASK, BUILT_IN)
    options = _build_options(kind, cfg)
    try:
        task = kind(options)
    except GeoRayError:
        raise
    except Exception as error:
        where = place(error, source_of(kind) or Path(cfg.use))
        raise TaskLoadError(
            f"task {cfg.use} cannot be built: {where}: {summary(error)}",
            fix="Mend the named line; a task is built as CLASS(options), with its own `Options`.",
        ) from error
    check_task(task, cfg.use)
    return cast(Task, task)


def option_for(cfg: TaskConfig, base_dir: Path, column: str, wanted: str) -> str | None:
    """Find the option of a task that decides how long the lists of a column are.

    Args:
        cfg: a task that can be loaded.
        base_dir: as for `load_task`.
        column: one of its columns, whose lists have the wrong length.
        wanted: the type that the column should have.

    Returns:
        The option and its value, such as ``features=31``, with which the column has that type;
        None if no option alone gives it.
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
        # Through JSON, as the rest of the configuration: strict, but a path may be text.
        return options.model_validate_json(json.dumps(cfg.options))
    except ValidationError as error:
        wrong = explain(error, options, {}, ("task", "options"))
        count = "1 wrong option" if len(wrong) == 1 else f"{len(wrong)} wrong options"
        raise TaskLoadError(
            "\n    ".join([f"task {cfg.use}: {count}:", *wrong]),
            fix=_options_text(cfg.use, options),
        ) from error


def _options_text(use: str, options: type[StrictModel]) -> str:
    fields = options.model_fields
    if not fields:
        return f"Leave them out: {use} takes no options."
    lines = [line for name, info in fields.items() for line in paragraph(name, info)]
    return "\n    ".join([f"{use} takes these options:", *lines])
