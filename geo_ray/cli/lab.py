"""`geo-ray lab`: an emulated wide-area network on this machine."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD

from geo_ray.base.tables import FittedTable
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.teardown import is_alive
from geo_ray.lab.topology import CapConfig


def labs_table(records: Mapping[str, Mapping[str, Any]]) -> FittedTable:
    """Print all labs of this machine.

    Args:
        records: by lab id.
    """
    table = FittedTable("lab", "topology", "regions", "relay", "up for", box=SIMPLE_HEAD)
    for lab_id, record in records.items():
        alive = is_alive(record.get("relay"))
        minutes = (time.time() - float(record.get("began_unix_s", time.time()))) / 60
        table.add_row(
            lab_id,
            str(record.get("name", "?")),
            str(len(record.get("namespaces", []))),
            "up" if alive else "gone",
            f"{minutes:.0f} min",
        )
    return table


def regions_table(lab: Lab) -> FittedTable:
    """Print the regions of an active lab."""
    table = FittedTable("region", "address", "IPv6", "TCP", "up", "down", box=SIMPLE_HEAD)
    by_name = {region.name: region for region in lab.topology.regions}
    for name, address in lab.addresses.items():
        region = by_name[name]
        table.add_row(
            name,
            address,
            lab.addresses6.get(name, "-"),
            lab.congestion_control(name),
            _cap(region.up or lab.topology.up),
            _cap(region.down or lab.topology.down),
        )
    return table


def links_table(stats: LabStats) -> FittedTable:
    """Print the settings and counters of every link."""
    table = FittedTable(
        "from", "to", "Mbit/s", "delay", "loss", "packets", "lost", "dropped", "queue", "",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for (src, dst), link in stats.links.items():
        dropped = link.queue_drops + link.cap_drops + link.cut_drops + link.device_drops
        table.add_row(
            src,
            dst,
            "-" if link.rate_mbps is None else f"{link.rate_mbps:g}",
            f"{link.delay_s * 1e3:g} ms",
            f"{link.loss:.2%}" if link.loss else "0",
            str(link.in_packets),
            str(link.lost),
            str(dropped),
            f"{link.queue_bytes / 1e3:.0f} kB",
            "cut" if link.is_cut else "",
        )
    return table


def relay_line(stats: LabStats) -> str:
    """Return the relay's load, and whether it keeps up."""
    verdict = "in time"
    if stats.was_late:
        verdict = "LATE, measurements are not valid: " + "; ".join(stats.verdict.why)
    priority = "" if stats.realtime else ", without real-time priority"
    return (
        f"relay: {stats.cpu_fraction:.0%} of a core{priority}, {verdict} "
        f"(at most {stats.late_fraction:.2%} of a link's packets late); {stats.relay}"
    )


def _cap(config: CapConfig) -> str:
    if config.trace is not None:
        return f"{config.trace.kind} trace"
    return "-" if config.rate_mbps is None else f"{config.rate_mbps:g} Mbit/s"


_lab_option = click.option("--lab", "lab_id", metavar="ID", help="The lab, if several are up.")
_one_way = click.option("--one-way", is_flag=True, help="Only the direction from A to B.")


@click.group()
def lab() -> None:
    """Emulate regions as network namespaces joined by emulated links. Needs root."""


@lab.command()
@click.argument("topology")
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option("--detach", is_flag=True, help="Return and leave the lab up; `lab down` removes it.")
@click.option("--ray", is_flag=True, help="Start a Ray node in every region.")
@click.option("--cpus", default=4, show_default=True, help="Logical CPUs of each Ray node.")
def up(topology: str, overrides: tuple[str, ...], detach: bool, ray: bool, cpus: int) -> None:
    """Start the lab of TOPOLOGY: a YAML file, or the name of a preset.

    The lab stays up until Ctrl-C or `geo-ray lab down`.
    """
    from geo_ray.lab.lab import Lab
    from geo_ray.lab.topology import load_topology

    running = Lab(load_topology(topology, overrides), detached=detach)
    running.start()
    keep = False
    try:
        _show(regions_table(running))
        if ray:
            _start_ray(running, cpus)
        keep = detach
        if detach:
            click.echo(f"lab {running.lab_id} stays up; remove it with `geo-ray lab down`")
        else:
            click.echo(f"lab {running.lab_id} is up; Ctrl-C takes it down")
            running.wait()
            click.echo("the lab was taken down")
    except KeyboardInterrupt:
        click.echo("taking the lab down")
    finally:
        if not keep:
            running.close()


@lab.command()
def presets() -> None:
    """List the preset topologies."""
    from geo_ray.lab.topology import load_topology, preset_names

    for name in preset_names():
        topology = load_topology(name)
        click.echo(f"{name}: {len(topology.regions)} regions {', '.join(topology.region_names)}")


@lab.command()
@_lab_option
def status(lab_id: str | None) -> None:
    """Show the active labs, or the regions and links of one."""
    from geo_ray.lab import records
    from geo_ray.lab.lab import Lab

    found = records.labs()
    if not found:
        click.echo("no lab is up")
        return
    if lab_id is None and len(found) > 1:
        _show(labs_table(found))
        return
    running = Lab.attach(lab_id)
    stats = running.stats()
    _show(regions_table(running), links_table(stats))
    click.echo(relay_line(stats))


@lab.command("set")
@click.argument("src")
@click.argument("dst")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE...")
@_lab_option
def set_link(src: str, dst: str, changes: tuple[str, ...], lab_id: str | None) -> None:
    """Change the link from SRC to DST; '*' means every region.

    Keys: rate_mbps, queue_bytes, delay_s, jitter_s, jitter_memory_s, loss, burst_start, burst_stop,
    flow_rate_mbps.
    """
    from geo_ray.base.load import load_text
    from geo_ray.lab.lab import Lab
    from geo_ray.lab.topology import LinkConfig

    config = load_text("", changes, LinkConfig, "lab set")
    Lab.attach(lab_id).set(src, dst, **config.model_dump(exclude_unset=True))


@lab.command()
@click.argument("region")
@click.option(
    "--up", "up_mbps", type=float, help="Rate towards other regions in Mbit/s; 0 is unlimited."
)
@click.option(
    "--down", "down_mbps", type=float, help="Rate from other regions in Mbit/s; 0 is unlimited."
)
@_lab_option
def cap(region: str, up_mbps: float | None, down_mbps: float | None, lab_id: str | None) -> None:
    """Change the rates of a region's uplink and downlink."""
    from geo_ray.base.load import load_text
    from geo_ray.lab.lab import Lab
    from geo_ray.lab.topology import CapConfig

    def side(rate_mbps: float | None) -> CapConfig | None:
        if rate_mbps is None:
            return None
        return load_text("", [f"rate_mbps={rate_mbps or 'null'}"], CapConfig, "lab cap")

    if up_mbps is None and down_mbps is None:
        raise click.UsageError("give --up, --down or both")
    Lab.attach(lab_id).cap(region, up=side(up_mbps), down=side(down_mbps))


@lab.command()
@click.argument("a")
@click.argument("b")
@_one_way
@_lab_option
def cut(a: str, b: str, one_way: bool, lab_id: str | None) -> None:
    """Cut the link between A and B; '*' means every region."""
    from geo_ray.lab.lab import Lab

    Lab.attach(lab_id).cut(a, b, one_way=one_way)


@lab.command()
@click.argument("a")
@click.argument("b")
@_one_way
@_lab_option
def heal(a: str, b: str, one_way: bool, lab_id: str | None) -> None:
    """Restore the link between A and B; '*' means every region."""
    from geo_ray.lab.lab import Lab

    Lab.attach(lab_id).heal(a, b, one_way=one_way)


@lab.command(context_settings={"allow_interspersed_args": False})
@click.argument("region")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_lab_option
def run(region: str, command: tuple[str, ...], lab_id: str | None) -> None:
    """Run COMMAND inside REGION: `geo-ray lab run A ping 10.2.0.1`.

    Options of this command precede REGION; `--` before COMMAND is allowed. If the lab has a
    Ray cluster, RAY_ADDRESS and its token are set.
    """
    from geo_ray.lab import teardown
    from geo_ray.lab.lab import Lab

    running = Lab.attach(lab_id)
    argv = running.argv_in(region, command[1:] if command[0] == "--" else command)
    environment = teardown.read_record(running.directory).get("ray", {})
    os.execvpe(argv[0], argv, {**os.environ, **environment})  # noqa: S606 - no shell is meant


@lab.command()
@click.option("--cpus", default=4, show_default=True, help="Logical CPUs of each node.")
@_lab_option
def ray(cpus: int, lab_id: str | None) -> None:
    """Start a Ray node in every region of an active lab.

    Each node has the label of its region.
    """
    from geo_ray.lab.lab import Lab

    _start_ray(Lab.attach(lab_id), cpus)


@lab.command()
@click.option("--all", "every", is_flag=True, help="Remove all labs of this machine.")
@_lab_option
def down(every: bool, lab_id: str | None) -> None:
    """Remove a lab, and the remains of crashed labs."""
    from geo_ray.lab import records
    from geo_ray.lab.lab import check_requirements

    check_requirements()
    for name in records.reap():
        click.echo(f"removed the remains of lab {name}")
    if every:
        chosen = list(records.labs())
    elif lab_id is None and not records.labs():
        chosen = []
    else:
        chosen = [records.find(lab_id)]
    for name in chosen:
        records.down(name)
        click.echo(f"lab {name} is down")


def _start_ray(running: Lab, cpus: int) -> None:
    from geo_ray.lab.lab import RayOptions, start_ray

    click.echo("starting a Ray node in every region")
    environment = start_ray(running, RayOptions(cpus=cpus))
    click.echo(f"Ray is up at {environment['RAY_ADDRESS']} inside the lab; for example")
    for line in example_commands(running.regions):
        click.echo(f"  {line}")


def example_commands(regions: Sequence[str]) -> tuple[str, str]:
    """Return commands that train in a lab of these regions."""
    names = ", ".join(f"{{name: {name}}}" for name in regions)
    changes = (
        "cluster={kind: existing}",
        f"regions=[{names}]",
        f"averager.region={regions[0]}",
        "emulate=null",
        "name=lab",
    )
    options = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    train = f"geo-ray train trial/configs/quickstart.yaml {options}"
    return "geo-ray init trial", f"geo-ray lab run {regions[0]} {train}"


def _show(*tables: object) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)
