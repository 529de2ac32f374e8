"""`geo-ray probe`: measures the links between two hosts, or between all regions of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from geo_ray.base.tables import FittedTable
from geo_ray.base.text import printable
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say
from geo_ray.transport.links import LinkRecord

if TYPE_CHECKING:
    from geo_ray.api.probe import ProbeResult
    from geo_ray.transport.probe.hosts import ProbeAddress, ProbeSide


def print_links(records: Iterable[LinkRecord]) -> None:
    """Print one line per direction."""
    table = FittedTable(caption="spread is the median absolute deviation; ms are p50 / p99")
    table.add_column("from", no_wrap=True)
    table.add_column("to", no_wrap=True)
    for heading in ("Mbit/s", "spread", "RTT ms", "loaded ms", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.src,
            record.dst,
            _number(record.goodput_mbps),
            _number(record.goodput_mad_mbps),
            _pair_ms(record.rtt_s, record.rtt_p99_s),
            _pair_ms(record.rtt_loaded_s, record.rtt_loaded_p99_s),
            "-" if record.loss is None else f"{record.loss:.2%}",
        )
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pair_ms(middle_s: float | None, high_s: float | None) -> str:
    if middle_s is None:
        return "-"
    high = "-" if high_s is None else _number(high_s * 1e3)
    return f"{_number(middle_s * 1e3)} / {high}"


_CONFIGS = (".yaml", ".yml")


@click.command(short_help="Measure goodput, round trips and loss of links.")
@click.argument("target", required=False, metavar="[HOST:PORT | CONFIG.yaml]")
@click.option("--listen", is_flag=True, help="Listen for a probe; needs no TARGET.")
@click.option(
    "--bind",
    default="0.0.0.0:8476",
    show_default=True,
    metavar="HOST:PORT",
    help="With --listen: TCP and UDP port; 0 selects a free port.",
)
@click.option("--once", is_flag=True, help="With --listen: exit after one probe.")
@click.option("--region", help="Name of this host in the table.  [default: host name]")
@click.option(
    "--certs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Use TLS: directory with this region's `regions/NAME/`, as written by `geo-ray certs "
    "issue`.",
)
@click.option("--peer", help="With --certs: region of the listening host.")
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True, max=600),
    default=5.0,
    show_default=True,
    help="Measured seconds of transfer per direction.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=60.0,
    show_default=True,
    help="Timeout for an answer, in seconds.",
)
@click.option("--no-udp", is_flag=True, help="Do not measure loss, which uses UDP packets.")
@click.option(
    "--disjoint", is_flag=True, help="With CONFIG: probe disjoint pairs of regions in parallel."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="With CONFIG.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("links.json"),
    show_default=True,
    help="Link table to write; in an existing table only the measured pairs are replaced.",
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

    Two hosts: run `geo-ray probe --listen` on one, and `geo-ray probe HOST:PORT` on the other with
    the key that the first one prints (or the same GEO_RAY_PROBE_KEY, or --certs, on both). CONFIG:
    start a probe in each of its regions, and measure every pair in turn.
    """
    loading("torch", "ray", "geo_ray.api.probe")
    import geo_ray
    import geo_ray.api.probe
    from geo_ray.api.probe import probe_host, serve_probes
    from geo_ray.transport.probe.hosts import ProbeSide
    from geo_ray.transport.probe.plan import ProbePlan

    if listen == (target is not None):
        raise click.UsageError("give a TARGET, or --listen")
    how = ProbePlan(
        duration_s=duration_s,
        timeout_s=timeout_s,
        udp_s=0.0 if no_udp else ProbePlan().udp_s,
    )
    side = ProbeSide(region, certs, peer)
    if target is None:
        serve_probes(
            bind,
            side,
            once=once,
            on_listening=partial(_print_other_end, side),
            on_served=_print_served,
        )
    elif Path(target).suffix in _CONFIGS:
        found = geo_ray.api.probe.probe(
            target, overrides, how=how, disjoint=disjoint, progress=True
        )
        for (src, dst), error in found.failures.items():
            click.secho(printable(f"{src} -> {dst} was not measured: {error}"), fg="red", err=True)
        _keep(found, out)
    else:
        _keep(probe_host(target, _with_key(side), how=how, progress=True), out)


def _print_other_end(side: ProbeSide, at: ProbeAddress) -> None:
    click.echo(f"listening on {at.host} port {at.port} (TCP and UDP); on the other host run")
    names = f" --certs DIR --region NAME --peer {side.name}" if side.certs else ""
    click.echo(f"    geo-ray probe ADDRESS_OF_THIS_HOST:{at.port}{names}")
    if at.key:
        click.echo(f"and enter the key {at.key}")


def _print_served(count: int) -> None:
    click.echo(f"served {count}")


def _with_key(side: ProbeSide) -> ProbeSide:
    if side.certs is not None or side.shared_key:
        return side
    return replace(side, key=click.prompt("key", hide_input=True, err=True))


def _keep(found: ProbeResult, out: Path) -> None:
    from geo_ray.transport.links import load_links

    print_links(found.links.links)
    table = load_links(found.save(out))
    holes = [f"{src} -> {dst}" for src, dst in table.holes()]
    say(f"links    {out}" + (f", without {', '.join(holes)}" if holes else ""))
    old_s = time.time() - min((r.measured_at_unix_s for r in table.links), default=time.time())
    if old_s > 7 * 86400:
        click.echo(f"         its oldest record is {old_s / 86400:.0f} days old")
