"""`geo-ray check`: does a strategy or a codec keep what all of them promise?"""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("name", metavar="FILE.py:CLASS")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="One option of the class."
)
def check(name: str, options: tuple[str, ...]) -> None:
    """Put a strategy or a codec to the checks that those of the library pass.

    FILE.py:CLASS is your own class, relative to the present directory; package.module:CLASS and the
    names of the library's own work, too. Checks take the options as they are: a short interval
    makes them quick. The exit code is 1 if one fails.
    """
    from geo_ray.contract.load import checked
    from geo_ray.contract.load import load as load_subject

    findings = checked(load_subject(name, options, Path.cwd()))
    for finding in findings:
        if finding.why is None:
            click.echo(f"passed  {finding.promise}")
        else:
            click.echo(f"{click.style('failed', fg='red')}  {finding.promise}: {finding.why}")
    failed = sum(finding.why is not None for finding in findings)
    click.echo(f"{len(findings) - failed} of {len(findings)} checks passed")
    sys.exit(1 if failed else 0)
