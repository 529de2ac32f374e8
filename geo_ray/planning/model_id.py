"""Identifies the model of a profile or plan, so that it is not used for another model."""

from __future__ import annotations

from pydantic import Field

from geo_ray.config.base import StrictModel


class ModelId(StrictModel):
    """The properties of a model that determine step time and bytes of an exchange."""

    task: str = Field(description="as the configuration names it")
    options: dict[str, str | int | float | bool | None] = Field({}, description="of the task")
    source: str | None = Field(
        None, description="digest of the user's own file; null for a task of the library"
    )
    num_params: int = Field(ge=1, description="parameters of the model")

    def differs(self, other: ModelId) -> str | None:
        """Return in words how ``other`` differs; None if it is the same model."""
        if self.task != other.task:
            return f"the task is {other.task}, not {self.task}"
        if self.num_params != other.num_params:
            return f"the model has {other.num_params:,} parameters, not {self.num_params:,}"
        changed = sorted(
            name
            for name in self.options.keys() | other.options.keys()
            if self.options.get(name) != other.options.get(name)
        )
        if changed:
            return f"the task's options differ: {', '.join(changed)}"
        return "the task's file has changed since" if self.source != other.source else None
