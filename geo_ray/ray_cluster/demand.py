"""Resources that a run requests in each region, as plain values, for placement and preflight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from geo_ray.base.errors import ConfigError
from geo_ray.ray_cluster.labels import check_region_name

Role = Literal["ps", "bridge", "worker"]

_MIN_CPUS = 0.001  # Ray's smallest amount; it refuses an empty bundle


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one process, or of several on one machine.

    Attributes:
        role: role of the process.
        cpus: logical CPUs of each, a count only; 0 reserves Ray's smallest amount.
        gpus: GPUs of each.
        memory_bytes: memory of each; 0 reserves none.
        node_type: required machine type; empty: any.
        processes: number of processes on one machine.
    """

    role: Role
    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    node_type: str = ""
    processes: int = 1

    def __post_init__(self) -> None:
        if min(self.cpus, self.gpus, self.memory_bytes) < 0:
            raise ConfigError(f"a {self.role} cannot reserve a negative amount: {self}")

    def resources(self) -> dict[str, float]:
        """The amounts by Ray's names; never empty."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes)}
        wanted = {k: v * self.processes for k, v in amounts.items() if v > 0}
        return wanted or {"CPU": _MIN_CPUS * self.processes}

    def __str__(self) -> str:
        on = f" on a {self.node_type}" if self.node_type else ""
        what = self.role if self.processes == 1 else f"{self.processes} {self.role}s"
        return f"{what} ({_amounts(self.resources())}){on}"


@dataclass(frozen=True, slots=True)
class RegionDemand:
    """The processes of one region, all or nothing.

    Attributes:
        region: name of the region, or of the site within one.
        bundles: one per process; their order is the order of the bundle indices.
        label: region of the nodes, if it has another name.
        apart: whether each process has a separate machine if there are enough.
        separate: whether each bundle of workers must have a separate machine.
    """

    region: str
    bundles: tuple[Bundle, ...]
    label: str = ""
    apart: bool = False
    separate: bool = False

    def __post_init__(self) -> None:
        check_region_name(self.region)
        check_region_name(self.node_label)
        if not self.bundles:
            raise ConfigError(f"region '{self.region}' requests nothing")

    @property
    def node_label(self) -> str:
        """The region label of its nodes."""
        return self.label or self.region

    def total(self) -> dict[str, float]:
        """Sum over the bundles, by Ray's names."""
        sums: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.resources().items():
                sums[name] = sums.get(name, 0.0) + amount
        return sums

    def indices(self) -> dict[Role, tuple[int, ...]]:
        """Bundle index of each process of each role, in order; counted in each of the `groups`."""
        found: dict[Role, tuple[int, ...]] = {}
        for group in self.groups():
            for index, bundle in enumerate(group):
                own = (index,) * bundle.processes
                found[bundle.role] = (*found.get(bundle.role, ()), *own)
        return found

    @property
    def spreads(self) -> bool:
        """Whether each bundle of workers has a separate machine."""
        return self.separate or any(
            bundle.node_type for bundle in self.bundles if bundle.role == "worker"
        )

    def groups(self) -> list[tuple[Bundle, ...]]:
        """Bundles that are placed together; separately placed workers are the second group."""
        if not self.spreads:
            return [self.bundles]
        workers = tuple(bundle for bundle in self.bundles if bundle.role == "worker")
        others = tuple(bundle for bundle in self.bundles if bundle.role != "worker")
        return [others, workers] if others else [workers]

    def __str__(self) -> str:
        counts = Counter(str(bundle) for bundle in self.bundles)
        listed = ", ".join(f"{count} x {bundle}" for bundle, count in counts.items())
        return f"{listed}; {_amounts(self.total())} in all"


def by_label(demands: Sequence[RegionDemand]) -> list[RegionDemand]:
    """Return one demand per region of nodes: the demands of sites that share one are added."""
    bundles: dict[str, tuple[Bundle, ...]] = {}
    for demand in demands:
        bundles[demand.node_label] = (*bundles.get(demand.node_label, ()), *demand.bundles)
    return [RegionDemand(label, wanted) for label, wanted in bundles.items()]


def _amounts(resources: dict[str, float]) -> str:
    shown = [_amount(name, amount) for name, amount in sorted(resources.items())]
    return ", ".join(shown) or "nothing"


def _amount(name: str, amount: float) -> str:
    if "memory" in name:
        return f"{amount / 1e9:.2f} GB {name}"
    return f"{amount:g} {name}"


def describe_amounts(resources: dict[str, float]) -> str:
    """Format CPUs, GPUs and memory; other resources are omitted."""
    return _amounts({k: v for k, v in resources.items() if k in ("CPU", "GPU", "memory")})
