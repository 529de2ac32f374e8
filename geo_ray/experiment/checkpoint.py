"""The ``checkpoint`` section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from geo_ray.base.errors import StoreError
from geo_ray.base.model import StrictModel
from geo_ray.experiment.regions import Name
from geo_ray.storage.uri import is_s3, parse_s3


class CheckpointConfig(StrictModel):
    """When to save and how much to keep."""

    every_s: float | None = Field(
        60.0, gt=0, description="seconds between checkpoints; null: none, or with `every_rounds`"
    )
    every_rounds: int | None = Field(
        None,
        ge=1,
        description="rounds between checkpoints, in place of `every_s`; where regions join or are "
        "groups",
    )
    keep: int = Field(
        2, ge=2, description="checkpoints to keep; the newest healthy one always stays"
    )
    part_timeout_s: float = Field(
        600.0, gt=0, description="seconds without a part after which a checkpoint is given up"
    )
    retry_s: float = Field(
        600.0,
        ge=0,
        description="seconds for which the last checkpoint and the model are retried if a store or "
        "disk fails at the end of a run; during training there is no limit. Also how long a "
        "worker retries a store that does not return its rows",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="automatic restarts from the newest checkpoint within "
        "`train.restart_window_s`, if something is lost that cannot be replaced during the run",
    )
    store: str | None = Field(
        None,
        description="s3:// address under which checkpoints are stored, in a folder of the run's "
        "name; null: the run's directory",
    )
    region_stores: dict[Name, str] = Field(
        default_factory=dict,
        description="s3:// address for the parts of a region's servers, by region; all else is in "
        "`store`",
    )
    store_region: Name | None = Field(
        None,
        description="region of `store` or `run.dir`, for the bill; null: the averager's, or "
        "that of the run actor's node for a directory that not all nodes see",
    )

    @property
    def is_periodic(self) -> bool:
        """Whether checkpoints are made in the course of a run."""
        return self.every_s is not None or self.every_rounds is not None

    @model_validator(mode="before")
    @classmethod
    def _rounds_replace_seconds(cls, given: object) -> object:
        """Set `every_s` to null if only `every_rounds` is given."""
        if isinstance(given, Mapping) and given.get("every_rounds") is not None:
            return {"every_s": None, **given}
        return given

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if self.every_s is not None and self.every_rounds is not None:
            raise ValueError(
                "every_s: every_rounds is given, too, and replaces it: set every_s to null"
            )
        return self

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        stores = {"store": self.store} if self.store is not None else {}
        stores |= {f"region_stores.{name}": uri for name, uri in self.region_stores.items()}
        for key, uri in stores.items():
            if not is_s3(uri):
                raise ValueError(f"`{key}` must begin with s3://")
            try:
                parse_s3(uri)
            except StoreError as error:
                raise ValueError(f"`{key}`: {error.message}") from None
        if self.region_stores and self.store is None:
            raise ValueError("`region_stores` wants `store`, too, for the manifests")
        return self
