"""Location of a run's checkpoints by its configuration: its directory, or stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from geo_ray.base.errors import CheckpointError, GeoRayError, StoreError
from geo_ray.experiment.checkpoint import CheckpointConfig
from geo_ray.experiment.regions import RegionConfig
from geo_ray.runs.directory import RunDirectory, recorded_run
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest, shard_part_name
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.storage.uri import join


def places_of(run: RunDirectory, config: CheckpointConfig) -> CheckpointPlaces:
    """Return the places of checkpoints of ``run``; in a store, a folder of its name."""
    if config.store is None and run.address is not None:
        return CheckpointPlaces(join(run.address, "checkpoints"))
    if config.store is None:
        return CheckpointPlaces(str(run.checkpoints))
    name = run.path.name
    regions = {region: join(uri, name) for region, uri in config.region_stores.items()}
    return CheckpointPlaces(join(config.store, name), regions)


def store_of(run: RunDirectory, config: CheckpointConfig) -> CheckpointStore:
    """Return the checkpoints of ``run``."""
    return CheckpointStore(places_of(run, config).root(), config.keep)


def regions_in(parts: Collection[str], regions: Sequence[RegionConfig]) -> list[str]:
    """Return the regions whose parts are complete in a checkpoint.

    A region that was lost before the checkpoint has no parts in it.
    """
    return [
        region.name
        for region in regions
        if all(shard_part_name(region.name, i) in parts for i in range(region.ps_shards))
    ]


SAVED_REGIONS: Final = "regions"
"""Key of a manifest of a run whose regions join: the regions that have saved their state."""


def regions_of(manifest: CheckpointManifest, regions: Sequence[RegionConfig]) -> list[str]:
    """Return the regions whose state is complete in a checkpoint of any run.

    The state of regions that join is in their own stores; the manifest names them.
    """
    if not regions[0].is_joined:
        return regions_in({part.name for part in manifest.parts}, regions)
    saved = manifest.extra.get(SAVED_REGIONS)
    return [region.name for region in regions if isinstance(saved, list) and region.name in saved]


def check_unused(store: CheckpointStore) -> None:
    """Reject a new run if another run has saved checkpoints there.

    Raises:
        CheckpointError: there are checkpoints.
        StoreError: the store does not answer or refuses.
    """
    ids = store.ids()
    if ids:
        raise CheckpointError(
            f"{store} has {len(ids)} checkpoints of another run, which this one would remove",
            fix="Resume that run, or choose another `name` or `checkpoint.store`.",
        )


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a checkpoint exists; True if the store does not answer."""
    try:
        run, config = recorded_run(run_dir)
        store = store_of(run, config.checkpoint)
    except GeoRayError:  # no run, or an unreadable one
        store = CheckpointStore(run_dir / "checkpoints")
    try:
        return bool(store.ids())
    except StoreError:
        return True
