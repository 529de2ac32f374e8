"""The ``regions`` section: processes of each region, or of each site of a region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from geo_ray.base.model import MessageWords, StrictModel
from geo_ray.base.text import nearest_word

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"),
    MessageWords(
        "1 to 63 letters, digits, dots, dashes and underscores, with a letter or digit at both ends"
    ),
]
"""Valid name of a region or run."""

_LONGEST: Final = 63


class NodesConfig(StrictModel):
    """Machines of one type that run workers."""

    type: Name = Field(description="value of the label ray.io/node-group: the instance type")
    count: int = Field(1, ge=1, le=1024, description="machines")
    workers: int = Field(1, ge=1, le=64, description="workers per machine")


class RegionConfig(StrictModel):
    """Processes of one region."""

    name: Name = Field(description="value of the label ray.io/availability-region")
    at: Name | None = Field(
        None, description="region label of its nodes, if several sites use the nodes of one region"
    )
    copies: int = Field(
        1, ge=1, le=1000, description="number of identical sites, named NAME-0, NAME-1 and so on"
    )
    join: bool = Field(
        False,
        description="the region joins the run from a training loop of its own "
        "(`geo_ray.join`); no process of it is started",
    )
    workers: int = Field(1, ge=1, le=1024, description="worker processes")
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="rows per step, by worker; null: `data.batch_size` for each"
    )
    nodes: tuple[NodesConfig, ...] | None = Field(
        None,
        min_length=1,
        description="machines of the workers, in order; null: any free machine of the region",
    )
    server_node: Name | None = Field(
        None, description="instance type of the machine for parameter server and bridge; null: any"
    )
    ps_shards: int = Field(1, ge=1, le=64, description="number of parameter server processes")
    cpus_per_worker: float = Field(
        1.0, ge=0, description="CPUs that Ray reserves per worker; also its number of threads"
    )
    gpus_per_worker: float = Field(0.0, ge=0, description="GPUs that Ray reserves per worker")
    cpus_per_server: float = Field(
        0.5, ge=0, description="CPUs and threads of each shard and of the bridge"
    )

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.batch_sizes is not None and len(self.batch_sizes) != self.workers:
            raise ValueError(
                f"batch_sizes: {len(self.batch_sizes)} entries for {self.workers} workers; give "
                "one each"
            )
        if self.nodes is not None:
            places = sum(each.count * each.workers for each in self.nodes)
            if places != self.workers:
                raise ValueError(
                    f"nodes: capacity for {places} workers, but the region has {self.workers}"
                )
        return self

    def rows_per_step(self, batch_size: int) -> int:
        """Return the rows of a step of all workers; ``batch_size`` is the default of a worker."""
        return sum(self.batch_sizes) if self.batch_sizes else self.workers * batch_size

    @property
    def label(self) -> str:
        """Region label of the nodes of this region."""
        return self.at or self.name


def with_copies(regions: tuple[RegionConfig, ...]) -> tuple[RegionConfig, ...]:
    """Expand ``copies`` into a list of sites."""
    return tuple(one for region in regions for one in _copies(region))


def check_device(device: str, regions: Sequence[RegionConfig]) -> None:
    """Reject a device that no worker has.

    Raises:
        ValueError: naming the key.
    """
    without = [i for i, region in enumerate(regions) if region.gpus_per_worker == 0]
    if device != "cpu" and without:
        names = ", ".join(regions[i].name for i in without)
        raise ValueError(
            f"device: {device} needs gpus_per_worker above 0 in every region, and {names} "
            f"{'has' if len(without) == 1 else 'have'} 0: set for example regions.{without[0]}."
            "gpus_per_worker=1, or device=cpu"
        )


def _copies(region: RegionConfig) -> list[RegionConfig]:
    width = len(str(region.copies - 1))
    names = [f"{region.name}-{i:0{width}d}" for i in range(region.copies)]
    if region.copies == 1:
        return [region]
    if len(names[0]) > _LONGEST:
        raise ValueError(
            f"copies of '{region.name}' would be named {names[0]} and so on: choose a name of "
            f"at most {_LONGEST - width - 1} characters"
        )
    plain = region.model_dump()
    return [RegionConfig(**plain | {"name": name, "copies": 1}) for name in names]


def no_such_region(where: str, name: str, regions: Iterable[str]) -> str:
    """Return the error message for a key that names an unknown region."""
    known = list(regions)
    near = nearest_word(name, known)
    hint = f"; did you mean {near}?" if near else ""
    return f"{where}: no region '{name}'; the regions are {', '.join(known)}{hint}"
