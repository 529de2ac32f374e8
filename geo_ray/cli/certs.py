"""`geo-ray certs`: one CA per deployment, one certificate per region."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_DAYS = click.FloatRange(min=0, min_open=True, max=36500)
_SOON_DAYS = 30


@click.group()
def certs() -> None:
    """Make the certificates by which regions know each other (mutual TLS)."""


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--force", is_flag=True, help="Replace a CA; every region needs a new certificate.")
def init(directory: Path, days: float, force: bool) -> None:
    """Make the deployment's CA in DIR. Keep DIR/ca.key to yourself."""
    from geo_ray.transport.security import cert_store

    cert_store.init(directory, days, force=force)
    click.echo(f"CA: {directory / 'ca.pem'}, its key: {directory / 'ca.key'}")


@certs.command()
@click.argument("region")
@click.option("--dir", "directory", required=True, type=_DIRECTORY, help="The deployment's.")
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Validity.")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME_OR_IP", help="To mention; is not checked."
)
@click.option("--force", is_flag=True, help="Replace key and certificate of the region.")
def issue(region: str, directory: Path, days: float, hosts: tuple[str, ...], force: bool) -> None:
    """Make key and certificate of REGION."""
    from geo_ray.transport.security import cert_store

    files = cert_store.issue(directory, region, days, hosts, force=force)
    click.echo(f"{region}: copy {Path(files.cert).parent} to the host of the region's bridge")


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
def show(directory: Path) -> None:
    """List the certificates in DIR and when they expire; exit code 1 if one cannot be used."""
    from rich.console import Console
    from rich.table import Table

    from geo_ray.transport.security import cert_store

    now = dt.datetime.now(dt.UTC)
    table = Table()
    for heading in ("certificate", "valid from", "expires", "days left", "state", "hosts"):
        table.add_column(heading, justify="right" if heading == "days left" else "left")
    bad = 0
    for entry in cert_store.entries(directory):
        left_days = (entry.not_after - now).total_seconds() / 86400
        state, color = "good", "green"
        if entry.problem or left_days <= 0 or entry.not_before > now:
            state = entry.problem or ("EXPIRED" if left_days <= 0 else "not valid yet")
            color = "red"
            bad += 1
        elif left_days < _SOON_DAYS:
            state, color = "renew soon", "yellow"
        table.add_row(
            entry.name,
            f"{entry.not_before:%Y-%m-%d}",
            f"{entry.not_after:%Y-%m-%d}",
            f"{left_days:.0f}",
            f"[{color}]{state}[/{color}]",
            " ".join(entry.hosts) or "-",
        )
    Console().print(table)
    if bad:
        raise click.exceptions.Exit(1)


@certs.command()
@click.argument("regions", nargs=-1, metavar="[REGION]...")
@click.option("--dir", "directory", required=True, type=_DIRECTORY, help="The deployment's.")
@click.option("--days", type=_DAYS, default=None, help="Validity.  [default: 365; CA: 3650]")
@click.option("--ca", is_flag=True, help="The CA itself; certificates that it issued stay valid.")
def renew(regions: tuple[str, ...], directory: Path, days: float | None, ca: bool) -> None:
    """Give certificates new dates; without REGION those of all regions. Keys stay."""
    from geo_ray.transport.security import cert_store

    if ca and regions:
        raise click.UsageError("--ca renews the CA; leave the regions away")
    if ca:
        names = cert_store.renew_ca(directory, days or 3650)
        click.echo(f"CA renewed; copy ca.pem to the bridge hosts of: {', '.join(names) or '-'}")
        return
    for region in regions or cert_store.regions_of(directory):
        files = cert_store.renew(directory, region, days or 365)
        click.echo(f"{region}: copy {files.cert} to the host of the region's bridge")
