"""What a run prints at its end: one table, and where its files are."""

from __future__ import annotations

from shlex import quote

from rich.console import Console

from geo_ray.api.run import Run
from geo_ray.api.training import short_path
from geo_ray.observe.metrics.cost import cost_line, load_cost
from geo_ray.observe.metrics.summary import final_table


def show_end(run: Run) -> None:
    """Print the final table and the paths of report and model."""
    console = Console()
    console.print(final_table(run.summary, run.record.totals))
    cost = load_cost(run.path)
    if cost is not None:
        console.print(f"plan     {cost_line(cost)}", highlight=False, soft_wrap=True)
    if run.directory.address is not None:
        address = quote(run.directory.address)
        console.print(f"run      {address}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"report   {short_path(run.report_path)}", highlight=False, soft_wrap=True)
    if run.model_path.exists():
        console.print(f"model    {short_path(run.model_path)}", highlight=False, soft_wrap=True)
    if run.summary.best is not None:
        line = f"best     {short_path(run.best_path)} ({run.summary.best.text})"
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def show_detached(run: Run) -> None:
    """Say how to get at a run that goes on without this terminal."""
    path = short_path(run.path)
    console = Console()
    for does, verb in (("watch it", "train --resume"), ("look", "status"), ("stop it", "stop")):
        console.print(f"{does:<9}geo-ray {verb} {path}", highlight=False, soft_wrap=True)
