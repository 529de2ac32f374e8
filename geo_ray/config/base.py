"""The base of every configuration class: typed, strict, frozen, unknown keys refused."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class StrictModel(BaseModel):
    """A frozen record whose unknown keys and wrong types are errors.

    Each component's ``Config`` derives from this and lives beside its owner; nothing else is
    inherited. Trees are read through JSON (`geo_ray.config.load`), where strict mode still takes a
    list for a tuple and an int for a float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def expanded(path: str) -> str:
    """Replace ``~`` at the start of a path and every ``${VARIABLE}``, as a shell does.

    Args:
        path: of this machine, or an address such as ``s3://${BUCKET}/runs``.

    Raises:
        ValueError: a variable is not set, or there is no such user.
    """
    unset = [name for name in _VARIABLE.findall(path) if name not in os.environ]
    if unset:
        raise ValueError(f"the environment variable {unset[0]} is not set")
    path = _VARIABLE.sub(lambda found: os.environ[found[1]], path)
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None


PathText = Annotated[str, AfterValidator(expanded)]
"""A path or an address that is used on the machine that reads the configuration."""


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
