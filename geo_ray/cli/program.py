"""`geo-ray program`: draws, prices, simulates or runs a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import loading
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.program.run import On


@click.command(short_help="Draw, price, simulate or run a program.")
@click.argument("program", metavar="FILE.py[:NAME]")
@click.option(
    "--on",
    type=click.Choice(["threads", "processes", "ray", "virtual"]),
    default="threads",
    show_default=True,
    help="Backend of the nodes.",
)
@click.option("--graph", is_flag=True, help="Only show nodes, regions and calls.")
@click.option("--simulate", is_flag=True, help="Same as --on virtual.")
@click.option("--price", is_flag=True, help="Simulate the program and print its cost.")
@click.option(
    "--prices",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Price file, for --price.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Of CONFIG.yaml.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the output of nodes, for --on processes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON only.")
def program(
    program: str,
    on: On,
    graph: bool,
    simulate: bool,
    price: bool,
    prices: tuple[Path, ...],
    overrides: tuple[str, ...],
    logs: Path | None,
    as_json: bool,
) -> None:
    """Draw, price, simulate or run the program in a file; nothing is left running.

    A configuration, CONFIG.yaml, stands for the program of `geo-ray train`.
    """
    if sum((graph, simulate, price)) > 1:
        raise click.UsageError("--graph, --simulate and --price are mutually exclusive")
    if overrides and not program.endswith((".yaml", ".yml")):
        raise click.UsageError("--set requires a CONFIG.yaml")
    if logs is not None and (on != "processes" or graph or simulate or price):
        raise click.UsageError("--logs requires --on processes")
    loading("torch", "ray")
    click.echo(f"reading {program}", err=True)
    from geo_ray.program.graph import load_program
    from geo_ray.program.run import run_program

    if program.endswith((".yaml", ".yml")):
        from geo_ray.api.program import training_program

        found = training_program(program, overrides)
    else:
        found = load_program(program)
    if graph:
        say(str(found))
    elif price:
        from geo_ray.api.program import price_program  # imports all of training

        cost = price_program(found, prices=prices)
        if as_json:
            say_json(json.dumps(cost.plain()))
        else:
            say(str(cost))
    else:
        result = run_program(found, "virtual" if simulate else on, logs=logs)
        if as_json:
            say_json(json.dumps(result.plain(), default=repr))
        else:
            say(str(result))
