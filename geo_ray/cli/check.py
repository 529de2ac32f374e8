"""`geo-ray check`: checks a strategy, a codec or a task against its contract."""

from __future__ import annotations

import sys

import click

from geo_ray.cli.paths import loading, telling


@click.command(short_help="Check a custom strategy, codec or task.")
@click.argument("name", metavar="FILE.py:CLASS")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of the class."
)
def check(name: str, options: tuple[str, ...]) -> None:
    """Run the contract checks of the library on a strategy, a codec or a task.

    FILE.py:CLASS is a custom class, relative to the current directory; package.module:CLASS and
    names of built-in classes also work. The checks use the given options: a short interval makes
    them fast. The exit code is 1 if a check fails.
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
