"""Find what is to be checked, and put it to the checks of its kind."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_text
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import UserClass, find_class, or_meant
from geo_ray.base.user_section import context
from geo_ray.codecs.base import Codec
from geo_ray.codecs.registry import CODECS, AnyCodec
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import BUILT_IN, METHODS, TaskConfig, load_task
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.registry import STRATEGIES, AnyStrategy
from geo_ray.testing import codecs, processes, strategies, tasks
from geo_ray.testing.checks import Checks, Finding, run_checks

_ANY = UserClass("strategy, codec or task", ConfigError, "examples/own_strategy.py")
T = TypeVar("T")
What: TypeAlias = Literal["strategy", "codec", "task"]


def _methods_of(protocol: type) -> tuple[str, ...]:
    return tuple(k for k, v in vars(protocol).items() if inspect.isfunction(v) and k[0] != "_")


_METHODS: Final[Mapping[What, tuple[str, ...]]] = {
    "strategy": _methods_of(Strategy),
    "codec": _methods_of(Codec),
    "task": tuple(METHODS),
}


class StrategySection(StrictModel):
    """A configuration of nothing but a strategy."""

    option: AnyStrategy


class CodecSection(StrictModel):
    """A configuration of nothing but a codec."""

    option: AnyCodec


class TaskSection(StrictModel):
    """A configuration of nothing but a task."""

    option: TaskConfig


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be checked: one of the three.

    Attributes:
        strategy: if it is one.
        codec: if it is one.
        task: if it is one.
        base_dir: where a relative path to its file starts.
    """

    strategy: Strategy | None = None
    codec: Codec | None = None
    task: Task | None = None
    base_dir: Path = Path()


def load(name: str, options: Sequence[str], base_dir: Path) -> Subject:
    """Find the class and build it.

    Args:
        name: `path/to/file.py:Class`, `package.module:Class`, or a name of the library.
        options: ``key=value`` each.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: there is no such thing, or it cannot be used.
    """
    overrides = [f"option.{option}" for option in options]
    if name in BUILT_IN:
        return _task(name, options, base_dir)
    if name in STRATEGIES or name in CODECS:
        built_in: What = "codec" if name in CODECS else "strategy"
        return _built(built_in, {"kind": name}, overrides, name, base_dir, "Correct --option.")
    if ":" not in name:
        meant = or_meant(name, {*BUILT_IN, *STRATEGIES, *CODECS})
        raise ConfigError(
            f"there is no strategy, codec or task {name!r}{meant}",
            fix="Write FILE.py:CLASS for one of your own.",
        )
    kind = find_class(name, base_dir, _ANY)
    what = _what_is(name, kind)
    if what == "task":
        return _task(name, options, base_dir)
    if issubclass(kind, StrictModel):
        _check_names(name, kind, options)
    return _built(what, {"use": name}, overrides, name, base_dir)


def _check_names(name: str, kind: type[StrictModel], options: Sequence[str]) -> None:
    """Refuse options that the class does not have, by their names."""
    for option in options:
        key = option.partition("=")[0].partition(".")[0].strip()
        if key not in kind.model_fields:
            hint = or_meant(key, set(kind.model_fields) - {"kind"}) or "; it takes no options"
            raise ConfigError(f"{name} has no option {key!r}{hint}", fix=_about_options(kind))


def _about_options(kind: type[StrictModel]) -> str:
    fields = {name: info for name, info in kind.model_fields.items() if name != "kind"}
    if not fields:
        return "Leave --option out: the class has no options."
    shown = [
        f"{name} ({'required' if info.is_required() else f'default {info.default!r}'}"
        + (f": {info.description})" if info.description else ")")
        for name, info in fields.items()
    ]
    return f"Its options are {'; '.join(shown)}."


def object_of(what: What, section: Mapping[str, object], base_dir: Path) -> Subject:
    """The same again from its section, as `model_dump` gives it.

    Args:
        what: which of the two it is.
        section: with ``kind`` or ``use``, and its options.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: as for `load`.
    """
    return _built(what, section, [], what, base_dir)


def _task(name: str, options: Sequence[str], base_dir: Path) -> Subject:
    text = json.dumps({"option": {"use": name}})
    overrides = [f"option.options.{option}" for option in options]
    section = load_text(text, overrides, TaskSection, name).option
    return Subject(task=load_task(section, base_dir), base_dir=base_dir)


def _built(
    what: What,
    section: Mapping[str, object],
    overrides: list[str],
    name: str,
    base_dir: Path,
    fix: str = "Correct the class, or what --option says; docs/own.md says what a class needs.",
) -> Subject:
    text, where = json.dumps({"option": section}), context(base_dir)
    if what == "codec":
        codec = load_text(text, overrides, CodecSection, name, fix, where).option
        return Subject(codec=codec, base_dir=base_dir)
    strategy = load_text(text, overrides, StrategySection, name, fix, where).option
    return Subject(strategy=strategy, base_dir=base_dir)


def _what_is(name: str, kind: type) -> What:
    """Which of the three a class of the user's is meant to be: the one that it has methods of.

    Raises:
        ConfigError: it has none of any, or of several.
    """
    members = dict(inspect.getmembers_static(kind))
    lacks = {
        what: [key for key in wanted if key not in members] for what, wanted in _METHODS.items()
    }
    begun = [what for what, wanted in _METHODS.items() if len(lacks[what]) < len(wanted)]
    if len(begun) == 1:
        return begun[0]
    if not begun:
        wants = "; ".join(f"a {what} has {', '.join(keys)}" for what, keys in lacks.items())
        raise ConfigError(
            f"{name} is no strategy, codec or task: {wants}",
            fix="Look at docs/own.md and docs/tasks.md, which have a whole one of each.",
        )
    whole = [what for what in begun if not lacks[what]]
    if len(whole) == 1:
        return whole[0]
    raise ConfigError(
        f"{name} has methods of {' and of '.join(f'a {what}' for what in begun)}",
        fix="Write a class for each.",
    )


def checked(subject: Subject, promises: Collection[str] | None = None) -> list[Finding]:
    """Put it to the checks of its kind.

    Args:
        subject: what to check.
        promises: the checks to do, by their names; None for all.
    """
    found: list[Finding] = []
    if subject.strategy is not None:
        elsewhere = partial(processes.check_strategy, base_dir=subject.base_dir)
        checks: Checks[Strategy] = {
            **strategies.CHECKS,
            "another process ends with the same bits": elsewhere,
        }
        found += run_checks(_chosen(checks, promises), subject.strategy)
    if subject.codec is not None:
        decoding = partial(processes.check_codec, base_dir=subject.base_dir)
        coding: Checks[Codec] = {**codecs.CHECKS, "another process decodes the same": decoding}
        found += run_checks(_chosen(coding, promises), subject.codec)
    if subject.task is not None:
        found += run_checks(_chosen(tasks.CHECKS, promises), subject.task)
    return found


def _chosen(checks: Checks[T], promises: Collection[str] | None) -> Checks[T]:
    return {name: check for name, check in checks.items() if promises is None or name in promises}
