"""What the local cloud sells, and how it behaves; a file that may be changed while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from geo_ray.config.base import StrictModel
from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.base import Market, Pool

_NAME: Final = "catalog.json"


class LocalOffer(StrictModel):
    """A pool that the local cloud has machines in."""

    region: str = Field(min_length=1, description="the local cloud's own name of a region")
    zone: str | None = Field(None, description="null: the region has no zones")
    type: str = Field(min_length=1, description="name of a machine type")
    market: Market = Field(Market.ON_DEMAND, description="on_demand or spot")
    usd_per_hour: float = Field(gt=0, description="what a machine costs, in play money")
    capacity: int | None = Field(None, ge=0, description="machines at a time; null: no bound")

    @property
    def pool(self) -> Pool:
        """The pool's identity."""
        return Pool(region=self.region, zone=self.zone, type=self.type, market=self.market)


class LocalCatalog(StrictModel):
    """The local cloud as its maker wants it to be."""

    offers: tuple[LocalOffer, ...] = Field((), description="what is for sale")
    cpus: dict[str, int] = Field(
        default_factory=dict, description="logical CPUs by type of machine; 1 where none is named"
    )
    quota: dict[str, int] = Field(
        default_factory=dict, description="machines at a time by region; no bound if not named"
    )
    start_delay_s: float = Field(0.0, ge=0, description="from a launch to a machine that runs")
    list_delay_s: float = Field(0.0, ge=0, description="how long a list lacks a new machine")
    longest_life_s: float = Field(
        43200.0, gt=0, description="no machine outlives this, whatever its launch says"
    )
    owner_pid: int | None = Field(
        None, ge=1, description="a process with which all machines end; null: none"
    )


def catalog_path(root: Path) -> Path:
    """Return where the catalog of a local cloud lies: without one there is no such cloud."""
    return root / _NAME


def read_catalog(root: Path) -> LocalCatalog:
    """Return the catalog of a local cloud.

    Raises:
        ProviderRefusedError: there is no such cloud, or its catalog is not valid.
    """
    try:
        return LocalCatalog.model_validate_json(catalog_path(root).read_bytes())
    except OSError as error:
        raise ProviderRefusedError(
            f"there is no local cloud in {root}: {error.strerror or error}",
            fix="Make one with its catalog, or name the directory of one.",
        ) from None
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ProviderRefusedError(
            f"the catalog in {root} is not valid: {told}", fix=f"Correct {_NAME} there."
        ) from None


def write_catalog(root: Path, catalog: LocalCatalog) -> None:
    """Make a local cloud, or change what it sells from now on; running machines stay."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = root / f".{_NAME}.{os.getpid()}"
    beside.write_text(catalog.model_dump_json(indent=1))
    beside.replace(catalog_path(root))
