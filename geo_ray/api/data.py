"""Functions on shards of regions: `shard_data`, `check_data` and `merge_data`."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geo_ray.api.config import FilePath, NamedTask, task_config
from geo_ray.api.display import RunWatch, ShowProgress, Table, progress_bar, reading_files
from geo_ray.base.errors import ConfigError
from geo_ray.base.files import save_text
from geo_ray.base.load import load_tree, text_of
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import number_text
from geo_ray.data.columns import Columns, parse_types
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
from geo_ray.data.prepare.config import Preparation, load_preparation, source_text, written_sources
from geo_ray.data.prepare.encoders import Kind
from geo_ray.data.prepare.findings import Findings
from geo_ray.data.prepare.inputs import Complaint, gather_rows, hold_out
from geo_ray.data.prepare.preparer import Counts, Preparer
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.saved_preparation import (
    preparation_bytes,
    read_preparation_bytes,
    refuse_different_preparations,
    save_preparation,
)
from geo_ray.data.prepare.statistics import (
    Statistics,
    load_statistics,
    merge_statistics,
    save_statistics,
)
from geo_ray.data.prepare.suggest import (
    Suggestion,
    draft_text,
    label_origin,
    likely_label,
    suggest,
    suggest_label,
    suggest_options,
)
from geo_ray.data.prepare.survey import (
    Survey,
    Trial,
    copied_columns,
    needs_of,
    require_columns,
    share,
    survey_files,
    untrained,
)
from geo_ray.data.shards import Verdict, check_shards, shards_to_check, write_shards
from geo_ray.data.split import SplitConfig
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import is_s3, join, local_path

if TYPE_CHECKING:
    from geo_ray.data.tasks.base import Task
    from geo_ray.data.tasks.load import TaskConfig

Split: TypeAlias = str | Mapping[str, Any] | SplitConfig
"""The kind of a split, or its keys as the section ``data.generate.split`` has them."""

_NOTHING_HELD_OUT = "no rows are held out; a run needs some in every region"

_KINDS = {"region": str, "split": str, "path": str, "rows": int, "bytes": int}


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A user's files, and how their rows are mapped to those of a task.

    Attributes:
        source: directory or address of the files.
        read: reading options that the files do not determine.
        prepare: a preparation file that maps columns to those of the task; None: no preparation.
        stats: statistics of all regions, for ``prepare``: a file, or a result of
            `merge_data_stats`.
        heldout: held-out rows for evaluation: a fraction of the rows, or the directory or address
            of other files.
    """

    source: FilePath
    read: ReadOptions | None = None
    prepare: FilePath | None = None
    stats: FilePath | DataStatistics | None = None
    heldout: float | FilePath = 0.1

    def __post_init__(self) -> None:
        if self.stats is not None and self.prepare is None:
            raise ConfigError(
                "statistics are given without a preparation that uses them",
                fix="Also give a preparation file, or omit the statistics.",
            )


@dataclass(frozen=True, repr=False)
class RegionData:
    """Shards of regions, and the manifest that lists them.

    Attributes:
        manifest: the manifest.
        path: path or address of the manifest.
        counts: counters of the preparation; None without preparation.
        notes: hints for the user, such as a constant column.
        left_out: skipped files, folders and lines of the input, with reasons.
    """

    manifest: Manifest
    path: str
    counts: Counts | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def table(self) -> Table:
        """Return a row per shard."""
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
        task: as in a configuration: the value of ``use``, or ``{"use": ..., "options": {...}}``.
            A relative path is relative to the working directory.
        regions: names of the regions, or store addresses by name.
        out: directory or address of the manifest, and of the stores of regions without a store.
        files: your files; None for a self-contained task.
        split: division of the rows: ``iid``, ``ratio``, ``dirichlet``, ``by_label``.
        rows_per_shard: maximum rows per shard.
        seed: seed of the split, the order of rows, and the held-out rows.
        force: replace an existing manifest.
        progress: as for `geo_ray.train`.

    Raises:
        ConfigError: the arguments contradict each other, or a manifest exists already.
        TaskLoadError: the task cannot be loaded.
        DataError: the files cannot be read or do not fit the task, or a store cannot be written.
    """
    from geo_ray.data.tasks.load import load_task  # PyTorch takes seconds to import
    from geo_ray.experiment.experiment import GenerateConfig

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
            fix="Choose another destination, or add --force (force=True).",
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
            on_rows=advance,
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
    """Merge manifests that were written separately, each in its region.

    Args:
        manifests: paths or addresses of the manifests.
        out: destination of the merged manifest, and of the preparation that they share.

    Raises:
        ManifestError: a manifest cannot be read, or they contradict each other.
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
    """Verification results of the shards of a manifest.

    Attributes:
        manifest: the manifest.
        verdicts: result for each shard.
    """

    manifest: Manifest
    verdicts: tuple[Verdict, ...]

    @property
    def bad(self) -> tuple[Verdict, ...]:
        """Results of shards that must not be used."""
        return tuple(verdict for verdict in self.verdicts if verdict.error is not None)

    def raise_if_bad(self) -> None:
        """Raise the error of the first bad shard, if any.

        Raises:
            DataError: the defect of the shard.
        """
        for verdict in self.bad:
            if verdict.error is not None:
                raise verdict.error

    def table(self) -> Table:
        """Return a row per shard; ``error`` is null if the shard is valid."""
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
        manifest: path or address of the manifest.
        region: verify only this region's shards; None: all, which reads across regions.
        progress: as for `geo_ray.train`.

    Raises:
        ManifestError: the manifest cannot be read, or has no such region.
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
    """Write a manifest, and next to it the preparation of its rows."""
    if preparation is not None:
        ref = save_preparation(preparation, target)
        manifest = manifest.model_copy(update={"preparation": ref})
    save_manifest(manifest, target)
    return manifest


@dataclass(frozen=True)
class _Rows:
    """Training rows, held-out rows, and their preparation."""

    parts: Mapping[str, Columns]
    preparation: Preparation | None = None
    counts: Counts | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def _own_data(task: Task, use: str, seed: int) -> _Rows:
    from geo_ray.data.tasks.base import SelfContained
    from geo_ray.data.tasks.checked_calls import checked_dataset

    if not isinstance(task, SelfContained):
        raise ConfigError(
            f"--task: {use} is not self-contained",
            fix="Give your files with --input (files=SourceFiles(...)).",
        )
    made = checked_dataset(task, seed)
    return _Rows({"train": made.train, "heldout": made.heldout})


def _from_files(
    files: SourceFiles, task: Task, named: TaskConfig, seed: int, progress: ShowProgress
) -> _Rows:
    source, heldout = os.fspath(files.source), files.heldout
    prepare = None if files.prepare is None else Path(files.prepare)
    preparation = None if prepare is None else load_preparation(prepare)
    from geo_ray.data.tasks.load import option_for

    finder = partial(option_for, named, Path.cwd())
    resolved = resolve(preparation, task.columns, _statistics(files.stats), finder)
    notes = resolved.notes if heldout else (*resolved.notes, _NOTHING_HELD_OUT)
    for note in notes:
        RunWatch(progress).notify(note)
    found = [find_files(source, files.read)]
    if not isinstance(heldout, int | float):
        found.append(find_files(os.fspath(heldout), files.read))
    hint = f"geo-ray data inspect {shlex.quote(source)} --task {shlex.quote(named.use)}"
    complaint = Complaint(
        prepared=preparation is not None,
        draft=f"{hint} --draft prepare.yaml",
        label=task.label_column,
        written=written_sources(prepare),
    )
    gathered = []
    for one in found:
        with reading_files(len(one.files), progress) as on_read:
            gathered.append(gather_rows(one, resolved.preparation, complaint, on_read))
    parts: Mapping[str, Columns] = dict(
        zip(("train", "heldout"), (one.columns for one in gathered), strict=False)
    )
    if isinstance(heldout, int | float):
        parts = hold_out(gathered[0].columns, heldout, seed)
    left_out = tuple(skipped for one in gathered for skipped in one.left_out)
    if preparation is None:
        return _Rows(parts, notes=notes, left_out=left_out)
    counts = Counts()
    for prepared in gathered:
        counts.add(prepared.counts)
    return _Rows(parts, resolved.preparation, counts, notes, left_out)


def _statistics(stats: FilePath | DataStatistics | None) -> Statistics | None:
    if isinstance(stats, DataStatistics):
        return stats.statistics
    return None if stats is None else load_statistics(Path(stats))


_UNKNOWABLE: tuple[Kind, ...] = ("inexact", "is_list", "is_single")
"""Types of the task's columns, against which a preparation is checked."""


@dataclass(frozen=True, repr=False)
class DataSurvey:
    """Columns of a folder of files, and how to prepare them.

    Attributes:
        survey: rows, files, and facts about each column.
        treatments: usual treatment of each column.
        wanted: columns of the task with their types, if a task was given.
        options: reading options that the usual treatments require.
        label: column that is, or most likely is, the class of each row.
    """

    survey: Survey
    treatments: Mapping[str, Suggestion]
    wanted: Mapping[str, str]
    options: tuple[str, ...] = ()
    label: str | None = None

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Skipped files, folders and lines, with reasons."""
        return tuple(self.survey.left_out)

    def raise_if_bad(self) -> None:
        """Raise the error of the first unreadable file, if any.

        Raises:
            DataError: the defect of the file.
        """
        if self.survey.unreadable:
            raise self.survey.unreadable[0]

    def table(self) -> Table:
        """Return a row per column; ``different`` is null if there are too many values to count."""
        kinds = {"column": str, "type": str, "no_value": int, "different": int}
        rows = [
            {
                "column": name,
                "type": column.kind,
                "no_value": column.nulls + column.nans,
                "different": None if column.distinct is None else len(column.distinct),
                "treatment": self.treatment_text(name),
                "remark": self.treatments[name].remark,
            }
            for name, column in self.survey.columns.items()
        ]
        return Table(rows, kinds | {"treatment": str, "remark": str})

    def treatment_text(self, column: str) -> str:
        """Return the usual treatment of a column in the syntax of preparation files."""
        source = self.treatments[column].source
        return f"{column}: leave it out" if source is None else source_text(source)

    def __repr__(self) -> str:
        survey = self.survey
        what = f"{survey.rows:,} rows in {survey.files:,} files, {len(survey.columns)} columns"
        return f"<DataSurvey: {what}>"

    def _repr_html_(self) -> str:
        headings = ("column", "type", "no value", "different", "usual treatment")
        rows = [
            (
                row["column"],
                row["type"],
                f"{row['no_value']:,}",
                "many" if row["different"] is None else f"{row['different']:,}",
                row["treatment"],
            )
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], headings, rows)


def inspect_data(
    source: FilePath,
    read: ReadOptions | None = None,
    *,
    task: NamedTask | None = None,
    draft: FilePath | None = None,
    force: bool = False,
    progress: ShowProgress = False,
) -> DataSurvey:
    """Inspect the columns of files: types, missing values, and usual treatments.

    Args:
        source: directory or address of the files.
        read: reading options that the files do not determine.
        task: task of the files; required by ``draft``.
        draft: path at which to write an initial preparation file for the task.
        force: replace an existing file.
        progress: as for `geo_ray.train`.

    Raises:
        ConfigError: the preparation file exists already.
        TaskLoadError: the task cannot be loaded.
        ShardMissingError: there are no files.
    """
    path = None if draft is None else Path(draft)
    if path is not None and task is None:
        raise ConfigError("a draft requires a task", fix="Give the task.")
    if path is not None and path.exists() and not force:
        raise ConfigError(
            f"--draft: {path} exists already",
            fix="Choose another name, or add --force (force=True).",
        )
    named = loaded = None
    if task is not None:
        from geo_ray.data.tasks.load import load_task, option_for  # PyTorch takes seconds to import

        named = task_config(task)
        loaded = load_task(named, Path.cwd())
    found = find_files(os.fspath(source), read)
    with reading_files(len(found.files), progress) as on_read:
        survey = survey_files(found, on_read=on_read)
    label = None if loaded is None else loaded.label_column
    origin = likely_label(survey) if label is None else label_origin(label, survey)
    treatments = {
        name: suggest_label(name, column) if name == origin else suggest(name, column)
        for name, column in survey.columns.items()
    }
    wanted = {} if loaded is None else dict(loaded.columns)
    if path is not None and named is not None:
        finder = partial(option_for, named, Path.cwd())
        save_text(path, draft_text(survey, wanted, label, finder))
    return DataSurvey(survey, treatments, wanted, suggest_options(survey), origin)


@dataclass(frozen=True, slots=True)
class WantedStatistics:
    """Selection of a region's statistics.

    Attributes:
        prepare: a preparation file: only columns whose statistics it needs.
        columns: only these columns; empty: all.
        words: columns whose words are counted. Words are data and leave the region.
        at_least: omit words that fewer rows have.
        extremes: include minimum and maximum, which are values of single rows.
    """

    prepare: FilePath | None = None
    columns: Sequence[str] = ()
    words: Sequence[str] = ()
    at_least: int = 10
    extremes: bool = True

    def __post_init__(self) -> None:
        if self.columns and self.prepare is not None:
            raise ConfigError(
                "--columns and --prepare both select columns", fix="Give only one of them."
            )
        if self.at_least < 1:
            raise ConfigError(
                f"at_least: {self.at_least} is not positive", fix="Give 1 to count every word."
            )

    def names(self) -> tuple[str, ...] | None:
        """Return the columns to read; None for all.

        Raises:
            ConfigError: the preparation needs no statistics, or words that are not included.
        """
        if self.prepare is None:
            return tuple(dict.fromkeys((*self.columns, *self.words))) if self.columns else None
        needs = needs_of(load_preparation(Path(self.prepare)))
        if not needs.columns and not self.words:
            raise ConfigError(
                f"{self.prepare} needs no statistics", fix="Omit this step and --stats."
            )
        if absent := [name for name in needs.words if name not in self.words]:
            raise ConfigError(
                f"{self.prepare} needs the words of {', '.join(absent)}, which are data of this "
                "region",
                fix="If they may leave the region, add --values "
                f"{','.join(absent)}; words in fewer rows than --at-least stay there. "
                "Otherwise use vocabulary: {hash: N} or "
                "{file: FILE}.",
            )
        return tuple(dict.fromkeys((*needs.columns, *self.words)))


@dataclass(frozen=True, repr=False)
class DataStatistics:
    """Statistics of the columns of one region, or of several.

    Attributes:
        statistics: statistics of each column, or the reason why it has none.
        left_out: skipped files, folders and lines, with reasons.
    """

    statistics: Statistics
    left_out: tuple[LeftOut, ...] = ()

    def save(self, path: FilePath) -> Path:
        """Write the file for `merge_data_stats` and `SourceFiles.stats`.

        Raises:
            ConfigError: the file cannot be written.
        """
        save_statistics(self.statistics, Path(path))
        return Path(path)

    def table(self) -> Table:
        """Return a row per column; mean and deviation are null for columns without numbers."""
        kinds = {"column": str, "kind": str, "no_value": int, "numbers": int}
        rows = [
            {
                "column": name,
                "kind": known.kind,
                "no_value": known.nulls + known.nans,
                "numbers": known.count,
                "mean": known.mean,
                "deviation": None if known.m2 is None else math.sqrt(known.m2 / known.count),
                "words": None if known.words is None else len(known.words),
            }
            for name, known in self.statistics.columns.items()
        ]
        return Table(rows, kinds | {"mean": float, "deviation": float, "words": int})

    def __repr__(self) -> str:
        known = self.statistics
        what = f"{known.rows:,} rows, {len(known.columns)} columns"
        return f"<DataStatistics of {', '.join(known.regions)}: {what}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                row["column"],
                row["kind"],
                f"{row['no_value']:,}",
                f"{row['numbers']:,}",
                number_text(row["mean"]),
                number_text(row["deviation"]),
            )
            for row in self.table().to_pylist()
        ]
        headings = ("column", "kind", "no value", "numbers", "mean", "deviation")
        return html_view(repr(self)[1:-1], headings, rows)


def data_stats(
    source: FilePath,
    region: str,
    wanted: WantedStatistics | None = None,
    *,
    read: ReadOptions | None = None,
    progress: ShowProgress = False,
) -> DataStatistics:
    """Compute statistics of a region's columns: counts, means and deviations, but no rows.

    Args:
        source: directory or address of the files.
        region: region of the files.
        wanted: selection of columns and statistics.
        read: reading options that the files do not determine.
        progress: as for `geo_ray.train`.

    Raises:
        ConfigError: a selected column is not in the files, or required words are not included.
        DataError: a file cannot be read, or the preparation rejects some values.
    """
    wanted = wanted or WantedStatistics()
    names = wanted.names()
    place = os.fspath(source)
    prepare = None if wanted.prepare is None else Path(wanted.prepare)
    written = written_sources(prepare)
    found = find_files(place, read)
    findings, trial = Findings({}), None
    needed: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    if prepare is not None:
        preparation = load_preparation(prepare)
        needs = needs_of(preparation)
        needed = needs.numbers
        copied = copied_columns(preparation)
        tried = untrained(preparation)
        findings = Findings(parse_types(tried.types), written=written, ignored=_UNKNOWABLE)
        options = found.options
        preparer = Preparer(tried, decimal=options.decimal, thousands=options.thousands)
        trial = Trial(preparer, findings, needs.formats)
    with reading_files(len(found.files), progress) as on_read:
        survey = survey_files(found, names, tuple(wanted.words), on_read, trial)
    findings.forget(survey.report.untranslated)
    findings.forget_copies(copied, survey.rows)
    for error in survey.unreadable:
        findings.add_unreadable(error)
    if trial is not None and not survey.unreadable:
        require_columns(survey, dict.fromkeys((*(names or ()), *trial.preparer.inputs)), written)
    findings.raise_any(f"the files in {place} do not fit", prepared=True)
    shared = share(survey, region, names, wanted.at_least, wanted.extremes, needed)
    return DataStatistics(shared, tuple(survey.left_out))


def merge_data_stats(parts: Sequence[FilePath | DataStatistics]) -> DataStatistics:
    """Merge the statistics of regions; no row is read.

    Args:
        parts: one per region: files, or results of `data_stats`.

    Raises:
        ConfigError: there are none, one cannot be read, or two contain the same region.
    """
    loaded = [
        part.statistics if isinstance(part, DataStatistics) else load_statistics(Path(part))
        for part in parts
    ]
    return DataStatistics(merge_statistics(loaded))
