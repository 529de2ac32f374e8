"""The topology of a lab: its configuration, named presets, and the relay's plan made from it.

`compile_plan` fills in defaults, draws seeds and names the namespaces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_tree
from geo_ray.base.model import StrictModel
from geo_ray.experiment.regions import Name, no_such_region
from geo_ray.lab.plan import CapShape, LabPlan, LinkPlan, LinkShape, StationPlan, Trace
from geo_ray.transport.emulation import link_seed

CongestionControl = Literal["cubic", "bbr", "reno"]
_MAX_REGIONS = 64

Mbps = Annotated[float, Field(gt=0, le=100_000)]


class PointsTrace(StrictModel):
    """A rate that follows given points."""

    kind: Literal["points"] = "points"
    points: tuple[tuple[float, Mbps], ...] = Field(
        min_length=1, description="[seconds, Mbit/s] each; the first at 0, then ascending."
    )
    repeat_s: float | None = Field(
        None, gt=0, description="Period after which the points repeat; null keeps the last rate."
    )

    @model_validator(mode="after")
    def _check_times(self) -> PointsTrace:
        times_s = [time_s for time_s, _ in self.points]
        if times_s[0] != 0 or any(a >= b for a, b in itertools.pairwise(times_s)):
            raise ValueError("points: their times must begin at 0 and ascend")
        if self.repeat_s is not None and self.repeat_s <= times_s[-1]:
            raise ValueError("repeat_s: it must lie behind the last point")
        return self


class UniformTrace(StrictModel):
    """A rate that is drawn evenly from a range at fixed intervals."""

    kind: Literal["uniform"] = "uniform"
    low_mbps: Mbps = Field(description="Lowest rate.")
    high_mbps: Mbps = Field(description="Highest rate.")
    every_s: float = Field(gt=0, description="Time between two draws.")

    @model_validator(mode="after")
    def _check_range(self) -> UniformTrace:
        if self.low_mbps > self.high_mbps:
            raise ValueError("low_mbps: it is above high_mbps")
        return self


TraceConfig = Annotated[PointsTrace | UniformTrace, Field(discriminator="kind")]


class CapConfig(StrictModel):
    """A region's own line in one direction, shared by all its links."""

    rate_mbps: Mbps | None = Field(None, description="10^6 bit/s of IP packets; null: unlimited.")
    queue_bytes: int | None = Field(
        None, gt=0, description="Drop-tail queue; null: 100 ms at the present rate, >= 64 KiB."
    )
    trace: TraceConfig | None = Field(None, description="Changing rate; overrides rate_mbps.")


class LabRegionConfig(StrictModel):
    """One region: a network namespace with one address."""

    name: Name = Field(description="Name of the region and value of its Ray label.")
    up: CapConfig | None = Field(
        None, description="Line of the region to all others; null: the topology's."
    )
    down: CapConfig | None = Field(
        None, description="Line from all others to the region; null: the topology's."
    )
    congestion_control: CongestionControl | None = Field(
        None, description="Congestion control of its TCP; null: the topology's."
    )


class LinkConfig(StrictModel):
    """One direction between two regions."""

    rate_mbps: Mbps | None = Field(None, description="10^6 bit/s of IP packets; null: unlimited.")
    queue_bytes: int | None = Field(
        None,
        gt=0,
        description="Drop-tail queue; null: twice the delay at the present rate, >= 64 KiB.",
    )
    delay_s: float = Field(0.0, ge=0, le=60, description="One-way delay.")
    jitter_s: float = Field(
        0.0,
        ge=0,
        le=60,
        description="Standard deviation of the delay; the order of packets is preserved.",
    )
    jitter_memory_s: float = Field(
        0.2,
        ge=0,
        description="Time over which jitter is correlated; 0: independent for each packet.",
    )
    loss: float = Field(0.0, ge=0, le=1, description="Fraction of packets lost independently.")
    burst_start: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Gilbert-Elliott: probability per packet that a burst of losses starts.",
    )
    burst_stop: float = Field(
        1.0, gt=0, le=1, description="Probability per packet that a burst ends."
    )
    flow_rate_mbps: Mbps | None = Field(
        None, description="Limit of each flow (addresses, protocol, ports); null: none."
    )


class DefaultLink(LinkConfig):
    """The link between two regions that are not named in ``links``."""

    trace: TraceConfig | None = Field(None, description="Changing rate; overrides rate_mbps.")


class NamedLink(DefaultLink):
    """The link of one ordered pair; keys that are absent are those of ``link``."""

    src: str = Field(description="Region that sends.")
    dst: str = Field(description="Region that receives.")


class Topology(StrictModel):
    """A whole lab."""

    name: str = Field("lab", max_length=64, description="Name for displays.")
    seed: int = Field(0, ge=0, description="Seed of loss, jitter and drawn traces.")
    mtu: int = Field(1500, ge=1280, le=9000, description="Bytes of the largest IP packet.")
    congestion_control: CongestionControl = Field(
        "cubic", description="Congestion control of TCP in regions without their own."
    )
    up: CapConfig = Field(
        default_factory=CapConfig, description="Line of each region to all others."
    )
    down: CapConfig = Field(
        default_factory=CapConfig, description="Line from all others to each region."
    )
    link: DefaultLink = Field(
        default_factory=DefaultLink, description="Link between any two regions."
    )
    regions: tuple[LabRegionConfig, ...] = Field(min_length=1, max_length=_MAX_REGIONS)
    links: tuple[NamedLink, ...] = Field((), description="Ordered pairs that differ from `link`.")

    @model_validator(mode="after")
    def _check_names(self) -> Topology:
        names = self.region_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"regions: {', '.join(twice)} is there more than once")
        pairs = [(link.src, link.dst) for link in self.links]
        for i, (src, dst) in enumerate(pairs):
            for end, name in (("src", src), ("dst", dst)):
                if name not in names:
                    raise ValueError(no_such_region(f"links.{i}.{end}", name, names))
            if src == dst:
                raise ValueError(f"links.{i}.dst: a link leads to another region")
            if (src, dst) in pairs[:i]:
                raise ValueError(f"links.{i}: {src} to {dst} is given more than once")
        return self

    @property
    def region_names(self) -> tuple[str, ...]:
        """Names of the regions in order."""
        return tuple(region.name for region in self.regions)

    def link_between(self, src: str, dst: str) -> DefaultLink:
        """Return the link of an ordered pair: its own entry over the default."""
        set_keys: dict[str, object] = {
            key: getattr(self.link, key) for key in self.link.model_fields_set
        }
        for named in self.links:
            if (named.src, named.dst) == (src, dst):
                own = {key: getattr(named, key) for key in named.model_fields_set}
                if "rate_mbps" in own:
                    set_keys.pop("trace", None)
                set_keys |= {key: own[key] for key in own.keys() - {"src", "dst"}}
        return DefaultLink.model_validate(set_keys)

    def congestion_control_of(self, region: str) -> CongestionControl:
        """Return the congestion control of a region's TCP."""
        found = {r.name: r.congestion_control for r in self.regions}[region]
        return found or self.congestion_control


PRESETS: Final = Path(__file__).with_name("presets")
_SUFFIXES: Final = (".yaml", ".yml")
_ADVICE = "Correct what the message names; docs/guides/wan-lab.md lists the keys of a lab."


def preset_names() -> list[str]:
    """Names of the topologies that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_topology(source: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology.

    Args:
        source: the name of a preset, or the path of a YAML file.
        overrides: ``key.key=value`` each.

    Raises:
        ConfigError: no such preset or file, or its content is wrong.
    """
    if str(source) in preset_names():
        return load_tree(PRESETS / f"{source}.yaml", overrides, Topology, _ADVICE)
    path = Path(source)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"there is no preset '{source}'",
            fix=f"Name one of {', '.join(preset_names())}, or a YAML file.",
        )
    return load_tree(path, overrides, Topology, _ADVICE)


def compile_plan(topology: Topology, lab_id: str) -> LabPlan:
    """Return the plan of a lab.

    Args:
        topology: the configuration of the lab.
        lab_id: part of the namespaces' names, so that labs do not collide.
    """
    names = topology.region_names
    stations = tuple(_station(topology, region, lab_id) for region in topology.regions)
    links = []
    for src, src_name in enumerate(names):
        for dst, dst_name in enumerate(names):
            if src != dst:
                config = topology.link_between(src_name, dst_name)
                own_seed = link_seed(topology.seed, src_name, dst_name)
                links.append(
                    LinkPlan(src, dst, shape_of(config), own_seed, _trace(config.trace, own_seed))
                )
    return LabPlan(lab_id, topology.mtu, stations, tuple(links))


def _station(topology: Topology, region: LabRegionConfig, lab_id: str) -> StationPlan:
    up, down = region.up or topology.up, region.down or topology.down
    return StationPlan(
        name=region.name,
        namespace=f"geolab-{lab_id}-{region.name}",
        up=_cap(up),
        down=_cap(down),
        congestion_control=topology.congestion_control_of(region.name),
        up_trace=_trace(up.trace, link_seed(topology.seed, region.name, "up")),
        down_trace=_trace(down.trace, link_seed(topology.seed, region.name, "down")),
    )


def shape_of(config: LinkConfig | DefaultLink) -> LinkShape:
    """Return the relay's values of a link, without its trace."""
    return LinkShape(**{key: getattr(config, key) for key in LinkConfig.model_fields})


def _cap(config: CapConfig) -> CapShape:
    return CapShape(config.rate_mbps, config.queue_bytes)


def _trace(config: TraceConfig | None, seed: int) -> Trace | None:
    if config is None:
        return None
    if isinstance(config, PointsTrace):
        return Trace(points=config.points, repeat_s=config.repeat_s)
    return Trace(
        low_mbps=config.low_mbps, high_mbps=config.high_mbps, every_s=config.every_s, seed=seed
    )
