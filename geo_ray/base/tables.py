"""Tables for terminals: `FittedTable` omits columns rather than truncating numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Column, Table
from rich.text import Text

from geo_ray.base.text import printable

_LEAST_TEXT: Final = 12  # minimum width to which a column of words shrinks


class FittedTable(Table):
    """A table that fits the console: words are wrapped or shortened, numbers never are.

    Right-aligned columns hold numbers. If not all columns fit, some are omitted, and a line below
    the table names them. Strings are shown literally: markup and emoji codes have no meaning, and
    terminal control characters are escaped. A colored cell is a `Text`.

    Args:
        headings: headings of left-aligned columns, as for `rich.table.Table`.
        leave_out: headings of columns to omit first, in this order; then the last column, but never
            the first.
        whole: headings of columns of words that are not shortened.
        named: whether to name the omitted columns.
        options: as for `rich.table.Table`.
    """

    def __init__(
        self,
        *headings: str,
        leave_out: Sequence[str] = (),
        whole: Collection[str] = (),
        named: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*headings, **options)
        self._leave_out = leave_out
        self._whole = whole
        self._named = named

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit."""
        columns = [_plain_column(column) for column in self.columns]
        out: list[str] = []
        widths = [self._widest(column, console, options) for column in columns]
        while len(columns) > 1 and self._over([*map(self._least, columns, widths)], options) > 0:
            place = self._next(columns)
            out.append(str(columns.pop(place).header))
            del widths[place]
        while (over := self._over(widths, options)) > 0:
            spare = [w - self._least(c, w) for c, w in zip(columns, widths, strict=True)]
            place = spare.index(max(spare))
            if spare[place] <= 0:
                break  # the first column alone is too wide
            widths[place] -= min(over, spare[place])
        for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
            column._index, column.max_width = index, width
        fitted = copy(self)
        fitted.columns = columns
        fitted.title = _plain(self.title, self.title_style or "table.title")
        fitted.caption = _plain(self.caption, self.caption_style or "table.caption")
        yield from Table.__rich_console__(fitted, console, options)
        if out and self._named:
            names = ", ".join(name or "remarks" for name in out)
            yield console.render_str(f"columns not shown: {names}", markup=False)

    def _is_whole(self, column: Column) -> bool:
        return column.justify == "right" or str(column.header) in self._whole

    def _widest(self, column: Column, console: Console, options: ConsoleOptions) -> int:
        """Return the width of a column without its padding."""
        cells = [column.header, *column.cells]
        return max(Measurement.get(console, options, cell).maximum for cell in cells)

    def _least(self, column: Column, widest: int) -> int:
        return widest if self._is_whole(column) else min(widest, _LEAST_TEXT)

    def _over(self, widths: Sequence[int], options: ConsoleOptions) -> int:
        """Return the excess width of columns of these widths."""
        _, right, _, left = self.padding
        between = max(left, right) if self.collapse_padding else left + right
        width = sum(widths) + between * len(widths) - (0 if self.pad_edge else left + right)
        if self.box is not None:
            width += len(widths) - 1 + 2 * self.show_edge
        return width - options.max_width

    def _next(self, columns: Sequence[Column]) -> int:
        """Return the index of the column to omit next."""
        names = [str(column.header) for column in columns]
        wanted = [name for name in self._leave_out if name in names[1:]]
        return names.index(wanted[0], 1) if wanted else len(columns) - 1


def _plain_column(column: Column) -> Column:
    """Return a copy of a column."""
    return replace(
        column,
        header=_plain(column.header),
        _cells=[_plain(cell) for cell in column.cells],
    )


def _plain(cell: Any, style: StyleType = "") -> Any:
    if isinstance(cell, str):
        return Text(printable(cell), style)
    if isinstance(cell, Text) and printable(cell.plain) != cell.plain:
        return Text(printable(cell.plain), cell.style)
    return cell
