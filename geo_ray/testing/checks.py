"""Contract checks and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from geo_ray.base.errors import OwnCodeError
from geo_ray.base.model import StrictModel
from geo_ray.base.user_code import error_place, error_summary, source_of

T = TypeVar("T")

Checks = Mapping[str, Callable[[T], None]]
"""Checks by promise; a check raises `BrokenPromiseError`, or an exception of the object, if the
promise does not hold."""


class BrokenPromiseError(AssertionError):
    """A promise does not hold; the message describes the violation."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        promise: description of the promise.
        why: description of the violation; None if the promise holds.
    """

    promise: str
    why: str | None


def expect(holds: bool, why: str) -> None:
    """Require a condition.

    Raises:
        BrokenPromiseError: the condition is false.
    """
    if not holds:
        raise BrokenPromiseError(why)


def check_options(subject: object) -> None:
    """Options are frozen, and unknown ones are rejected.

    Raises:
        BrokenPromiseError: an option can be changed, or an unknown one is accepted.
    """
    if not isinstance(subject, StrictModel):
        raise BrokenPromiseError("it is not a StrictModel")
    expect(bool(type(subject).model_config.get("frozen")), "its options can be changed")
    for name in type(subject).model_fields:
        value = dict(subject)[name]
        expect(
            _is_frozen(value),
            f"its option {name} is a {type(value).__name__}, whose items can be changed; "
            "a tuple[...] is frozen",
        )
    try:
        type(subject).model_validate({**subject.model_dump(), "no_such_option": 1})
    except ValidationError:
        return
    raise BrokenPromiseError("it accepts an unknown option")


def _is_frozen(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def run_checks(checks: Checks[T], subject: T) -> list[Finding]:
    """Run all checks on an object.

    Args:
        checks: checks of its kind.
        subject: a strategy, a codec or a task.

    Returns:
        A finding per check, in order.
    """
    found = []
    for promise, check in checks.items():
        why = None
        try:
            check(subject)
        except BrokenPromiseError as error:
            why = str(error)
        except OwnCodeError as error:
            why = error.message
        except Exception as error:
            path = next(filter(None, map(source_of, type(subject).__mro__)), None)
            where = "" if path is None else f"{error_place(error, path)}: "
            why = f"{where}{error_summary(error)}"
        found.append(Finding(promise, why))
    return found
