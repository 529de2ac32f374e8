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
_option = click.option("--dir", "directory", type=_DIRECTORY, help="The same as DIR.")


@click.group(short_help="Manage the certificates of a deployment.")
def certs() -> None:
    """Manage the certificates of a deployment, for mutual TLS between regions."""


def _directory(named: Path | None, directory: Path | None) -> Path:
    """Return the deployment's directory, given as an argument or as ``--dir``."""
    if named is not None and directory is not None and named != directory:
        raise click.UsageError(f"two directories given: {named} and --dir {directory}")
    found = named or directory
    if found is None:
        raise click.UsageError("give the deployment's directory: --dir DIR")
    return found


@certs.command()
@_argument
@_option
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Validity of the CA.")
@click.option("--force", is_flag=True, help="Replace a CA; every region needs a new certificate.")
def init(named: Path | None, directory: Path | None, days: float, force: bool) -> None:
    """Create the deployment's CA in DIR. Keep DIR/ca.key private."""
    from geo_ray.api.certs import init_certs

    made = init_certs(_directory(named, directory), days=days, force=force)
    click.echo(f"CA: {made}, its key: {made.with_suffix('.key')}")


@certs.command()
@click.argument("region")
@_argument
@_option
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Validity.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME_OR_IP",
    help="Name or address in the certificate; informative only.",
)
@click.option("--force", is_flag=True, help="Replace the region's key and certificate.")
def issue(
    region: str,
    named: Path | None,
    directory: Path | None,
    days: float,
    hosts: tuple[str, ...],
    force: bool,
) -> None:
    """Create the key and certificate of REGION."""
    from geo_ray.api.certs import issue_cert

    folder = _directory(named, directory)
    made = issue_cert(folder, region, days=days, hosts=hosts, force=force)
    click.echo(f"{region}: copy {made} to the host of the region's bridge")


@certs.command()
@_argument
@_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def show(named: Path | None, directory: Path | None, as_json: bool) -> None:
    """List the certificates in DIR and their expiry dates.

    The exit code is 1 if a certificate is not valid.
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
@click.option("--ca", is_flag=True, help="Renew the CA; its certificates stay valid.")
def renew(regions: tuple[str, ...], directory: Path | None, days: float | None, ca: bool) -> None:
    """Renew the certificates of the REGIONs, or of all regions. Keys do not change."""
    from geo_ray.api.certs import renew_ca, renew_certs

    if directory is None:
        if not regions or not Path(regions[-1]).is_dir():
            raise click.UsageError(
                "give the deployment's directory: --dir DIR, or DIR as the last argument"
            )
        *rest, last = regions
        regions, directory = tuple(rest), Path(last)
    if ca and regions:
        raise click.UsageError("--ca renews the CA: omit the regions")
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
    """Revoke all certificates of REGION, also for links that are up.

    A bridge applies the revocation when the printed list has been copied to its host;
    docs/operations/certificates.md has the steps.
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
    """Replace the CA of active runs.

    Both CAs are valid until --finish; renew all regions in between.
    """
    from geo_ray.api.certs import rotate_ca

    folder = _directory(named, directory)
    names = rotate_ca(folder, days=days, finish=finish)
    say(f"copy ca.pem and crl.pem to the bridge hosts of: {', '.join(names) or '-'}")
    if not finish:
        where = f"--dir {shlex.quote(str(folder))}"
        click.echo(
            f"then `geo-ray certs renew {where}`, copy each cert.pem; "
            f"then `geo-ray certs rotate --finish {where}`, copy again"
        )
