"""`geo-ray schedule`: replay a job history on a shared cluster under several policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD

from geo_ray.base.tables import FittedTable
from geo_ray.cli.say import say_json
from geo_ray.scheduler.replay import HEADINGS, ScheduleOutcome, cells


def outcome_table(outcomes: Mapping[str, ScheduleOutcome]) -> FittedTable:
    """A line per policy."""
    table = FittedTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for name, outcome in outcomes.items():
        table.add_row(*cells(name, outcome))
    return table


_POLICIES = "pd_ors,oasis,fifo,drf,dorm,optimus,tiresias,ones,pollux"


@click.command(short_help="Replay a trace of jobs under several policies.")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--generate", is_flag=True, help="Make jobs up instead, with the papers' ranges.")
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
    help="Names, separated by commas.",
)
@click.option(
    "--machines",
    default=50,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Of the cluster, in all regions together.",
)
@click.option(
    "--jobs",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="That come; of TRACE the first ones.",
)
@click.option(
    "--slots",
    default=20,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Of the history; jobs that have not ended by then did not end.",
)
@click.option(
    "--slot-s",
    default=1200.0,
    show_default=True,
    type=click.FloatRange(min=1.0),
    help="Seconds of a slot; policies decide once in each.",
)
@click.option(
    "--regions",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="That machines and data are in.",
)
@click.option(
    "--spot",
    "spot_fraction",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the machines that are of the spot market, and come and go.",
)
@click.option(
    "--machine",
    metavar="CLOUD:TYPE",
    help="Its prices, from your files and the shipped ones, instead of made-up ones; with --at.",
)
@click.option("--at", metavar="LIST", help="Regions of that cloud, separated by commas.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Of all that is drawn: jobs, regions, prices, spot machines.",
)
@click.option("--bound", is_flag=True, help="Also what no policy can exceed.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON, and nothing else.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page, too.")
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
    """Replay the jobs of TRACE on a made-up cluster, under each policy of a list.

    Nothing is started: seconds, utility and USD are those of the model of
    docs/reference/scheduling-policies.md.
    """
    if (trace is None) != generate:
        raise click.UsageError("name a TRACE, or --generate jobs")
    if (machine is None) != (at is None):
        raise click.UsageError("--machine and --at go together")
    names = [part.strip() for part in policies.split(",") if part.strip()]
    what = f"{jobs} made-up jobs" if trace is None else f"the jobs of {trace}"
    then = ", then looking for what no policy can exceed" if bound else ""
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
            console = Console(width=200)  # a line stays a line for who reads it with grep
        console.print(outcome_table(result.outcomes))
        if result.bound is not None:
            console.print(
                f"no policy can have more than {result.bound:.4g}; a schedule that knows all jobs "
                f"ahead has {ahead:.4g}",
                highlight=False,
            )
    if page is not None:
        result.save(page)
        click.echo(f"page     {page}", err=as_json)
