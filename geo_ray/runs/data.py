"""Data of a run: a given manifest, or shards generated at the start."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from geo_ray.base.errors import (
    ConfigError,
    RegionsOmittedError,
    SchemaMismatchError,
    ShardEmptyError,
)
from geo_ray.base.text import nearest_word
from geo_ray.codecs.feedback import seed_of
from geo_ray.data.manifest import Manifest, load_manifest, save_manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.shards import write_shards
from geo_ray.data.tasks.base import SelfContained, Task
from geo_ray.data.tasks.checked_calls import checked_dataset
from geo_ray.experiment.experiment import Experiment, GenerateConfig
from geo_ray.experiment.regions import RegionConfig
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import is_s3, join
from geo_ray.storage.uri import split as split_uri

_log = logging.getLogger(__name__)


def prepare_manifest(
    experiment: Experiment,
    task: Task,
    base_dir: Path,
    data_dir: Path | str,
    *,
    goes_on: bool = False,
) -> tuple[Manifest, str]:
    """Load the manifest, or write the task's own data below ``data_dir`` (once) and its manifest.

    Args:
        experiment: the run.
        task: the loaded task.
        base_dir: base of a relative manifest path.
        data_dir: destination of generated shards, one directory per region; may be in a bucket.
        goes_on: whether the run is resumed; regions that are left out are then only logged.

    Returns:
        The manifest and its address.

    Raises:
        ConfigError: if data must be generated and the task has none.
        SchemaMismatchError: the shards have other columns than the task.
        ShardEmptyError: a region of the run has no training or held-out rows.
        RegionsOmittedError: the manifest has rows of a region that the run neither lists nor
            leaves out.
    """
    generate = experiment.data.generate
    if generate is None:
        address = str(experiment.data.manifest)
        if "://" not in address:
            address = str(base_dir / address)
        manifest = load_manifest(address)
    else:
        address = _below(str(data_dir), "manifest.json")
        if _is_there(address):
            manifest = load_manifest(address)
            here = {name: open_store(_below(str(data_dir), name)).uri for name in manifest.stores}
            manifest = manifest.model_copy(update={"stores": here})  # the run may have been moved
        else:
            manifest = _generate(experiment, generate, task, str(data_dir))
            save_manifest(manifest, address)
    check_manifest(experiment, task, manifest)
    _check_all_used(experiment, manifest, goes_on=goes_on)
    return manifest, address


def _generate(
    experiment: Experiment, generate: GenerateConfig, task: Task, data_dir: str
) -> Manifest:
    if not isinstance(task, SelfContained):
        raise ConfigError(
            f"data.generate: task '{experiment.task.use}' is not self-contained",
            fix="Shard your data with `geo-ray data shard` and set data.manifest.",
        )
    dataset = checked_dataset(task, experiment.seed)
    return write_shards(
        {"train": dataset.train, "heldout": dataset.heldout},
        experiment.task.use,
        task.columns,
        task.label_column,
        generate.split,
        experiment.region_names,
        experiment.seed,
        {name: _below(data_dir, name) for name in experiment.region_names},
        generate.rows_per_shard,
    )


def _below(place: str, name: str) -> str:
    return join(place, name) if is_s3(place) else str(Path(place) / name)


def _is_there(address: str) -> bool:
    store, name = split_uri(address)
    return open_store(store).exists(name)


def check_manifest(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Reject a manifest that does not fit the task or lacks a region's data; see above."""
    if dict(manifest.columns) != dict(task.columns):
        raise SchemaMismatchError(
            f"the manifest has columns {dict(manifest.columns)}, task '{experiment.task.use}' "
            f"wants {dict(task.columns)}",
            fix="Use the task and the task.options of the data, or write the data again with "
            "`geo-ray data shard`.",
        )
    for config in experiment.regions:
        region = data_region(config, manifest)
        for split in ("train", "heldout"):
            if region not in manifest.stores or not manifest.rows(region, split):
                near = None if region in manifest.stores else nearest_word(region, manifest.stores)
                raise ShardEmptyError(
                    f"region '{region}' has no {split} rows in the manifest; "
                    f"it has regions {list(manifest.stores)}"
                    + (f"; did you mean {near}?" if near else ""),
                    fix="Write the data again, with --heldout above 0."
                    if region in manifest.stores and split == "heldout"
                    else "Use the region names of the manifest, or write this region's data and "
                    "add it with `geo-ray data merge`.",
                )


def _check_all_used(experiment: Experiment, manifest: Manifest, *, goes_on: bool) -> None:
    """Check that unused rows are left out explicitly."""
    left_out = set(experiment.data.leave_out)
    unknown = sorted(left_out - set(manifest.stores))
    if unknown:
        raise ConfigError(
            f"data.leave_out: the manifest has no region {', '.join(unknown)}; it has "
            f"{', '.join(manifest.stores)}",
            fix="List regions of the manifest, or omit the key.",
        )
    used = {data_region(region, manifest) for region in experiment.regions} | left_out
    rest = {name: manifest.rows(name, "train") for name in manifest.stores if name not in used}
    unused = [name for name, rows in rest.items() if rows]
    if unused:
        rows = sum(rest.values())
        what = f"the manifest has {rows} training rows of {', '.join(unused)}"
        if goes_on:
            _log.warning("%s, which the run does not use", what)
            return
        raise RegionsOmittedError(
            f"{what}, which the configuration does not list, so they would not be used",
            fix=f"Add them to `regions`, or leave them out explicitly: --set data.leave_out="
            f"[{','.join(unused)}].",
        )


def data_region(region: RegionConfig, manifest: Manifest) -> str:
    """Return the region whose rows ``region`` reads; several sites may share one."""
    return region.name if region.name in manifest.stores else region.label


def data_rows(experiment: Experiment, manifest: Manifest) -> dict[str, float]:
    """Return the training rows that each region represents.

    Sites that share the rows of a region represent equal parts of them, so that the sum is the
    total number of rows.
    """
    sources = {region.name: data_region(region, manifest) for region in experiment.regions}
    readers = Counter(sources.values())
    parts = {source: manifest.rows(source, "train") / count for source, count in readers.items()}
    return {name: parts[source] for name, source in sources.items()}


def open_readers(
    experiment: Experiment, manifest: Manifest, region: str, here: str | None = None
) -> tuple[RegionReader, RegionReader]:
    """Return the training stream and the held-out rows of ``region``, for a process in ``here``.

    Sites that share the rows of a region read them in different orders.
    """
    cache, seed = experiment.data.cache_shards, experiment.seed
    config = next(r for r in experiment.regions if r.name == region)
    source = data_region(config, manifest)
    order = seed if source == region else seed_of(region, seed)
    return (
        RegionReader(manifest, source, "train", order, cache, here),
        RegionReader(manifest, source, "heldout", seed, cache, here),
    )
