"""The ``regions`` section: processes of each region, or of each site of a region."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import GeoRayError, LoopFailedError
from geo_ray.base.model import MessageWords, StrictModel
from geo_ray.base.text import nearest_word
from geo_ray.base.user_code import UserClass, find_function
from geo_ray.base.yaml import KeyPath

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"),
    MessageWords(
        "1 to 63 letters, digits, dots, dashes and underscores, with a letter or digit at both ends"
    ),
]
"""Valid name of a region or run."""

_LONGEST: Final = 63
LOOP: Final = UserClass("loop", LoopFailedError, "docs/guides/groups.md")
"""Training loop of a user, which a group runs."""


class NodesConfig(StrictModel):
    """Machines of one type that run workers."""

    type: Name = Field(description="value of the label ray.io/node-group: the instance type")
    count: int = Field(1, ge=1, le=1024, description="machines")
    workers: int = Field(1, ge=1, le=64, description="workers per machine")


class GroupConfig(StrictModel):
    """Processes of a region that form one process group of `torch.distributed`."""

    nodes: int = Field(1, ge=1, le=1024, description="machines")
    gpus_per_node: int = Field(
        0, ge=0, le=64, description="GPUs of a machine that the group uses; 0: it uses the CPU"
    )
    ranks_per_node: int | None = Field(
        None, ge=1, le=64, description="processes of a machine; null: one per GPU, or one"
    )
    backend: Literal["nccl", "gloo"] | None = Field(
        None, description="library of collective operations; null: nccl with GPUs, else gloo"
    )
    cpus_per_rank: float = Field(
        1.0, ge=0, description="CPUs that Ray reserves per process; also its number of threads"
    )
    loop: str | None = Field(
        None,
        description="training loop of your own, called in every process with a "
        "`geo_ray.GroupRank`: `path/to/file.py:function` (relative to the configuration file) or "
        "`package.module:function`; null: geo_ray trains the `task`",
    )
    sharding: Literal["fsdp", "ddp"] = Field(
        "fsdp",
        description="how the processes train the `task`: fsdp divides parameters and optimizer "
        "(FSDP2), ddp copies them; a method `parallelize(model, mesh)` of the task replaces it",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="longest duration of a collective operation; then the group is restarted",
    )

    @model_validator(mode="after")
    def _one_rank_per_gpu(self) -> Self:
        gpus, ranks = self.gpus_per_node, self.ranks_per_node
        if gpus and ranks not in {None, gpus}:
            raise ValueError(f"ranks_per_node: {gpus} GPUs have one process each; omit it")
        if self.backend == "nccl" and not gpus:
            raise ValueError("backend: nccl needs GPUs: set gpus_per_node, or backend: gloo")
        return self

    @property
    def ranks_of_node(self) -> int:
        """Processes of a machine."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Processes of the group."""
        return self.nodes * self.ranks_of_node

    @property
    def collectives(self) -> str:
        """Backend of `torch.distributed`."""
        return self.backend or ("nccl" if self.gpus_per_node else "gloo")


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
    group: GroupConfig | None = Field(
        None,
        description="the region is one process group of `torch.distributed`, which geo_ray starts; "
        "{} has the defaults; null: separate workers with a parameter server",
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
        if self.join and self.group is not None:
            raise ValueError(
                "group: no process of a region with `join: true` is started; remove one of them"
            )
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
        if self.group is not None:
            return self.group.world_size * batch_size
        return sum(self.batch_sizes) if self.batch_sizes else self.workers * batch_size

    @property
    def is_joined(self) -> bool:
        """Whether it exchanges parameters as `geo_ray.join` does, and has no parameter server."""
        return self.join or self.group is not None

    @property
    def trains_task(self) -> bool:
        """Whether geo_ray trains the task of the run in it."""
        return not self.join and (self.group is None or self.group.loop is None)

    @property
    def label(self) -> str:
        """Region label of the nodes of this region."""
        return self.at or self.name


def with_copies(regions: tuple[RegionConfig, ...]) -> tuple[RegionConfig, ...]:
    """Expand ``copies`` into a list of sites."""
    return tuple(one for region in regions for one in _copies(region))


def loop_problems(regions: JSONValue, base_dir: Path) -> dict[KeyPath, str]:
    """Return the problem of each loop that cannot be loaded, by its key; executes their files.

    Args:
        regions: the section as it was read, which need not be valid.
        base_dir: base of relative paths.
    """
    found: dict[KeyPath, str] = {}
    problems: dict[str, str] = {}  # by loop; "" for none
    for index, region in enumerate(regions if isinstance(regions, list) else ()):
        group = region.get("group") if isinstance(region, dict) else None
        loop = group.get("loop") if isinstance(group, dict) else None
        if not isinstance(loop, str):
            continue
        if loop not in problems:
            problems[loop] = _loop_problem(loop, base_dir)
        if problems[loop]:
            found["regions", index, "group", "loop"] = problems[loop]
    return found


def _loop_problem(loop: str, base_dir: Path) -> str:
    try:
        find_function(loop, base_dir, LOOP)
    except GeoRayError as error:
        return f"{error.message}. {error.fix}"
    return ""


def start_command(regions: Sequence[RegionConfig]) -> str:
    """Return the command that starts a run with these regions."""
    return "geo-ray serve" if all(region.join for region in regions) else "geo-ray train"


def device_problems(device: str, regions: Sequence[RegionConfig]) -> Iterator[str]:
    """Yield why workers do not have a device."""
    without = [i for i, region in enumerate(regions) if region.gpus_per_worker == 0]
    if device != "cpu" and without:
        names = ", ".join(regions[i].name for i in without)
        yield (
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
