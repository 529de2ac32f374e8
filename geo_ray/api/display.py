"""Tables of plain values that print and convert to Arrow, pandas and polars, and progress bars."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, overload

from rich import progress as rich_progress
from rich.console import Console

from geo_ray.base.notebooks import html_view
from geo_ray.base.output import outliving
from geo_ray.base.text import printable
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.progress import Progress

if TYPE_CHECKING:
    from geo_ray.experiment.experiment import Experiment

_WIDTH: Final = 80
_MOST_ROWS: Final = 20
_LEAST_CELL: Final = 20
_GAP: Final = "  "


class Table:
    """An immutable table; a value is an int, a float, a string or None.

    ``print(table)`` shows at most 20 rows in 80 columns; a notebook shows all rows. `to_pylist`
    returns the rows as dictionaries, `to_arrow` and `to_pandas` convert them. Libraries with
    Arrow's C stream interface, such as polars and duckdb, accept a table directly.

    Args:
        rows: values by column.
        kinds: int, float or str by column; required if a column may contain only nulls, or if
            there may be no rows. Default: derived from the rows.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, type] | None = None
    ) -> None:
        names = kinds or dict.fromkeys(name for row in rows for name in row)
        self._names = tuple(names)
        self._kinds = kinds
        self._rows = tuple({name: row.get(name) for name in self._names} for row in rows)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._names)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries by column."""
        return [dict(row) for row in self._rows]

    def to_arrow(self) -> Any:
        """Return the table as a ``pyarrow.Table``."""
        import pyarrow as pa

        if self._kinds is None:
            return pa.Table.from_pylist(self.to_pylist())
        types = {int: pa.int64(), float: pa.float64(), str: pa.string()}
        schema = pa.schema([pa.field(name, types[kind]) for name, kind in self._kinds.items()])
        return pa.Table.from_pylist(self.to_pylist(), schema=schema)

    def to_pandas(self) -> Any:
        """Return the table as a ``pandas.DataFrame``; requires pandas."""
        return self.to_arrow().to_pandas()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_pylist())

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | str) -> dict[str, Any] | list[Any]:
        """Return a row by its number, or the values of a column by its name."""
        if isinstance(key, int):
            return dict(self._rows[key])
        if key not in self._names:
            raise KeyError(f"no column {key!r}; the columns are {', '.join(self._names)}")
        return [row[key] for row in self._rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (self._names, self._rows) == (other._names, other._rows)

    def __hash__(self) -> int:
        return hash((self._names, len(self._rows)))

    def __repr__(self) -> str:
        shown = self._rows
        left_out = len(shown) - _MOST_ROWS
        if left_out > 0:
            half = _MOST_ROWS // 2
            shown = (*shown[:half], *shown[-half:])
        columns = [_Column(name, [row[name] for row in shown]) for name in self._names]
        hidden = _fit(columns)
        lines = [_GAP.join(column.heading() for column in columns).rstrip()]
        lines += [
            _GAP.join(column.cell(i) for column in columns).rstrip() for i in range(len(shown))
        ]
        if left_out > 0:
            lines.insert(1 + _MOST_ROWS // 2, f"... {left_out:,} more rows ...")
        if hidden:
            lines += textwrap.wrap(f"(also the columns {', '.join(hidden)})", _WIDTH)
        if not self._rows:
            lines.append("(no rows)")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [[_text(row[name]) for name in self._names] for row in self._rows]
        return html_view(f"{len(rows):,} row{'' if len(rows) == 1 else 's'}", self._names, rows)


class _Column:
    """A column as text."""

    def __init__(self, name: str, values: Sequence[object]) -> None:
        self.name = printable(name)
        self._cells = [_text(value) for value in values]
        numbers = [value for value in values if value is not None]
        self._is_right = bool(numbers) and all(isinstance(v, (int, float)) for v in numbers)
        self.width = max(map(len, (self.name, *self._cells)))
        self.is_empty = all(v is None or v != v for v in values)  # NaN differs from itself
        # Numbers and names are never truncated, because that would change them.
        longest = max(map(len, self._cells), default=0) if self._is_right else 0
        self.least = min(self.width, max(longest, len(self.name), _LEAST_CELL))

    @property
    def slack(self) -> int:
        return self.width - self.least

    def heading(self) -> str:
        return self._placed(self.name)

    def cell(self, row: int) -> str:
        return self._placed(self._cells[row])

    def _placed(self, text: str) -> str:
        if len(text) > self.width:
            text = text[: self.width - 1] + "…"
        return text.rjust(self.width) if self._is_right else text.ljust(self.width)


def _fit(columns: list[_Column]) -> list[str]:
    """Narrow the widest columns until a line fits, and remove columns if necessary.

    Columns without values are removed first, then the last ones.

    Returns:
        Names of the removed columns, in order.
    """
    names = [each.name for each in columns]
    while columns:
        over = sum(each.width for each in columns) + len(_GAP) * (len(columns) - 1) - _WIDTH
        if over <= 0:
            break
        widest = max(columns, key=attrgetter("slack"))
        if widest.width > widest.least:
            widest.width = max(widest.least, widest.width - over)
        elif len(columns) > 1:
            columns.remove(next((c for c in reversed(columns) if c.is_empty), columns[-1]))
        else:
            break
    left = {each.name for each in columns}
    return [name for name in names if name not in left]


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    return printable(" ".join(str(value).split()))


_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 10.0

Advance: TypeAlias = Callable[[float], None]
"""Callback that advances the progress by an amount."""


@contextmanager
def progress_bar(
    title: str, total: float, unit: str, shown: ShowProgress = True
) -> Iterator[Advance]:
    """Show progress while the block runs.

    Args:
        title: description of the work.
        total: amount of work.
        unit: unit of the amount.
        shown: as for `geo_ray.train`.
    """
    console = console_of_progress()
    if not shown:
        yield _ignore_amount
    elif shown == "plain" or not console.is_terminal:
        yield _Lines(title, total, unit)
    else:
        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            rich_progress.TextColumn("{task.completed:,.0f} " + unit),
            rich_progress.TimeRemainingColumn(),
        )
        with rich_progress.Progress(*columns, console=console) as progress:
            bar = progress.add_task(title, total=total)
            yield lambda amount: progress.update(bar, advance=amount)


@contextmanager
def reading_files(files: int, shown: ShowProgress) -> Iterator[Callable[[float, int], None]]:
    """Show progress while files are read; yields a callback for (files read, rows)."""
    done = 0.0
    with progress_bar("Reading files", files, "files", shown) as advance:

        def on_read(files_done: float, rows: int) -> None:
            nonlocal done
            advance(max(0.0, files_done - done))
            done = max(done, files_done)

        yield on_read
        advance(files - done)


class _Lines:
    """Progress in lines; prints nothing for fast work."""

    def __init__(self, title: str, total: float, unit: str) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._next_s = time.monotonic() + _FIRST_LINE_S

    def __call__(self, amount: float) -> None:
        self._done += amount
        if time.monotonic() >= self._next_s:
            fraction = self._done / self._total if self._total else 1.0
            of_all = f" of {self._total:,.0f} {self._unit}" if self._total > 1 else ""
            RunWatch(progress=True).notify(f"{self._title}: {fraction:.0%}{of_all}")
            self._next_s = time.monotonic() + _LINE_EVERY_S


def _ignore_amount(amount: float) -> None:
    pass


class OnEvent(Protocol):
    """Callback for every event of a run."""

    def __call__(self, event: Event, /) -> None:
        """Process an event; an exception ends the run."""


ShowProgress: TypeAlias = bool | Literal["plain"]
"""True: live display on standard error; "plain": in lines; False: no display."""


class Watched(RunObserver):
    """Receives the progress of a run and shows nothing; `_Shown` shows it.

    Args:
        on_event: called with a copy of every event.
        note: text shown when the run begins.
    """

    def __init__(self, on_event: OnEvent | None = None, note: str = "") -> None:
        self._on_event, self._note = on_event, note

    def on_event(self, event: Event) -> None:
        """See `RunObserver`."""
        if event.kind == "run_started":
            for line in self._note.splitlines():
                self.note(line)
        self.show(event)
        if self._on_event is not None:
            self._on_event(replace(event, fields=deepcopy(dict(event.fields))))

    def show(self, event: Event) -> None:
        """Show an event."""

    def note(self, text: str) -> None:
        """Show a line that stays visible."""


class _Shown(Watched):
    """Shows a run as a live table or in lines."""

    def __init__(self, shown: Progress, on_event: OnEvent | None, note: str) -> None:
        super().__init__(on_event, note)
        self._shown = shown

    def status(self, text: str) -> None:
        self._shown.status(text)

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        self._shown.awaiting(phase, done, total, names)

    def show(self, event: Event) -> None:
        self._shown.feed(event)

    def note(self, text: str) -> None:
        self._shown.note(text)


@dataclass(frozen=True, slots=True)
class RunWatch:
    """Display options of the caller.

    Attributes:
        progress: whether to show the run.
        on_event: called with a copy of every event in the caller's thread; an exception ends the
            run.
    """

    progress: ShowProgress = False
    on_event: OnEvent | None = None

    def notify(self, text: str) -> None:
        """Print a line, if progress is shown."""
        if self.progress:
            console_of_progress().print(
                printable(text), highlight=False, markup=False, soft_wrap=True
            )

    @property
    def observer(self) -> RunObserver:
        """Observer for several runs: shows phases in lines, and no events."""
        return _PhaseLines(self)

    @contextmanager
    def over(self, experiment: Experiment, note: str = "") -> Iterator[Watched]:
        """Show one run of ``experiment``, with a note when it begins."""
        if not self.progress:
            yield Watched(self.on_event, note)
            return
        train = experiment.train
        most = 1 if train.mode == "sync" else max(r.workers for r in experiment.regions)
        plain = True if self.progress == "plain" else None
        console = console_of_progress()
        with Progress(train.steps * most, experiment.present_names, console, plain) as shown:
            yield _Shown(shown, self.on_event, note)
            shown.status("")


class _PhaseLines(Watched):
    """Shows phases in lines."""

    def __init__(self, watch: RunWatch) -> None:
        super().__init__(watch.on_event)
        self._watch = watch

    def status(self, text: str) -> None:
        self._watch.notify(text)


def console_of_progress() -> Console:
    """Return the console on standard error; closing the stream ends nothing else."""
    return Console(file=outliving(sys.stderr))
