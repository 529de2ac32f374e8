"""The base of every configuration class: typed, strict, frozen, unknown keys refused."""

from __future__ import annotations

import warnings

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A frozen record whose unknown keys and wrong types are errors.

    Each component's ``Config`` derives from this and lives beside its owner; nothing else is
    inherited. Trees are read through JSON (`geo_ray.config.load`), where strict mode still takes a
    list for a tuple and an int for a float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def __getattr__(name: str) -> type[StrictModel]:
    """`Model`, which `StrictModel` was called before, for tasks that were written then."""
    if name != "Model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "geo_ray.config.base.Model is geo_ray.Options now: `from geo_ray import Options`",
        DeprecationWarning,
        stacklevel=2,
    )
    return StrictModel
