"""What all benchmarks share: their options, the record they leave, and the table they print."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number.

    Attributes:
        name: stable once published.
        value: the number, usually the median of ``runs``; None if it could not be had.
        unit: its unit; ``ratio`` for a quotient.
        target: what was asked, such as ``>= 0.9``; None if nothing was.
        baseline: the number that it is compared with, in the same unit (for a ratio: the
            denominator in its own unit); None without one.
        runs: the single measurements.
    """

    name: str
    value: float | None
    unit: str
    target: str | None = None
    baseline: float | None = None
    runs: Sequence[float] = ()

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        sense, bound = self.target.split()
        if self.value is None:
            return False
        return self.value >= float(bound) if sense == ">=" else self.value <= float(bound)


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``[--quick] --out FILE``.

    Args:
        description: shown by ``--help``, usually the module's docstring.
        arguments: None takes those of the process.
    """
    return parser(description).parse_args(arguments)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The parser behind `parse`, for a benchmark that has an option of its own."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a smoke check, under 3 minutes")
    made.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    return made


def say(text: str) -> None:
    """Show progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def median(name: str, runs: Iterable[float], unit: str, target: str | None = None) -> Figure:
    """A figure that is the median of its runs."""
    values = [float(value) for value in runs]
    return Figure(name, statistics.median(values) if values else None, unit, target, None, values)


def ratio(
    name: str, runs: Sequence[float], baselines: Sequence[float], target: str | None = None
) -> Figure:
    """The median over pairs of ``run / baseline``; each pair was measured side by side."""
    ratios = [run / baseline for run, baseline in zip(runs, baselines, strict=True)]
    value = statistics.median(ratios) if ratios else None
    return Figure(
        name, value, "ratio", target, statistics.median(baselines) if baselines else None, ratios
    )


def hardware() -> dict[str, object]:
    """The machine in words and numbers, without names of hosts or paths."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def record(
    benchmark: str,
    machine: dict[str, object],
    figures: Sequence[Figure],
    command: str = "",
    lab_runs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, object]:
    """The content of a result file.

    Args:
        benchmark: its name.
        machine: `hardware`, taken before measuring so that the load is not the benchmark's own.
        figures: what was measured.
        command: None takes the one of this process.
        lab_runs: all runs in the WAN lab, rejected ones included.
    """
    content: dict[str, object] = {
        "benchmark": benchmark,
        "command": command or _command(),
        "hardware": machine,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "figures": [_rounded(figure) for figure in figures],
    }
    return content | {"lab_runs": list(lab_runs)} if lab_runs else content


def finish(
    benchmark: str,
    machine: dict[str, object],
    figures: Sequence[Figure],
    out: Path,
    lab_runs: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the result file and print the table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps(record(benchmark, machine, figures, "", lab_runs), indent=1) + "\n", "utf-8"
    )
    Console(stderr=True).print(table(benchmark, figures))


def table(benchmark: str, figures: Sequence[Figure]) -> Table:
    """Figures against their targets."""
    shown = Table(title=benchmark, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("figure", "value", "unit", "target", ""):
        shown.add_column(heading, justify="right" if heading == "value" else "left")
    for figure in figures:
        verdict = {None: "", True: "met", False: "[red]missed"}[figure.met]
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        shown.add_row(figure.name, value, figure.unit, figure.target or "", verdict)
    return shown


def _rounded(figure: Figure) -> dict[str, object]:
    plain = asdict(figure)
    plain["value"] = _short(figure.value)
    plain["baseline"] = _short(figure.baseline)
    plain["runs"] = [_short(value) for value in figure.runs]
    return plain


def _short(value: float | None) -> float | None:
    """Six digits; what is not finite has no number in JSON."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _command() -> str:
    script, *arguments = sys.argv
    topic, name = Path(script).parts[-2:]
    names = [a if a.startswith("-") else Path(a).name for a in arguments]
    return " ".join(["python", "-m", f"benchmarks.{topic}.{Path(name).stem}", *names])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
