"""`geo-ray certs`: one CA per deployment, one certificate per region."""

from __future__ import annotations

from pathlib import Path

import click

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_DAYS = click.FloatRange(min=0, min_open=True, max=36500)


@click.group()
def certs() -> None:
    """Make the certificates by which regions know each other (mutual TLS)."""


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--force", is_flag=True, help="Replace a CA; every region needs a new certificate.")
def init(directory: Path, days: float, force: bool) -> None:
    """Make the deployment's CA in DIR. Keep DIR/ca.key to yourself."""
    import geo_ray

    made = geo_ray.init_certs(directory, days=days, force=force)
    click.echo(f"CA: {made}, its key: {made.with_suffix('.key')}")


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
    import geo_ray

    made = geo_ray.issue_cert(directory, region, days=days, hosts=hosts, force=force)
    click.echo(f"{region}: copy {made} to the host of the region's bridge")


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
def show(directory: Path) -> None:
    """List the certificates in DIR and when they expire; exit code 1 if one cannot be used."""
    from rich.console import Console
    from rich.table import Table

    import geo_ray

    found = geo_ray.certs(directory)
    table = Table()
    for heading in ("certificate", "valid from", "expires", "days left", "state", "hosts"):
        table.add_column(heading, justify="right" if heading == "days left" else "left")
    for entry in found.entries:
        state = entry.state(found.at)
        color = "red" if entry in found.bad else "green" if state == "good" else "yellow"
        table.add_row(
            entry.name,
            f"{entry.not_before:%Y-%m-%d}",
            f"{entry.not_after:%Y-%m-%d}",
            f"{entry.left_days(found.at):.0f}",
            f"[{color}]{state}[/{color}]",
            " ".join(entry.hosts) or "-",
        )
    Console().print(table)
    if found.bad:
        raise click.exceptions.Exit(1)


@certs.command()
@click.argument("regions", nargs=-1, metavar="[REGION]...")
@click.option("--dir", "directory", required=True, type=_DIRECTORY, help="The deployment's.")
@click.option("--days", type=_DAYS, default=None, help="Validity.  [default: 365; CA: 3650]")
@click.option("--ca", is_flag=True, help="The CA itself; certificates that it issued stay valid.")
def renew(regions: tuple[str, ...], directory: Path, days: float | None, ca: bool) -> None:
    """Give certificates new dates; without REGION those of all regions. Keys stay."""
    import geo_ray

    if ca and regions:
        raise click.UsageError("--ca renews the CA; leave the regions away")
    if ca:
        names = geo_ray.renew_ca(directory, days=days or 3650)
        click.echo(f"CA renewed; copy ca.pem to the bridge hosts of: {', '.join(names) or '-'}")
        return
    for region, path in geo_ray.renew_certs(directory, regions, days=days or 365).items():
        click.echo(f"{region}: copy {path} to the host of the region's bridge")


@certs.command()
@click.argument("region")
@click.option("--dir", "directory", required=True, type=_DIRECTORY, help="The deployment's.")
def revoke(region: str, directory: Path) -> None:
    """Shut REGION out: none of its certificates counts any more, also on links that are up."""
    import geo_ray

    for path in geo_ray.revoke_cert(directory, region):
        click.echo(f"copy {path} to the host of the bridge of {path.parent.name}")


@certs.command()
@click.option("--dir", "directory", required=True, type=_DIRECTORY, help="The deployment's.")
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--finish", is_flag=True, help="Trust the new CA only.")
def rotate(directory: Path, days: float, finish: bool) -> None:
    """Replace the CA while runs go on: both count until --finish; renew all regions between."""
    import geo_ray

    names = geo_ray.rotate_ca(directory, days=days, finish=finish)
    click.echo(f"copy ca.pem and crl.pem to the bridge hosts of: {', '.join(names) or '-'}")
