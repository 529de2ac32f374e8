"""Where the checkpoints of a run lie, by its configuration: in its directory, or in stores."""

from __future__ import annotations

from pathlib import Path

from geo_ray.checkpoint.places import CheckpointPlaces
from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.config.experiment import Experiment
from geo_ray.errors import CheckpointError, GeoRayError, StoreError
from geo_ray.job.rundir import RunDirectory, reopen
from geo_ray.stores.uri import join


def places_of(run: RunDirectory, experiment: Experiment) -> CheckpointPlaces:
    """Where checkpoints of ``run`` go; in a store, in a folder of the name of its directory."""
    config = experiment.checkpoint
    if config.store is None and run.address is not None:
        return CheckpointPlaces(join(run.address, "checkpoints"))
    if config.store is None:
        return CheckpointPlaces(str(run.checkpoints))
    name = run.path.name
    regions = {region: join(uri, name) for region, uri in config.region_stores.items()}
    return CheckpointPlaces(join(config.store, name), regions)


def store_of(run: RunDirectory, experiment: Experiment) -> CheckpointStore:
    """The checkpoints of ``run``."""
    return CheckpointStore(places_of(run, experiment).root(), experiment.checkpoint.keep)


def check_unused(store: CheckpointStore) -> None:
    """Refuse to begin a run where another has saved.

    Raises:
        CheckpointError: there are checkpoints.
        StoreError: the store does not answer or refuses.
    """
    ids = store.ids()
    if ids:
        raise CheckpointError(
            f"{store} has {len(ids)} checkpoints of another run, and this one would remove them",
            fix="Resume that run, or choose another `name` or `checkpoint.store`.",
        )


def has_checkpoint(run_dir: Path) -> bool:
    """Whether there is one to resume from; True where a store does not tell."""
    try:
        store = store_of(*reopen(run_dir, to_look_at=True))
    except GeoRayError:  # no run, or none that can be read
        store = CheckpointStore(run_dir / "checkpoints")
    try:
        return bool(store.ids())
    except StoreError:
        return True
