"""What a run prints at its end: one table, and where its files are."""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console

from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.errors import GeoRayError
from geo_ray.observe.events.log import EVENTS_FILE
from geo_ray.observe.metrics.cost import cost_line, load_cost
from geo_ray.observe.metrics.summary import Summary, final_table
from geo_ray.observe.report.report import load_record, write_report


def show_end(summary: Summary, run_dir: Path) -> None:
    """Write the report and print the final table."""
    run = load_record(run_dir)
    report = write_report(run_dir, run=run)
    console = Console()
    console.print(final_table(summary, run.totals))
    cost = load_cost(run_dir)
    if cost is not None:
        console.print(f"plan     {cost_line(cost)}", highlight=False, soft_wrap=True)
    console.print(f"report   {_short(report)}", highlight=False, soft_wrap=True)
    model = run_dir / "model.safetensors"
    if model.exists():
        console.print(f"model    {_short(model)}", highlight=False, soft_wrap=True)


def name_run(error: GeoRayError, run_dir: Path) -> GeoRayError:
    """The same error with the run's directory in its advice, ready to be copied and typed.

    A run that has no checkpoint yet cannot be resumed: then the advice is to start again.
    """
    fix = error.fix
    if "--resume RUN" in fix and not CheckpointStore(run_dir / "checkpoints").ids():
        fix = fix.replace("--resume RUN --allow-drift", "CONFIG").replace("--resume RUN", "CONFIG")
        fix = fix.replace("Resume with", "Start again with")
        fix = fix.replace("; nothing committed is lost", "") + " No checkpoint was saved."
    resume = f"--resume {shlex.quote(str(_short(run_dir)))}"
    return type(error)(error.message, fix=fix.replace("--resume RUN", resume))


def show_failure(run_dir: Path) -> None:
    """Write the report of a run that an error has ended, if anything happened in it."""
    if not (run_dir / EVENTS_FILE).exists():
        return
    with suppress(GeoRayError):  # the run's own error matters more
        click.echo(f"report   {_short(write_report(run_dir))}", err=True)


def forget_unused(run_dir: Path) -> None:
    """Remove the directory of a new run in which nothing happened, so that its name is free."""
    if not any((run_dir / name).exists() for name in (EVENTS_FILE, "logs")):
        shutil.rmtree(run_dir, ignore_errors=True)


def _short(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
