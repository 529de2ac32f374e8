"""`geo-ray probe`: measure the links between two hosts, or between all regions of a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from geo_ray.transport.links.record import LinkRecord
    from geo_ray.transport.probe.plan import ProbePlan

_CONFIGS = (".yaml", ".yml")


@click.command()
@click.argument("target", required=False, metavar="[HOST:PORT | CONFIG.yaml]")
@click.option("--listen", is_flag=True, help="Be the other end; needs no TARGET.")
@click.option(
    "--bind",
    default="0.0.0.0:8476",
    show_default=True,
    metavar="HOST:PORT",
    help="With --listen: TCP and UDP port; port 0 takes a free one.",
)
@click.option("--once", is_flag=True, help="With --listen: end after one probe.")
@click.option("--region", help="Name of this end in the table.  [default: the host's name]")
@click.option(
    "--certs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Use TLS: directory with `regions/NAME/` of this end, as `geo-ray certs issue` writes it.",
)
@click.option("--peer", help="With --certs: region of the listening end.")
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True, max=600),
    default=5.0,
    show_default=True,
    help="Seconds of transfer that count, per direction.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@click.option("--no-udp", is_flag=True, help="Leave loss out; it is counted with UDP packets.")
@click.option("--disjoint", is_flag=True, help="With CONFIG: pairs of different regions at once.")
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="With CONFIG.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("links.json"),
    show_default=True,
    help="Link table; of one that exists only the pairs that were measured are replaced.",
)
def probe(
    target: str | None,
    listen: bool,
    bind: str,
    once: bool,
    region: str | None,
    certs: Path | None,
    peer: str | None,
    duration_s: float,
    timeout_s: float,
    no_udp: bool,
    disjoint: bool,
    overrides: tuple[str, ...],
    out: Path,
) -> None:
    """Measure goodput, round trips and loss, and write them as a link table.

    On one host `geo-ray probe --listen`, on the other `geo-ray probe HOST:PORT` with the key that
    the first one shows (or the same GEO_RAY_PROBE_KEY, or --certs, on both). With a CONFIG: a
    probe in each of its regions, and every pair in turn.
    """
    from geo_ray.transport.probe.plan import ProbePlan

    if listen == (target is not None):
        raise click.UsageError("give a TARGET, or --listen")
    plan = ProbePlan(
        duration_s=duration_s, timeout_s=timeout_s, udp_s=0.0 if no_udp else ProbePlan().udp_s
    )
    if target is not None and Path(target).suffix in _CONFIGS:
        _keep(_probe_cluster(Path(target), overrides, plan, disjoint=disjoint), out)
        return
    from geo_ray.cli.probe_hosts import ProbeSide, measure, serve

    if target is None:
        serve(bind, ProbeSide(region, certs, peer), once=once)
    else:
        _keep(measure(target, ProbeSide(region, certs, peer), plan), out)


def _probe_cluster(
    config: Path, overrides: tuple[str, ...], plan: ProbePlan, *, disjoint: bool
) -> list[LinkRecord]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from geo_ray.cli.tables.probe import describe
    from geo_ray.config.experiment import Experiment
    from geo_ray.config.load import load_tree
    from geo_ray.runtime.control.probe import ProbeStatus, probe_cluster

    experiment = load_tree(config, overrides, Experiment)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("preparing", total=None)

        def on_status(status: ProbeStatus) -> None:
            lines = "\n".join(describe(*pair, now) for pair, now in status.now)
            progress.update(
                bar, description=lines or "next", completed=status.done, total=status.total
            )

        outcome = probe_cluster(
            experiment,
            plan,
            on_status,
            lambda phase: progress.update(bar, description=phase),
            disjoint=disjoint,
        )
    for (src, dst), error in outcome.failures.items():
        click.secho(f"{src} -> {dst} was not measured: {error}", fg="red", err=True)
    return list(outcome.table.links)


def _keep(records: list[LinkRecord], out: Path) -> None:
    from geo_ray.cli.tables.probe import print_links
    from geo_ray.transport.links.table import LinkTable, load_links, save_links

    print_links(records)
    table = load_links(out) if out.exists() else LinkTable()
    table = table.with_records(records)
    save_links(table, out)
    holes = [f"{src} -> {dst}" for src, dst in table.holes()]
    click.echo(f"links    {out}" + (f", without {', '.join(holes)}" if holes else ""))
    old_s = time.time() - min((r.measured_at_unix_s for r in table.links), default=time.time())
    if old_s > 7 * 86400:
        click.echo(f"         its oldest record is {old_s / 86400:.0f} days old")
