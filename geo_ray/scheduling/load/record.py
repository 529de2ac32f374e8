"""A job as a trace has it, whatever the trace's format."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.errors import TraceError

_MOST_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class TraceJob:
    """See the module's docstring.

    Attributes:
        id: its name.
        submit_s: when it came, from the trace's first job on or since 1970.
        duration_s: that it ran.
        workers: that it had.
        gpus: of each worker.
        cpus: of each worker; 0: not said.
        tenant: user or virtual cluster, by which its region is drawn.
        model: that it trains; empty: not said.
    """

    id: str
    submit_s: float
    duration_s: float
    workers: int
    gpus: float
    cpus: float = 0.0
    tenant: str = ""
    model: str = ""


def read_rows(
    path: Path, columns: Sequence[str], header: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines of a CSV file with their numbers.

    Args:
        path: the file.
        columns: that it must have.
        header: of a file without one.

    Raises:
        TraceError: it cannot be read, or has not these columns.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            raise TraceError(f"trace {path} is empty")
        if num_bytes > _MOST_BYTES:
            raise TraceError(f"trace {path} is larger than {_MOST_BYTES} bytes")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, fieldnames=header)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"trace {path} has no column {', '.join(missing)}")
            for number, row in enumerate(reader, 1 if header else 2):
                if None in row or None in row.values():
                    raise TraceError(f"trace {path}, line {number}: not as many fields as columns")
                yield number, row
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror or error}", fix="Name a file that can."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace {path} is no CSV file: {error}") from None


def number_in(path: Path, line: int, row: dict[str, str], column: str) -> float:
    """Return a number of a line, at least 0.

    Raises:
        TraceError: it is negative, or none.
    """
    try:
        value = float(row[column])
    except ValueError:
        raise TraceError(
            f"trace {path}, line {line}: {column} is no number: {row[column]!r}"
        ) from None
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"trace {path}, line {line}: {column} is {row[column]}, not 0 or more")
    return value
