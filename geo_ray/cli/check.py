"""`geo-ray check`: does a strategy, a codec or a task keep what all of them promise?"""

from __future__ import annotations

import sys

import click

from geo_ray.cli.paths import loading, telling


@click.command(short_help="Check a strategy, a codec or a task of your own.")
@click.argument("name", metavar="FILE.py:CLASS")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="One option of the class."
)
def check(name: str, options: tuple[str, ...]) -> None:
    """Put a strategy, a codec or a task to the checks that those of the library pass.

    FILE.py:CLASS is your own class, relative to the present directory; package.module:CLASS and the
    names of the library's own work, too. Checks take the options as they are: a short interval
    makes them quick. The exit code is 1 if one fails.
    """
    loading("torch", "geo_ray.api.check")
    import geo_ray
    import geo_ray.api.check
    from geo_ray.base.overrides import CALLED

    called = CALLED.set("--option")
    try:
        with telling(f"checking {name}"):
            found = geo_ray.api.check.check(name, options)
    finally:
        CALLED.reset(called)
    for finding in found.findings:
        if finding.why is None:
            click.echo(f"passed  {finding.promise}")
        else:
            click.echo(f"{click.style('failed', fg='red')}  {finding.promise}: {finding.why}")
    total, failed = len(found.findings), len(found.broken)
    click.echo(f"{total - failed} of {total} checks passed")
    sys.exit(1 if failed else 0)
