"""The base of every configuration class: typed, strict, frozen, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A frozen record whose unknown keys and wrong types are errors.

    Each component's ``Config`` derives from this and lives beside its owner; nothing else is
    inherited. Trees are read through JSON (`geo_ray.config.load`), where strict mode still takes a
    list for a tuple and an int for a float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
