"""`geo-ray config`: shows a configuration without running it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from geo_ray.cli.paths import config_file, loading
from geo_ray.cli.say import say, say_json


@click.group()
def config() -> None:
    """Show a configuration or its keys."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
def show(file: Path, overrides: tuple[str, ...]) -> None:
    """Print the complete configuration of FILE.

    The output includes defaults and the digest.
    """
    loading()
    from geo_ray.api.auto import load_experiment
    from geo_ray.base.load import digest, dump_yaml, override_notes

    experiment, advice = load_experiment(file, overrides)
    for note in override_notes(file, overrides):
        say(f"# {note}")
    if advice is not None:
        say(f"# {advice.reason}")
    click.echo(dump_yaml(experiment), nl=False)
    click.echo(f"# digest: {digest(experiment)}")


@config.command()
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON Schema, for editors.")
def schema(key: str | None, as_json: bool) -> None:
    """List every key with its type, default and description.

    With KEY, list only that key and the keys below it. KEY is written as for --set, with or
    without the kind of a section: `train.steps`, `strategy.diloco`, `strategy.diloco.interval`,
    `strategy.interval`.
    """
    loading()
    import geo_ray
    from geo_ray.api.config import config_schema
    from geo_ray.base.describe import describe, describe_key

    if as_json:
        if key is not None:
            raise click.UsageError("--json prints the whole schema: omit KEY")
        say_json(json.dumps(config_schema(), indent=2))
    else:
        root = geo_ray.Experiment
        click.echo(describe(root) if key is None else describe_key(root, key))
