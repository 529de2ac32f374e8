"""`geo-ray status`: shows the state of a run or cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.cloud.cluster.status import ClusterReport


@click.command("status", short_help="Show the state of RUN or CLUSTER.")
@click.argument("run_dir", metavar="RUN|CLUSTER", type=RunReference())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.option("--follow", is_flag=True, help="Repeat until the run is no longer active.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="With --follow: seconds between two outputs.",
)
def status(run_dir: RunRef, as_json: bool, follow: bool, every_s: float) -> None:
    """Show the state of RUN and whether its run actor is alive, or the state of CLUSTER.

    The command only reads RUN, so it works on any machine that can read its directory. CLUSTER is
    the directory that `geo-ray up` printed, or the CONFIG of the cluster; its machines are
    requested from its cloud.
    """
    from geo_ray.cloud.cluster.state import names_cluster

    if names_cluster(run_dir):
        click.echo(f"looking up {run_dir}", err=True)
        _show_cluster(run_dir, every_s if follow else None, as_json=as_json)
        return
    run_directory(click.get_current_context(), click.Argument(["run_dir"]), run_dir)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    import geo_ray
    from geo_ray.api.status import follow_status
    from geo_ray.telemetry.status import status_lines

    found = follow_status(run_dir, every_s) if follow else (geo_ray.status(run_dir),)
    if as_json:
        for each in found:
            say_json(each.model_dump_json(indent=None if follow else 2))
        return
    console = Console()
    width = console.width if console.is_terminal else None
    if not (follow and console.is_terminal):
        for each in found:
            click.echo("\n".join(status_lines(each, width)))
        return
    with Live(auto_refresh=False) as live:
        for each in found:
            live.update(Text("\n".join(status_lines(each, width))), refresh=True)


def _show_cluster(cluster: RunRef, every_s: float | None, *, as_json: bool) -> None:
    from geo_ray.cli.cluster_tables import (
        decision_lines,
        machines_table,
        report_lines,
        wide_console,
    )

    console = wide_console()
    for report in _reports(cluster, every_s):
        if as_json:
            say_json(report.model_dump_json(indent=2 if every_s is None else None))
            continue
        console.print(machines_table(report))
        for line in (*report_lines(report), *decision_lines(report)):
            say(line)


def _reports(cluster: RunRef, every_s: float | None) -> Iterator[ClusterReport]:
    from geo_ray.api.clusters import cluster_status

    while True:
        report = cluster_status(cluster)
        yield report
        if every_s is None or report.phase == "down":
            return
        time.sleep(every_s)
