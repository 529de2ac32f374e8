"""The ``emulate`` section of a configuration: emulated links and machine speeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.experiment.regions import RegionConfig, no_such_region
from geo_ray.transport.emulation import LinkSpec


class EmulatedLink(LinkSpec):
    """An emulated link: one direction between two regions."""

    src: str = Field(description="sending region")
    dst: str = Field(description="receiving region")


class StallsConfig(StrictModel):
    """Random steps that take much longer than others."""

    fraction: float = Field(gt=0, le=1, description="fraction of the steps that stall")
    factor: float = Field(
        gt=1, description="duration of such a step, as a multiple of a normal step"
    )


class EmulateConfig(StrictModel):
    """An emulated wide-area network and emulated machine speeds, shaped inside the transport."""

    link: LinkSpec | None = Field(
        None, description="default for every direction that `links` does not list"
    )
    links: tuple[EmulatedLink, ...] = Field((), description="single directions")
    step_s: float | None = Field(
        None, gt=0, description="duration to which every worker's step is padded"
    )
    step_s_by_region: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="`step_s` by region"
    )
    rows_per_s_by_region: dict[
        str, Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    ] = Field(
        {},
        description="speeds of a region's machines in rows/s, one for all workers or one each: a "
        "step is padded to its rows divided by the speed, in addition to `step_s`",
    )
    stalls: StallsConfig | None = Field(None, description="random stalls of workers")

    def problems(self, workers: Mapping[str, int]) -> Iterator[str]:
        """Yield links and regions that are unknown, and wrong numbers of speeds.

        Args:
            workers: number of workers by region.
        """
        pairs = [(link.src, link.dst) for link in self.links]
        for i, (src, dst) in enumerate(pairs):
            for end, name in (("src", src), ("dst", dst)):
                if name not in workers:
                    yield no_such_region(f"emulate.links.{i}.{end}", name, workers)
            if src == dst:
                yield f"emulate.links.{i}: source and destination must be different regions"
            if (src, dst) in pairs[:i]:
                yield f"emulate.links.{i}: {src} to {dst} is given more than once"
        for name in self.step_s_by_region:
            if name not in workers:
                yield no_such_region(f'emulate.step_s_by_region."{name}"', name, workers)
        for name, speeds in self.rows_per_s_by_region.items():
            where = f'emulate.rows_per_s_by_region."{name}"'
            if name not in workers:
                yield no_such_region(where, name, workers)
            elif len(speeds) not in (1, workers[name]):
                yield (
                    f"{where}: {len(speeds)} speeds for {workers[name]} workers: give one for "
                    "all, or one each"
                )

    def paces(self, region: str) -> bool:
        """Return whether steps in ``region`` are padded."""
        own = region in self.step_s_by_region or region in self.rows_per_s_by_region
        return own or self.step_s is not None

    def step_of(self, region: str, worker: int, rows: float) -> float:
        """Return the padded duration of a step of ``rows`` rows in seconds."""
        fixed_s = self.step_s_by_region.get(region, self.step_s) or 0.0
        speeds = self.rows_per_s_by_region.get(region)
        if speeds is None:
            return fixed_s
        return fixed_s + rows / speeds[min(worker, len(speeds) - 1)]

    def stall(self, key: str) -> float:
        """Return the stall factor of the step identified by ``key``; usually 1."""
        if self.stalls is None:
            return 1.0
        return self.stalls.factor if random.Random(key).random() < self.stalls.fraction else 1.0


def emulated_links(
    emulate: EmulateConfig | None, regions: Sequence[RegionConfig]
) -> Mapping[tuple[str, str], LinkSpec]:
    """Return all emulated links by (source, destination).

    ``emulate.link`` applies between regions whose nodes are in different places; a link listed in
    ``emulate.links`` always applies.
    """
    if emulate is None:
        return {}
    named = {
        (link.src, link.dst): LinkSpec(**link.model_dump(exclude={"src", "dst"}))
        for link in emulate.links
    }
    found = {}
    for src in regions:
        for dst in regions:
            spec = named.get((src.name, dst.name))
            if spec is None and src.label != dst.label:
                spec = emulate.link
            if spec is not None and src.name != dst.name:
                found[src.name, dst.name] = spec
    return found
