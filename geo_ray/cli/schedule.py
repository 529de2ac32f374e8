"""`geo-ray schedule`: replays a job trace on a shared cluster under several policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD

from geo_ray.base.tables import FittedTable
from geo_ray.cli.say import say_json
from geo_ray.scheduler.replay import HEADINGS, ScheduleOutcome, cells


def outcome_table(outcomes: Mapping[str, ScheduleOutcome]) -> FittedTable:
    """Print a line per policy."""
    table = FittedTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for name, outcome in outcomes.items():
        table.add_row(*cells(name, outcome))
    return table


_POLICIES = "pd_ors,oasis,fifo,drf,dorm,optimus,tiresias,ones,pollux"


@click.command(short_help="Replay a job trace under several policies.")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--generate", is_flag=True, help="Generate jobs instead, with the ranges of the papers."
)
@click.option(
    "--format",
    "trace_format",
    type=click.Choice(["philly", "helios", "pai", "pollux"]),
    default="philly",
    show_default=True,
    help="Of TRACE.",
)
@click.option(
    "--policy",
    "policies",
    default=_POLICIES,
    show_default=True,
    metavar="LIST",
    help="Policies, comma-separated.",
)
@click.option(
    "--machines",
    default=50,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Total number of machines of the cluster.",
)
@click.option(
    "--jobs",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Number of jobs; the first ones of TRACE.",
)
@click.option(
    "--slots",
    default=20,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Number of slots; jobs that have not ended by then count as unfinished.",
)
@click.option(
    "--slot-s",
    default=1200.0,
    show_default=True,
    type=click.FloatRange(min=1.0),
    help="Seconds of a slot; policies decide once per slot.",
)
@click.option(
    "--regions",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Number of regions with machines and data.",
)
@click.option(
    "--spot",
    "spot_fraction",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Fraction of spot machines, which come and go.",
)
@click.option(
    "--machine",
    metavar="CLOUD:TYPE",
    help="Machine type with known prices, instead of generated prices; requires --at.",
)
@click.option("--at", metavar="LIST", help="Regions of its cloud, comma-separated.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Random seed of jobs, regions, prices and spot machines.",
)
@click.option("--bound", is_flag=True, help="Also compute an upper bound for all policies.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON only.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page.")
def schedule(
    trace: Path | None,
    generate: bool,
    trace_format: str,
    policies: str,
    machines: int,
    jobs: int,
    slots: int,
    slot_s: float,
    regions: int,
    spot_fraction: float,
    machine: str | None,
    at: str | None,
    seed: int,
    bound: bool,
    as_json: bool,
    page: Path | None,
) -> None:
    """Replay the jobs of TRACE on a generated cluster, under each policy of a list.

    Nothing is started: seconds, utility and USD come from the model in
    docs/reference/scheduling-policies.md.
    """
    if (trace is None) != generate:
        raise click.UsageError("give a TRACE, or --generate jobs")
    if (machine is None) != (at is None):
        raise click.UsageError("--machine and --at require each other")
    names = [part.strip() for part in policies.split(",") if part.strip()]
    what = f"{jobs} generated jobs" if trace is None else f"the jobs of {trace}"
    then = ", then computing the upper bound" if bound else ""
    click.echo(f"replaying {what} under {', '.join(names)}{then}", err=True)
    import json
    from dataclasses import asdict

    from rich.console import Console

    import geo_ray
    import geo_ray.api.schedule
    from geo_ray.scheduler.workload import LoadShape

    shape = LoadShape(machines, jobs, slots, regions, spot_fraction, slot_s)
    result = geo_ray.api.schedule.schedule(
        names,
        shape=shape,
        trace=trace,
        trace_format=trace_format,
        machine=machine,
        at=[part.strip() for part in (at or "").split(",") if part.strip()],
        seed=seed,
        bound=bound,
    )
    ahead = None if result.oracle is None else result.oracle.total_utility
    if as_json:
        numbers = {name: asdict(each) for name, each in result.outcomes.items()}
        found = {"bound": result.bound, "oracle": ahead, "policies": numbers}
        say_json(json.dumps(found, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=200)  # one line per record, for grep
        console.print(outcome_table(result.outcomes))
        if result.bound is not None:
            console.print(
                f"upper bound for all policies: {result.bound:.4g}; a schedule that knows all jobs "
                f"in advance reaches {ahead:.4g}",
                highlight=False,
            )
    if page is not None:
        result.save(page)
        click.echo(f"page     {page}", err=as_json)
