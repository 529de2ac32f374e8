"""`geo_ray.checkpoints`: what a run has saved."""

from __future__ import annotations

from geo_ray.api.inputs import FilePath
from geo_ray.api.run import Run, open_run
from geo_ray.api.tables import Table, table_of
from geo_ray.errors import CheckpointError
from geo_ray.job.checkpoints import store_of
from geo_ray.job.start.members import regions_in


def checkpoints(run: FilePath | Run) -> Table:
    """The checkpoints of a run, a row each, oldest first.

    ``state`` is ``healthy`` for what a resume takes, ``diverged`` for one that was taken while the
    loss had exploded or numbers were not finite, else what is wrong with its files. Files in a
    directory are read for that; of those in an object store the sizes are compared.

    Args:
        run: the run, or its directory.

    Raises:
        RunDirectoryError: there is no run.
        StoreError: its object store does not answer or refuses.
    """
    opened = open_run(run)
    store = store_of(opened.directory, opened.experiment)
    kinds = {"id": int, "step": int, "created": str, "bytes": int, "regions": str, "state": str}
    rows = []
    for number in store.ids():
        row: dict[str, object] = {"id": number}
        try:
            manifest = store.manifest(number)
            regions = regions_in({part.name for part in manifest.parts}, opened.experiment)
            row |= {
                "step": manifest.step,
                "created": manifest.created,
                "bytes": sum(part.bytes for part in manifest.parts),
                "regions": ", ".join(regions),
            }
            _ = store.look(number) if store.far else store.open(number)
            row["state"] = "healthy" if manifest.healthy else "diverged"
        except CheckpointError as error:
            row["state"] = error.message
        rows.append(row)
    return table_of(rows, kinds)
