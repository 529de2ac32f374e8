"""`geo-ray profile`: how long steps and exchanges take, measured by a few short runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from geo_ray.cli.paths import config_file

_out_type = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="REGION=TYPE",
    help="Which of the machines in `plan` the workers of a region run on now.",
)
@click.option("--workers", help="Numbers of workers per region, such as 1,4.  [default: 1 and all]")
@click.option("--batch-sizes", help="Rows per worker, such as 8,32.  [default: a quarter and all]")
@click.option("--codecs", help="Codecs whose exchanges to measure, such as none,int8.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(5), help="Of each run.")
@click.option("--full", is_flag=True, help="Every combination instead of three extremes.")
@click.option("--fresh", is_flag=True, help="Measure again what an earlier profile has.")
@click.option("--out", type=_out_type, help="The file.  [default: RUN.DIR/profiles/NAME.json]")
@click.option("--json", "as_json", is_flag=True, help="The profile as JSON, and nothing else.")
def profile(
    config: Path,
    overrides: tuple[str, ...],
    machines: tuple[str, ...],
    workers: str | None,
    batch_sizes: str | None,
    codecs: str | None,
    steps: int,
    full: bool,
    fresh: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the job of CONFIG by short runs of itself, for `geo-ray plan`.

    What an earlier profile of the same model has is not measured again.
    """
    from rich.console import Console

    import geo_ray
    from geo_ray.cli import main as entry
    from geo_ray.cli.tables.profile import exchanges_table, steps_table

    result = geo_ray.profile(
        config,
        overrides,
        grid=geo_ray.ProfileGrid(
            workers=_numbers("workers", workers),
            batch_sizes=_numbers("batch-sizes", batch_sizes),
            codecs=_codecs(codecs),
            machines=_machines(machines),
            steps=steps,
            full=full,
            fresh=fresh,
        ),
        out=out,
        progress=True,
        began_unix_s=min(entry.BEGAN_UNIX_S, time.time()),
    )
    found = result.profile
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        return
    out_console = Console()
    out_console.print(steps_table(found))
    if found.exchanges:
        out_console.print(exchanges_table(found))
    out_console.print(f"written  {result.path}", highlight=False, soft_wrap=True)


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"'{text}' is no list such as 1,4", param_hint=f"--{name}")
    return found


def _machines(words: tuple[str, ...]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    return {region: kind for region, _, kind in pairs}


def _codecs(text: str | None) -> tuple[str | None, ...] | None:
    from geo_ray.planning.tradeoffs import BITS_PER_PARAM

    if text is None:
        return None
    found = tuple(None if word == "none" else word for word in text.split(","))
    for each in found:
        if each not in BITS_PER_PARAM:
            known = ", ".join(str(name or "none") for name in BITS_PER_PARAM)
            raise click.BadParameter(f"{each} is not one of {known}", param_hint="--codecs")
    return found
