"""`geo-ray data`: inspects files, computes statistics, writes and checks shards."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from geo_ray.base.tables import FittedTable
from geo_ray.base.text import printable
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say

if TYPE_CHECKING:
    from geo_ray.api.data import DataSurvey
    from geo_ray.data.files.find import LeftOut
    from geo_ray.data.files.options import ReadOptions
    from geo_ray.data.manifest import DataShard, Manifest
    from geo_ray.data.prepare.preparer import Counts
    from geo_ray.data.prepare.statistics import Statistics
    from geo_ray.data.prepare.survey import ColumnSurvey, Survey


_READ = (
    click.option(
        "--format",
        type=click.Choice(["csv", "jsonl", "parquet", "arrow", "webdataset", "mds", "images"]),
        help="Format of the files.  [default: by their names]",
    ),
    click.option("--delimiter", help="Delimiter of CSV files: ';', tab, ...  [default: comma]"),
    click.option(
        "--decimal",
        type=click.Choice([".", ","]),
        default=".",
        show_default=True,
        help="Decimal mark of CSV files.",
    ),
    click.option(
        "--thousands",
        metavar="MARK",
        help="Thousands separator: a comma, a point, an apostrophe or the word space.  "
        "[default: none]",
    ),
    click.option("--encoding", default="utf-8", show_default=True, help="Encoding of text files."),
    click.option(
        "--header", metavar="NAME,...", help="Column names, if the CSV files have no header line."
    ),
    click.option(
        "--null",
        "nulls",
        multiple=True,
        metavar="WORD",
        help="A word for a missing value, in addition to empty text and, unquoted in CSV files, "
        "NULL, null, None, NA, N/A, n/a and #N/A; repeatable.",
    ),
    click.option(
        "--no-default-nulls", is_flag=True, help="Treat NULL, NA and so on as ordinary words."
    ),
    click.option(
        "--site",
        type=click.Path(path_type=Path),
        help="A site file, which maps the columns of these files to the shared columns.",
    ),
    click.option(
        "--strict", is_flag=True, help="Reject inputs of which anything would be skipped."
    ),
)


def read_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options of reading files to a verb, passed as one argument ``read``."""

    @wraps(verb)
    def with_read(
        *args: Any,
        format: str | None,
        delimiter: str | None,
        decimal: str,
        thousands: str | None,
        encoding: str,
        header: str | None,
        nulls: tuple[str, ...],
        no_default_nulls: bool,
        site: Path | None,
        strict: bool,
        **others: Any,
    ) -> None:
        from geo_ray.data.files.options import CHARACTERS, DEFAULT_NULLS, ReadOptions

        names = tuple(name.strip() for name in header.split(",")) if header is not None else ()
        read = ReadOptions(
            format=format,  # type: ignore[arg-type]  # click has checked it
            delimiter=delimiter and CHARACTERS.get(delimiter, delimiter),
            decimal=decimal,
            encoding=encoding,
            header=names,
            nulls=(*(() if no_default_nulls else DEFAULT_NULLS), *nulls),
            thousands=thousands and CHARACTERS.get(thousands, thousands),
            site=site,
            strict=strict,
        )
        verb(*args, read=read, **others)

    decorated: Callable[..., None] = with_read
    for option in reversed(_READ):
        decorated = option(decorated)
    return decorated


def names_of(text: str | None) -> tuple[str, ...]:
    """Return the names of a comma-separated option; () if it is missing."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def is_default(read: ReadOptions) -> bool:
    """Return whether no option of reading was given."""
    from geo_ray.data.files.options import ReadOptions as Options

    return read == Options()


def pairs_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Return the values of a repeatable option NAME=VALUE by name."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        pairs[key] = value
    return pairs


def named_task(use: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Return ``--task`` and ``--task-option`` as the section ``task`` of a configuration."""
    values = {key: _scalar(text) for key, text in pairs_of(options, "--task-option").items()}
    return {"use": use, "options": values}


def _scalar(text: str) -> Any:
    """Read a finite JSON number, true, false or null; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_plain = isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else text


MOST_LEFT_OUT = 6
"""Names per reason that verbs other than ``inspect`` list; ``inspect`` lists all."""

_MOST_LABELS = 12


def shown_time(seconds: float) -> str:
    """Return a time of statistics in UTC; a date if it is midnight."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}".removesuffix(" 00:00")
    except (ValueError, OverflowError, OSError):  # beyond the years 1 to 9999
        return f"{seconds:.6g} s"


def left_out_lines(left_out: Sequence[LeftOut], most: int | None = None) -> list[str]:
    """Return the skipped inputs, a line per reason with at most ``most`` names; None: all."""
    paths: dict[str, list[str]] = {}
    for one in left_out:
        paths.setdefault(one.reason, []).append(one.path)
    lines = []
    for reason, names in paths.items():
        shown = ", ".join(names[:most])
        more = len(names) - len(names[:most])
        also = f" and {more:,} more" if more else ""
        lines.append(f"Skipped: {shown}{also}: {reason}")
    return lines


def print_table(
    manifest: Manifest,
    words: Mapping[str, str],
    region: str | None = None,
    bad: frozenset[str] = frozenset(),
) -> None:
    """Print one line per region and split: shards, rows, bytes and labels.

    Args:
        manifest: the manifest to print.
        words: word of each label, where known.
        region: the only region to print, or None for all.
        bad: paths of shards that failed verification.
    """
    table = FittedTable(title=f"{manifest.task}, seed {manifest.seed}", box=SIMPLE)
    for heading in ("region", "split"):
        table.add_column(heading, no_wrap=True)
    for heading in ("shards", "bad", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("label:rows", min_width=len("label:rows"), overflow="fold")
    groups: dict[tuple[str, str], list[DataShard]] = {}
    for shard in manifest.shards:
        if region is None or shard.region == region:
            groups.setdefault((shard.region, shard.split), []).append(shard)
    for (region, split), shards in groups.items():
        wrong = sum(shard.path in bad for shard in shards)
        table.add_row(
            region,
            split,
            f"{len(shards):,}",
            Text(f"{wrong:,}", "red") if wrong else "0",
            f"{sum(shard.rows for shard in shards):,}",
            f"{sum(shard.bytes for shard in shards):,}",
            _labels(shards, words),
        )
    Console().print(table)


def _number_of(label: str) -> int:
    return int(label) if label.lstrip("-").isdigit() else 0


def _labels(shards: list[DataShard], words: Mapping[str, str]) -> str:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.labels)
    ordered = sorted(counts, key=_number_of)
    shown = " ".join(
        f"{words.get(label, label)}:{counts[label]:,}" for label in ordered[:_MOST_LABELS]
    )
    more = len(ordered) - _MOST_LABELS
    return f"{shown} and {more:,} more" if more > 0 else shown or "-"


_FEW_VALUES = 20
_MOST_VALUES = 8
_MOST_LETTERS = 40


@click.command()
@click.argument("source", metavar="DIR_OR_URI")
@click.option("--task", "use", help="Task of the files; required by --draft.")
@click.option(
    "--task-option", "options", multiple=True, metavar="K=V", help="An option of the task."
)
@click.option(
    "--draft",
    "draft_file",
    type=click.Path(path_type=Path),
    help="Write an initial preparation file for the task.",
)
@click.option("--force", is_flag=True, help="Replace an existing preparation file.")
@read_options
def inspect(
    source: str,
    use: str | None,
    options: tuple[str, ...],
    draft_file: Path | None,
    force: bool,
    read: ReadOptions,
) -> None:
    """Show the columns of your files.

    The table lists types, missing values and usual treatments.
    """
    loading("pyarrow" if use is None else "torch")
    from geo_ray.api.data import inspect_data

    if draft_file is not None and use is None:
        raise click.UsageError("--draft requires --task")
    task = None if use is None else named_task(use, options)
    found = inspect_data(source, read, task=task, draft=draft_file, force=force, progress=True)
    _show_survey(found)
    if found.wanted:
        wanted = ", ".join(f"{name}: {kind}" for name, kind in found.wanted.items())
        say(f"The task requires {wanted}")
    if draft_file is not None:
        click.echo(f"Preparation: {draft_file}")
    unreadable = found.survey.unreadable
    for error in unreadable:
        click.secho(printable(f"error {error}"), fg="red", err=True)
    if unreadable:
        raise click.exceptions.Exit(unreadable[0].exit_code)


def _show_survey(found: DataSurvey) -> None:
    survey = found.survey
    table = FittedTable(title=f"{survey.rows:,} rows in {_files(survey.files)}", box=SIMPLE)
    table.add_column("column", overflow="fold")
    table.add_column("type", no_wrap=True, min_width=5)
    for heading in ("no value", "different", "least", "greatest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, column in survey.columns.items():
        table.add_row(
            name,
            _type(column),
            f"{column.nulls + column.nans:,}",
            _different(column),
            *_extremes(column),
        )
    if survey.columns:
        Console().print(table)
    for note in [*left_out_lines(found.left_out), *_notes(survey)]:
        say(note)
    frequent = {
        name: line for name, column in survey.columns.items() if (line := _frequent_values(column))
    }
    if frequent:
        click.echo("Most frequent values:")
    for name, line in frequent.items():
        say(f"  {name}: {line}")
    if found.label is not None and found.label not in found.wanted:
        say(f"The label may be {found.label}.")
    if found.options:
        say(f"Options for inspect, stats and shard: {' '.join(found.options)}")
    if survey.columns:
        click.echo("Usual treatments:")
    for name, treatment in found.treatments.items():
        remark = f"  # {treatment.remark}" if treatment.remark else ""
        say(f"  {found.treatment_text(name)}{remark}")


def _frequent_values(column: ColumnSurvey) -> str:
    """Return the most frequent values of a column of words, or of few numbers."""
    few = column.distinct is not None and len(column.distinct) <= _FEW_VALUES
    if column.kind not in ("text", "bool", "int") or not column.repeats:
        return ""
    if column.kind == "int" and not few:
        return ""
    numbers = column.families["int"] + column.families["float"]
    if column.marks or column.formats or numbers > column.families["text"] > 0:  # a measurement
        return ", ".join(
            f"{_cut(word)} {rows:,}" for word, rows in column.texts.most_common(_MOST_VALUES)
        )
    top = column.seen.most_common(_MOST_VALUES)
    shown = ", ".join(f"{_cut(word)} {rows:,}" for word, rows in top)
    if column.is_many:
        return f"{shown} and many more"
    more = len(column.seen) - len(top)
    return shown + (f" and {more:,} more" if more else "")


def _cut(word: str) -> str:
    from geo_ray.base.text import escaped as shown_word

    return shown_word(word[:_MOST_LETTERS])


def _different(column: ColumnSurvey) -> str:
    if column.kind in ("list", "bytes", "other"):
        return ""
    return f"{len(column.distinct):,}" if column.distinct is not None else "many"


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number:,} files"


def _type(column: ColumnSurvey) -> str:
    if column.kind == "list":
        lengths = ", ".join(str(length) for length in sorted(column.lengths))
        return f"list of {lengths}"
    return column.kind


def _extremes(column: ColumnSurvey) -> tuple[str, str]:
    moments = column.moments
    if not moments.count or column.kind not in ("int", "float", "time"):
        return "", ""
    if column.kind == "time":
        return shown_time(moments.low), shown_time(moments.high)
    return f"{moments.low:.6g}", f"{moments.high:.6g}"


def _notes(survey: Survey) -> list[str]:
    from geo_ray.base.text import listed

    without: dict[tuple[str, ...], list[str]] = {}  # files -> their missing columns
    for name, column in survey.columns.items():
        files = tuple(path for path in survey.rows_of if path not in column.files)
        without.setdefault(files, []).append(name)
    notes = [
        f"{names[0]} is not in {listed(files)}"
        if len(names) == 1
        else f"{len(names)} columns are not in {listed(files)}: {listed(names)}"
        for files, names in without.items()
        if files
    ]
    for name, column in survey.columns.items():
        if len(column.first_file) > 1:
            kinds = ", ".join(
                f"{column.families[kind]:,} {kind} (first in {path})"
                for kind, path in column.first_file.items()
            )
            notes.append(f"{name} has several types: {kinds}")
        if column.nans or column.infinite:
            notes.append(f"{name} has {column.nans:,} NaN and {column.infinite:,} infinite values")
    return notes


_MOST_WORDS = 10


@click.command()
@click.option("--task", "use", required=True, help="Built-in task, or path/to/file.py:Class.")
@click.option("--task-option", "options", multiple=True, metavar="K=V", help="Option of the task.")
@click.option(
    "--out", required=True, metavar="DIR_OR_URI", help="Destination of manifest and shards."
)
@click.option("--regions", required=True, help="Comma-separated, e.g. us-east,eu-west,ap-south.")
@click.option(
    "--split",
    "kind",
    type=click.Choice(["iid", "ratio", "dirichlet", "by_label"]),
    default="iid",
    show_default=True,
    help="How rows are divided among regions.",
)
@click.option("--ratio", help="For --split ratio: a weight per region, e.g. 2,1,1.")
@click.option(
    "--alpha",
    type=click.FloatRange(min=0, min_open=True),
    help="For --split dirichlet: 0.1 is strong label skew, 100 almost none.",
)
@click.option(
    "--rows-per-shard", type=click.IntRange(min=1), default=8192, show_default=True, help="At most."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--input",
    "source",
    metavar="DIR_OR_URI",
    help="Your own files: CSV, JSON lines, Parquet or Arrow.",
)
@click.option(
    "--prepare",
    "prepare_file",
    type=click.Path(path_type=Path),
    help="With --input: a preparation file, which maps your columns to the task's.",
)
@click.option(
    "--stats",
    "stats_file",
    type=click.Path(path_type=Path),
    help="With --prepare: statistics of all regions, from `geo-ray data merge-stats`.",
)
@click.option(
    "--heldout",
    metavar="FRACTION|FILES",
    help="With --input: held-out rows for evaluation: a fraction of the rows, or a directory or "
    "address of other files.  [default: 0.1]",
)
@click.option("--store", "stores", multiple=True, metavar="REGION=URI", help="Store of a region.")
@click.option("--force", is_flag=True, help="Replace an existing manifest.")
@read_options
def shard(
    use: str,
    options: tuple[str, ...],
    out: str,
    regions: str,
    kind: str,
    ratio: str | None,
    alpha: float | None,
    rows_per_shard: int,
    seed: int,
    source: str | None,
    prepare_file: Path | None,
    stats_file: Path | None,
    heldout: str | None,
    stores: tuple[str, ...],
    force: bool,
    read: ReadOptions,
) -> None:
    """Write a task's data as Parquet shards.

    Each region's shards go into a separate directory or store.
    """
    loading()
    import geo_ray
    from geo_ray.api.data import SourceFiles
    from geo_ray.data.prepare.saved_preparation import label_words

    names = [name.strip() for name in regions.split(",") if name.strip()]
    split = _split(kind, names, ratio, alpha)
    own = pairs_of(stores, "--store")
    if unknown := sorted(set(own) - set(names)):
        raise click.BadParameter(f"{unknown[0]!r} is not among --regions", param_hint="--store")
    if stats_file is not None and prepare_file is None:
        raise click.UsageError("--stats requires --prepare")
    files = None
    if source is None:
        _refuse_without_input(heldout, prepare_file, read)
    else:
        files = SourceFiles(source, read, prepare_file, stats_file, _heldout(heldout))
    made = geo_ray.shard_data(
        named_task(use, options),
        {name: own.get(name, out) for name in names} if own else names,
        out,
        files=files,
        split=split,
        rows_per_shard=rows_per_shard,
        seed=seed,
        force=force,
        progress=True,
    )
    for line in left_out_lines(made.left_out, MOST_LEFT_OUT):
        say(line, err=True)
    if made.counts is not None:
        _show_counts(made.counts)
    print_table(made.manifest, label_words(made.path))
    click.echo(f"Manifest: {made.path}")


def _heldout(given: str | None) -> float | str:
    """Return a fraction, or the address of files."""
    if given is None:
        return 0.1
    try:
        fraction = float(given)
    except ValueError:
        return given
    if not 0 <= fraction < 1:
        raise click.UsageError(f"--heldout: {given} is not in the range 0<=x<1")
    return fraction


def _refuse_without_input(
    heldout: str | None, prepare_file: Path | None, read: ReadOptions
) -> None:
    if heldout is not None:
        raise click.UsageError(
            "--heldout requires --input; without it the task provides held-out rows"
        )
    if prepare_file is not None or not is_default(read):
        raise click.UsageError(
            "--prepare and the options of reading files require --input, which names your files"
        )


def _split(kind: str, regions: list[str], ratio: str | None, alpha: float | None) -> dict[str, Any]:
    if (ratio is not None) != (kind == "ratio"):
        raise click.UsageError("--ratio and --split ratio require each other")
    if alpha is not None and kind != "dirichlet":
        raise click.UsageError("--alpha requires --split dirichlet")
    if ratio is not None:
        return {"kind": kind, "ratios": _ratios(ratio, regions)}
    if kind == "dirichlet":
        return {"kind": kind, "alpha": 0.3 if alpha is None else alpha}
    return {"kind": kind}


def _ratios(text: str, regions: list[str]) -> dict[str, float]:
    try:
        shares = [float(fraction) for fraction in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != len(regions) or not all(0 < fraction < float("inf") for fraction in shares):
        raise click.BadParameter(
            f"{text!r} is not one positive number per region ({len(regions)} regions)",
            param_hint="--ratio",
        )
    return dict(zip(regions, shares, strict=True))


def _show_counts(counts: Counts) -> None:
    """Return a report of dropped and changed rows."""
    lines = [f"{counts.rows:,} rows read, {counts.dropped:,} of them dropped"]
    for what, by_column in (
        ("dropped, missing", counts.dropped_by),
        ("filled in", counts.filled),
        ("with other words in", counts.other),
    ):
        found = {name: number for name, number in by_column.items() if number}
        words = counts.other_words if by_column is counts.other else {}
        lines += [
            f"  {number:,} {what} {name}{_unknown_words(words.get(name))}"
            for name, number in found.items()
        ]
    say("\n".join(lines))


def _unknown_words(words: Counter[str] | None) -> str:
    """Return the most frequent words that a vocabulary lacks."""
    if not words:
        return ""
    from geo_ray.base.text import escaped as printable

    shown = ", ".join(
        f"{printable(word)} {rows:,}" for word, rows in words.most_common(_MOST_WORDS)
    )
    more = len(words) - _MOST_WORDS
    return f": {shown}" + (f" and {more:,} more words" if more > 0 else "")


_DAY_S = 86_400


@click.command()
@click.argument("source", metavar="DIR_OR_URI")
@click.option("--region", required=True, help="Region of these files.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Output file.")
@click.option(
    "--prepare",
    "prepare_file",
    type=click.Path(path_type=Path),
    help="Only columns whose statistics this preparation file needs.",
)
@click.option("--columns", metavar="NAME,...", help="Only these columns.  [default: all]")
@click.option(
    "--values",
    metavar="NAME,...",
    help="Also count the words of these columns. Words are data and leave the region.",
)
@click.option(
    "--at-least",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="With --values: omit words that fewer rows have.",
)
@click.option(
    "--no-extremes",
    is_flag=True,
    help="Omit minimum and maximum, which are values of single rows.",
)
@read_options
def stats(
    source: str,
    region: str,
    out: Path,
    prepare_file: Path | None,
    columns: str | None,
    values: str | None,
    at_least: int,
    no_extremes: bool,
    read: ReadOptions,
) -> None:
    """Write statistics of a region's columns.

    The file contains counts, means and deviations, but no rows.
    """
    loading("pyarrow")
    from geo_ray.api.data import WantedStatistics, data_stats

    wanted = WantedStatistics(
        prepare_file, names_of(columns), names_of(values), at_least, extremes=not no_extremes
    )
    found = data_stats(source, region, wanted, read=read, progress=True)
    found.save(out)
    for line in left_out_lines(found.left_out, MOST_LEFT_OUT):
        say(line, err=True)
    _show_statistics(found.statistics)
    click.echo(f"Statistics: {out}")


@click.command("merge-stats")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Output file.")
def merge_stats(files: tuple[Path, ...], out: Path) -> None:
    """Merge the statistics of all regions in FILES.

    `geo-ray data stats` writes one file per region.
    """
    loading("pyarrow")
    from geo_ray.api.data import merge_data_stats

    merged = merge_data_stats(files)
    merged.save(out)
    _show_statistics(merged.statistics)
    click.echo(f"Statistics: {out}")


def _show_statistics(shared: Statistics) -> None:
    table = FittedTable(title=f"{', '.join(shared.regions)}: {shared.rows:,} rows", box=SIMPLE)
    for heading in ("column", "kind"):
        table.add_column(heading, no_wrap=True)
    counted = any(known.words is not None for known in shared.columns.values())
    for heading in ("no value", "numbers", "mean", "deviation", *(("words",) if counted else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, known in shared.columns.items():
        mean, deviation = "", ""
        if known.mean is not None and known.m2 is not None:
            spread = math.sqrt(known.m2 / known.count)
            is_time = known.kind == "time"
            mean = shown_time(known.mean)[:10] if is_time else f"{known.mean:.6g}"
            deviation = f"{spread / _DAY_S:.4g} days" if is_time else f"{spread:.6g}"
        table.add_row(
            name,
            known.kind,
            f"{known.nulls + known.nans:,}",
            f"{known.count:,}",
            mean,
            deviation,
            *(("" if known.words is None else f"{len(known.words):,}",) if counted else ()),
        )
    Console().print(table)
    for name, why in shared.left_out.items():
        say(f"{name}: {why}", err=True)


# Each verb imports its implementation: `geo-ray --help` must not load Arrow and PyTorch.


@click.group(short_help="Write and check training data: one set of shards per region.")
def data() -> None:
    """Write and check training data: one set of shards per region."""


for verb in (inspect, stats, merge_stats, shard):
    data.add_command(verb)


@data.command()
@click.argument("manifest_uri", metavar="MANIFEST")
@click.option("--region", help="Verify only this region's shards, from within the region.")
def check(manifest_uri: str, region: str | None) -> None:
    """Verify every shard of MANIFEST.

    The checks cover size, hash, schema and rows.
    """
    loading("pyarrow")
    from geo_ray.api.data import check_data
    from geo_ray.data.prepare.saved_preparation import label_words

    found = check_data(manifest_uri, region, progress=True)
    bad = frozenset(verdict.shard.path for verdict in found.bad)
    print_table(found.manifest, label_words(manifest_uri), region, bad)
    for verdict in found.bad:
        say(str(verdict.error), err=True)
    if found.bad and found.bad[0].error is not None:
        click.echo(f"{len(found.bad)} of {len(found.verdicts)} shards are bad.", err=True)
        raise click.exceptions.Exit(found.bad[0].error.exit_code)
    click.echo(f"All {len(found.verdicts)} shards are valid.")


@data.command()
@click.argument("manifests", nargs=-1, required=True)
@click.option("--out", required=True, metavar="FILE_OR_URI", help="Output manifest.")
def merge(manifests: tuple[str, ...], out: str) -> None:
    """Merge several MANIFESTS into one.

    Each was written separately, in its region.
    """
    loading("pyarrow")
    from geo_ray.api.data import merge_data
    from geo_ray.data.prepare.saved_preparation import label_words

    print_table(merge_data(manifests, out).manifest, label_words(out))
    click.echo(f"Manifest: {out}")
