"""Checks, and what they found."""

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
"""By the promise that they are about; a check raises `BrokenPromiseError`, or whatever the object
raises, if it is not kept."""


class BrokenPromiseError(AssertionError):
    """A promise is not kept; the message says how that showed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        promise: what it is about.
        why: how it showed that the promise is not kept; None if it is.
    """

    promise: str
    why: str | None


def expect(holds: bool, why: str) -> None:
    """Go on only if something is as promised.

    Raises:
        BrokenPromiseError: it is not.
    """
    if not holds:
        raise BrokenPromiseError(why)


def check_options(subject: object) -> None:
    """Options cannot be changed, and unknown ones are refused.

    Raises:
        BrokenPromiseError: it is otherwise.
    """
    if not isinstance(subject, StrictModel):
        raise BrokenPromiseError("it is no StrictModel")
    expect(bool(type(subject).model_config.get("frozen")), "its options can be changed")
    for name in type(subject).model_fields:
        value = dict(subject)[name]
        expect(
            _is_frozen(value),
            f"its option {name} is a {type(value).__name__}, of which items can be changed; "
            "a tuple[...] is frozen",
        )
    try:
        type(subject).model_validate({**subject.model_dump(), "no_such_option": 1})
    except ValidationError:
        return
    raise BrokenPromiseError("it takes an option that it does not have")


def _is_frozen(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def run_checks(checks: Checks[T], subject: T) -> list[Finding]:
    """Put an object to all checks.

    Args:
        checks: of its kind.
        subject: a strategy, a codec or a task.

    Returns:
        A finding per check, in their order.
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
