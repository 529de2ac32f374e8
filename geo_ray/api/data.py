"""Shards of regions: `shard_data`, `check_data` and `merge_data`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from geo_ray.api.columns import DataStatistics
from geo_ray.api.config import FilePath, NamedTask, task_config
from geo_ray.api.display import Table, progress_bar, reading_files
from geo_ray.api.watch import RunWatch, ShowProgress
from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_tree, text_of
from geo_ray.base.tables import html_view
from geo_ray.data.columns import Columns
from geo_ray.data.files.find import LeftOut, find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.manifest import (
    MANIFEST_NAME,
    DataShard,
    Manifest,
    load_manifest,
    manifest_file,
    merge_manifests,
    save_manifest,
)
from geo_ray.data.prepare.config import Preparation, load_preparation, written_sources
from geo_ray.data.prepare.inputs import Complaint, gather_rows, hold_out
from geo_ray.data.prepare.preparer import Counts
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.saved_preparation import (
    preparation_bytes,
    read_preparation_bytes,
    refuse_different_preparations,
    save_preparation,
)
from geo_ray.data.prepare.statistics import Statistics, load_statistics
from geo_ray.data.shards import Verdict, check_shards, shards_to_check, write_shards
from geo_ray.data.split import SplitConfig
from geo_ray.data.tasks.base import SelfContained, Task
from geo_ray.data.tasks.checked_calls import checked_dataset
from geo_ray.data.tasks.load import TaskConfig, load_task, option_for
from geo_ray.experiment.experiment import GenerateConfig
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import is_s3, join, local_path

Split: TypeAlias = str | Mapping[str, Any] | SplitConfig
"""The kind of a split, or its keys as the section ``data.generate.split`` has them."""

_NOTHING_HELD_OUT = "no rows are held out; a run needs some in every region"

_KINDS = {"region": str, "split": str, "path": str, "rows": int, "bytes": int}


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A user's own files, and how their rows become those of a task.

    Attributes:
        source: their folder, or the address of it.
        read: what the files do not say themselves.
        prepare: a preparation file, which says how the task's columns are made of theirs; None
            takes them as they are.
        stats: statistics of all regions, for ``prepare``: a file, or what `merge_data_stats` gave.
        heldout: the fraction of the rows that is kept for evaluation.
    """

    source: FilePath
    read: ReadOptions | None = None
    prepare: FilePath | None = None
    stats: FilePath | DataStatistics | None = None
    heldout: float = 0.1

    def __post_init__(self) -> None:
        if self.stats is not None and self.prepare is None:
            raise ConfigError(
                "there are statistics, and no preparation that says what they are for",
                fix="Name a preparation file, too, or leave the statistics out.",
            )


@dataclass(frozen=True, repr=False)
class RegionData:
    """Shards of regions, and the manifest that lists them.

    Attributes:
        manifest: what is where.
        path: of the manifest, or its address.
        counts: what preparing the rows did; None if they were taken as they are.
        notes: what a user should know, such as that a column is constant.
        left_out: files, folders and lines of the input that were not read, with the reasons.
    """

    manifest: Manifest
    path: str
    counts: Counts | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def table(self) -> Table:
        """A row per shard."""
        return Table([_row(shard) for shard in self.manifest.shards], _KINDS)

    def __repr__(self) -> str:
        shards = self.manifest.shards
        rows = f"{sum(shard.rows for shard in shards):,} rows in {len(shards)} shards"
        return f"<RegionData {self.path}: {rows} of {', '.join(self.manifest.regions())}>"

    def _repr_html_(self) -> str:
        rows = [
            (row["region"], row["split"], row["path"], f"{row['rows']:,}", f"{row['bytes']:,}")
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], ("region", "split", "shard", "rows", "bytes"), rows)


def shard_data(
    task: NamedTask,
    regions: Sequence[str] | Mapping[str, str],
    out: FilePath,
    *,
    files: SourceFiles | None = None,
    split: Split = "iid",
    rows_per_shard: int = 8192,
    seed: int = 0,
    force: bool = False,
    progress: ShowProgress = False,
) -> RegionData:
    """Write a task's data as Parquet shards, each region's in its own directory or store.

    Args:
        task: as a configuration names it: what ``use`` says, or ``{"use": ..., "options": {...}}``.
            A relative path to a file starts in the working directory.
        regions: their names; or by name the address of each one's own store.
        out: directory or address of the manifest, and of the stores of regions that have no own.
        files: your own files; None for a task that brings its data.
        split: how rows are shared out: ``iid``, ``ratio``, ``dirichlet``, ``by_label``.
        rows_per_shard: at most.
        seed: fixes the split, the order of rows, and which are held out.
        force: replace a manifest that is there.
        progress: as for `geo_ray.train`.

    Raises:
        ConfigError: the inputs do not fit together, or there is a manifest already.
        TaskLoadError: the task cannot be loaded.
        DataError: the files cannot be read or do not fit the task, or a store cannot be written.
    """
    names = list(regions.split(",") if isinstance(regions, str) else regions)
    place = os.fspath(out)
    homes = dict(regions) if isinstance(regions, Mapping) else dict.fromkeys(names, place)
    kind = {"kind": split} if isinstance(split, str) else split
    how = load_tree(
        text_of({"split": kind, "rows_per_shard": rows_per_shard}, Path.cwd()), (), GenerateConfig
    )
    if open_store(place).exists(MANIFEST_NAME) and not force:
        raise ConfigError(
            f"--out: {place} already has a manifest",
            fix="Choose another place, or add --force (force=True).",
        )
    named = task_config(task)
    loaded = load_task(named, Path.cwd())
    if files is None:
        rows = _own_data(loaded, named.use, seed)
    else:
        rows = _from_files(files, loaded, named, seed, progress)
    total = sum(len(next(iter(columns.values()))) for columns in rows.parts.values())
    with progress_bar("Writing shards", total, "rows", progress) as advance:
        manifest = write_shards(
            columns_by_split=rows.parts,
            task_name=named.use,
            column_types=loaded.columns,
            label_column=loaded.label_column,
            split=how.split,
            regions=names,
            seed=seed,
            out=homes,
            rows_per_shard=how.rows_per_shard,
            on_shard=lambda written: advance(written.rows),
        )
    target = join(place, MANIFEST_NAME)
    made = None if rows.preparation is None else preparation_bytes(rows.preparation)
    return RegionData(
        _saved(manifest, made, target),
        target if is_s3(target) else str(local_path(target)),
        rows.counts,
        rows.notes,
        rows.left_out,
    )


def merge_data(manifests: Sequence[FilePath], out: FilePath) -> RegionData:
    """Make one manifest of several that were written apart, each in its own region.

    Args:
        manifests: their paths or addresses.
        out: where the merged one goes, and beside it the preparation that they share.

    Raises:
        ManifestError: one cannot be read, or they contradict each other.
        StoreError: a store does not answer, or cannot be written.
    """
    uris = [os.fspath(uri) for uri in manifests]
    loaded = [load_manifest(uri) for uri in uris]
    refuse_different_preparations(loaded, uris)
    merged = merge_manifests(loaded)
    made = None
    if merged.preparation is not None:
        made = read_preparation_bytes(merged.preparation, manifest_file(uris[0]))
    target = os.fspath(out)
    return RegionData(_saved(merged, made, target), target)


@dataclass(frozen=True, repr=False)
class DataCheck:
    """What was found of every shard of a manifest.

    Attributes:
        manifest: what they should be.
        verdicts: one per shard.
    """

    manifest: Manifest
    verdicts: tuple[Verdict, ...]

    @property
    def bad(self) -> tuple[Verdict, ...]:
        """Those of shards that must not be used."""
        return tuple(verdict for verdict in self.verdicts if verdict.error is not None)

    def raise_if_bad(self) -> None:
        """Raise the error of the first bad shard, if there is one.

        Raises:
            DataError: what is wrong with it.
        """
        for verdict in self.bad:
            if verdict.error is not None:
                raise verdict.error

    def table(self) -> Table:
        """A row per shard; ``error`` is null where it is whole."""
        rows = [
            _row(verdict.shard)
            | {"error": None if verdict.error is None else verdict.error.message}
            for verdict in self.verdicts
        ]
        return Table(rows, _KINDS | {"error": str})

    def __repr__(self) -> str:
        return f"<DataCheck: {len(self.bad)} of {len(self.verdicts)} shards are bad>"

    def _repr_html_(self) -> str:
        rows = [
            (row["region"], row["split"], row["path"], f"{row['rows']:,}", row["error"] or "whole")
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], ("region", "split", "shard", "rows", "state"), rows)


def check_data(
    manifest: FilePath, region: str | None = None, *, progress: ShowProgress = False
) -> DataCheck:
    """Verify size, hash, schema and rows of every shard of a manifest.

    Args:
        manifest: its path or address.
        region: only this region's shards; None for all, which reads across regions.
        progress: as for `geo_ray.train`.

    Raises:
        ManifestError: it cannot be read, or has no such region.
    """
    loaded = load_manifest(os.fspath(manifest))
    total = sum(shard.bytes for shard in shards_to_check(loaded, region))
    verdicts = []
    with progress_bar("Checking shards", total, "bytes", progress) as advance:
        for verdict in check_shards(loaded, region):
            verdicts.append(verdict)
            advance(verdict.shard.bytes)
    return DataCheck(loaded, tuple(verdicts))


def _row(shard: DataShard) -> dict[str, object]:
    return shard.model_dump(include=set(_KINDS))


def _saved(manifest: Manifest, preparation: bytes | None, target: str) -> Manifest:
    """Write a manifest, and beside it the preparation that its rows were made with."""
    if preparation is not None:
        ref = save_preparation(preparation, target)
        manifest = manifest.model_copy(update={"preparation": ref})
    save_manifest(manifest, target)
    return manifest


@dataclass(frozen=True)
class _Rows:
    """Rows to train on and to hold out, and how they were made."""

    parts: dict[str, Columns]
    preparation: Preparation | None = None
    counts: Counts | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def _own_data(task: Task, use: str, seed: int) -> _Rows:
    if not isinstance(task, SelfContained):
        raise ConfigError(
            f"--task: {use} brings no data of its own",
            fix="Name your files with --input (files=SourceFiles(...)).",
        )
    made = checked_dataset(task, seed)
    return _Rows({"train": made.train, "heldout": made.heldout})


def _from_files(
    files: SourceFiles, task: Task, named: TaskConfig, seed: int, progress: ShowProgress
) -> _Rows:
    source = os.fspath(files.source)
    prepare = None if files.prepare is None else Path(files.prepare)
    preparation = None if prepare is None else load_preparation(prepare)
    finder = partial(option_for, named, Path.cwd())
    resolved = resolve(preparation, task.columns, _statistics(files.stats), finder)
    notes = resolved.notes if files.heldout else (*resolved.notes, _NOTHING_HELD_OUT)
    for note in notes:
        RunWatch(progress).tell(note)
    found = find_files(source, files.read)
    hint = f"geo-ray data inspect {shlex.quote(source)} --task {shlex.quote(named.use)}"
    complaint = Complaint(
        prepared=preparation is not None,
        draft=f"{hint} --draft prepare.yaml",
        label=task.label_column,
        written=written_sources(prepare),
    )
    with reading_files(len(found.files), progress) as on_read:
        gathered = gather_rows(found, resolved.preparation, complaint, on_read)
    parts = hold_out(gathered.columns, files.heldout, seed)
    if preparation is None:
        return _Rows(parts, notes=notes, left_out=gathered.left_out)
    return _Rows(parts, resolved.preparation, gathered.counts, notes, gathered.left_out)


def _statistics(stats: FilePath | DataStatistics | None) -> Statistics | None:
    if isinstance(stats, DataStatistics):
        return stats.statistics
    return None if stats is None else load_statistics(Path(stats))
