"""`geo-ray certs`: one CA per deployment, one certificate per region."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.api.certs import CertificateList

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_DAYS = click.FloatRange(min=0, min_open=True, max=36500)
_argument = click.argument("named", metavar="[DIR]", required=False, type=_DIRECTORY)
_option = click.option("--dir", "directory", type=_DIRECTORY, help="The deployment's, too.")


@click.group(short_help="Make the certificates by which regions know each other.")
def certs() -> None:
    """Make the certificates by which regions know each other (mutual TLS)."""


def _directory(named: Path | None, directory: Path | None) -> Path:
    """The deployment's, whichever way it was named."""
    if named is not None and directory is not None and named != directory:
        raise click.UsageError(f"two directories: {named}, and --dir {directory}")
    found = named or directory
    if found is None:
        raise click.UsageError("name the deployment's directory: --dir DIR")
    return found


@certs.command()
@_argument
@_option
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--force", is_flag=True, help="Replace a CA; every region needs a new certificate.")
def init(named: Path | None, directory: Path | None, days: float, force: bool) -> None:
    """Make the deployment's CA in DIR. Keep DIR/ca.key to yourself."""
    from geo_ray.api.certs import init_certs

    made = init_certs(_directory(named, directory), days=days, force=force)
    click.echo(f"CA: {made}, its key: {made.with_suffix('.key')}")


@certs.command()
@click.argument("region")
@_argument
@_option
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Validity.")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME_OR_IP", help="To mention; is not checked."
)
@click.option("--force", is_flag=True, help="Replace key and certificate of the region.")
def issue(
    region: str,
    named: Path | None,
    directory: Path | None,
    days: float,
    hosts: tuple[str, ...],
    force: bool,
) -> None:
    """Make key and certificate of REGION."""
    from geo_ray.api.certs import issue_cert

    home = _directory(named, directory)
    made = issue_cert(home, region, days=days, hosts=hosts, force=force)
    click.echo(f"{region}: copy {made} to the host of the region's bridge")


@certs.command()
@_argument
@_option
@click.option("--json", "as_json", is_flag=True, help="As JSON, and nothing else.")
def show(named: Path | None, directory: Path | None, as_json: bool) -> None:
    """List the certificates in DIR and when they expire.

    The exit code is 1 if one cannot be used.
    """
    from rich.console import Console
    from rich.text import Text

    import geo_ray
    import geo_ray.api.certs
    from geo_ray.base.tables import FittedTable

    found = geo_ray.api.certs.certs(_directory(named, directory))
    if as_json:
        say_json(json.dumps(found.table().to_pylist(), indent=2))
        _end(found)
        return
    table = FittedTable()
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
            Text(state, color),
            " ".join(entry.hosts) or "-",
        )
    Console().print(table)
    _end(found)


def _end(found: CertificateList) -> None:
    if found.bad:
        raise click.exceptions.Exit(1)


@certs.command()
@click.argument("regions", nargs=-1, metavar="[REGION]... [DIR]")
@_option
@click.option("--days", type=_DAYS, default=None, help="Validity.  [default: 365; CA: 3650]")
@click.option("--ca", is_flag=True, help="The CA itself; certificates that it issued stay valid.")
def renew(regions: tuple[str, ...], directory: Path | None, days: float | None, ca: bool) -> None:
    """Give certificates new dates; without REGION those of all regions. Keys stay."""
    from geo_ray.api.certs import renew_ca, renew_certs

    if directory is None:
        if not regions or not Path(regions[-1]).is_dir():
            raise click.UsageError("name the deployment's directory: --dir DIR, or DIR at the end")
        *rest, last = regions
        regions, directory = tuple(rest), Path(last)
    if ca and regions:
        raise click.UsageError("--ca renews the CA; leave the regions away")
    if ca:
        names = renew_ca(directory, days=days or 3650)
        say(f"CA renewed; copy ca.pem to the bridge hosts of: {', '.join(names) or '-'}")
        return
    for region, path in renew_certs(directory, regions, days=days or 365).items():
        say(f"{region}: copy {path} to the host of the region's bridge")


@certs.command()
@click.argument("region")
@_argument
@_option
def revoke(region: str, named: Path | None, directory: Path | None) -> None:
    """Shut REGION out, also on links that are up.

    None of its certificates counts any more. Bridges see it when the list that is named here has
    been copied to their hosts; docs/operations/certificates.md has the steps.
    """
    from geo_ray.api.certs import revoke_cert

    for path in revoke_cert(_directory(named, directory), region):
        say(f"copy {path} to the host of the bridge of {path.parent.name}")


@certs.command()
@_argument
@_option
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--finish", is_flag=True, help="Trust the new CA only.")
def rotate(named: Path | None, directory: Path | None, days: float, finish: bool) -> None:
    """Replace the CA while runs go on.

    Both count until --finish; renew all regions between.
    """
    from geo_ray.api.certs import rotate_ca

    home = _directory(named, directory)
    names = rotate_ca(home, days=days, finish=finish)
    say(f"copy ca.pem and crl.pem to the bridge hosts of: {', '.join(names) or '-'}")
    if not finish:
        where = f"--dir {shlex.quote(str(home))}"
        click.echo(
            f"then `geo-ray certs renew {where}`, copy each cert.pem; "
            f"then `geo-ray certs rotate --finish {where}`, copy again"
        )
