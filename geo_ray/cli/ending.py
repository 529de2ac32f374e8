"""Output at the end of a run, or of its check: tables, and the paths of files."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from rich.console import Console

from geo_ray.api.check import check_lines, check_run, needs_table
from geo_ray.api.run import Run
from geo_ray.api.train import short_path
from geo_ray.cli.say import say
from geo_ray.telemetry.summary import cost_line, final_table, load_cost


def show_end(run: Run) -> None:
    """Print the final table and the paths of report and model."""
    Console().print(final_table(run.summary, run.record.totals))
    cost = load_cost(run.path)
    if cost is not None:
        say(f"plan     {cost_line(cost)}")
    if run.directory.address is not None:
        address = quote(run.directory.address)
        say(f"run      {address}")
    say(f"report   {short_path(run.report_path)}")
    if run.model_path.exists():
        say(f"model    {short_path(run.model_path)}")
    if run.summary.best is not None:
        say(f"best     {short_path(run.best_path)} ({run.summary.best.text})")


def show_detached(run: Run) -> None:
    """Print the commands for a run that continues without this terminal."""
    path = short_path(run.path)
    for does, verb in (("watch it", "train --resume"), ("look", "status"), ("stop it", "stop")):
        say(f"{does:<9}geo-ray {verb} {path}")


def show_check(config: Path, overrides: tuple[str, ...], plan_file: Path | None = None) -> None:
    """Check a run that is not started, and print the resources that it needs.

    Raises:
        GeoRayError: the run could not start.
    """
    found = check_run(config, overrides, plan=plan_file, progress=True)
    Console().print(needs_table(found))
    for line in check_lines(found.experiment):
        say(line)
    kind = found.experiment.cluster.kind
    where = "a local cluster would be started" if kind == "local" else "the cluster was not queried"
    say(f"{found.size}; nothing was started, {where}")
