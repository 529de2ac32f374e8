"""What a searched key may be: one of some values, or a number in a range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, TypeGuard

from pydantic import Field, model_validator

from geo_ray.config.base import StrictModel
from geo_ray.config.canonical import JSONValue

KINDS = ("choice", "grid", "uniform", "loguniform", "randint", "lograndint", "value")


class Domain(StrictModel):
    """Values of one key; exactly one kind of them, and when they count.

    Lists count as tuples although it is strict: a single domain becomes a list of one before it is
    read, and is then no JSON any more.
    """

    choice: tuple[Any, ...] | None = Field(None, strict=False, description="one of these, drawn")
    grid: tuple[Any, ...] | None = Field(
        None,
        strict=False,
        description="each of these, with every other grid's; `search.trials` times",
    )
    uniform: tuple[float, float] | None = Field(None, strict=False, description="from low to high")
    loguniform: tuple[float, float] | None = Field(
        None, strict=False, description="from low to high, drawn by its logarithm; both above 0"
    )
    randint: tuple[int, int] | None = Field(
        None, strict=False, description="a whole number, both ends included"
    )
    lograndint: tuple[int, int] | None = Field(
        None, strict=False, description="the same, drawn by its logarithm; both above 0"
    )
    value: Any = Field(None, description="this one: for what goes along with another key")
    when: dict[str, Any] = Field(
        default_factory=dict,
        description="only where other keys have these values: one, or a list of which one is meant",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in KINDS if kind in self.model_fields_set]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}; there are {len(given)}")
        if given[0] in ("choice", "grid"):
            values = getattr(self, given[0])
            if not values:
                raise ValueError(f"`{given[0]}`: there is nothing to choose from")
        elif given[0] != "value":
            low, high = getattr(self, given[0])
            if not low < high:
                raise ValueError(f"`{given[0]}`: {low} is not below {high}")
            if given[0].startswith("log") and low <= 0:
                raise ValueError(f"`{given[0]}`: {low} has no logarithm; begin above 0")
        if self.grid is not None and self.when:
            raise ValueError("`grid`: takes no `when`, it would repeat trials; use `choice`")
        return self

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
        return next(kind for kind in KINDS if kind in self.model_fields_set)

    @property
    def edges(self) -> tuple[JSONValue, ...]:
        """Values that are tried out before anything starts: all listed ones, both ends."""
        if self.kind == "value":
            return (self.value,)
        return tuple(getattr(self, self.kind))

    @property
    def most(self) -> JSONValue:
        """The largest of them by number; of what are no numbers, the last."""
        numbers = [each for each in self.edges if _is_number(each)]
        return max(numbers) if numbers else self.edges[-1]

    def holds(self, value: JSONValue) -> bool:
        """Whether the value is one of these."""
        if self.kind in ("choice", "grid", "value"):
            return value in self.edges
        if not _is_number(value):
            return False
        low, high = getattr(self, self.kind)
        whole = "randint" not in self.kind or value == math.floor(value)
        return bool(low <= value <= high and whole)


def is_met(when: Mapping[str, Any], values: Mapping[str, JSONValue]) -> bool:
    """Whether a condition holds for some values by key; a key without a value has none of them."""
    return all(
        key in values and values[key] in (wanted if isinstance(wanted, (list, tuple)) else [wanted])
        for key, wanted in when.items()
    )


def _is_number(value: JSONValue) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
