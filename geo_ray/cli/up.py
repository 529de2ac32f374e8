"""`geo-ray up`: makes the cluster of a configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import check_plan_section, config_file, loading, plan_option
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.planner.plan import Plan


@click.command(short_help="Make the cluster of CONFIG.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option(
    "--provider",
    type=click.Choice(["local", "aws", "tencent", "terraform"]),
    help="Where all machines are; local: on this computer, at the same prices; terraform: on a "
    "stack that Terraform made.  [default: as plan.regions says]",
)
@click.option(
    "--from-terraform",
    "source",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE",
    help="The stack: where `terraform apply` ran, or a file of `terraform output -json`.",
)
@plan_option
@click.option(
    "--policy",
    type=click.Choice(["optimal", "cloudless", "everything", "fixed"]),
    default="optimal",
    show_default=True,
    help="Who decides what runs, without --plan.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be rented; start nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before machines are rented.")
@click.option(
    "--wait",
    "longest_s",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="Longest wait in seconds for the plan's machines; they come later, too.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def up(
    config: Path,
    overrides: tuple[str, ...],
    provider: str | None,
    source: Path | None,
    plan_file: Path | None,
    policy: str,
    dry_run: bool,
    yes: bool,
    longest_s: float,
    as_json: bool,
) -> None:
    """Make the cluster that CONFIG asks for: Ray's head, its autoscaler, machines in all regions.

    On a stack of Terraform its head is used, and `geo-ray down` ends what the autoscaler rented
    there, and nothing else.

    May be repeated: a cluster that is up is shown, one that was begun is completed. `geo-ray
    status` and `geo-ray down` take the folder that is printed.
    """
    check_plan_section(config, overrides)
    loading("torch", "ray", "geo_ray.api.clusters")
    click.echo(f"reading {config}", err=True)
    import geo_ray
    from geo_ray.api.clusters import up_offer
    from geo_ray.cli.cluster_tables import (
        machines_table,
        offer_lines,
        offer_table,
        plan_lines,
        reach_lines,
        wide_console,
    )

    console = wide_console()
    plan: Plan | Path | None = plan_file
    if dry_run or not yes:
        offer = up_offer(
            config,
            overrides,
            provider=provider,
            plan=plan_file,
            policy=policy,  # type: ignore[arg-type]  # click has checked it
            from_terraform=source,
        )
        if dry_run and as_json:
            say_json(offer.model_dump_json(indent=2))
            return
        if not as_json:
            console.print(offer_table(offer))
            for line in (*offer_lines(offer), *plan_lines(offer.plan)):
                say(line)
        if dry_run:
            click.echo("nothing was started")
            return
        free = offer.clouds == ("local",)
        if not free and not click.confirm("Rent these machines?", err=True):
            raise click.Abort
        plan = offer.plan
    made = geo_ray.up(
        config,
        overrides,
        provider=provider,
        plan=plan,
        policy=policy,  # type: ignore[arg-type]  # as above
        from_terraform=source,
        longest_s=longest_s,
        notify=partial(say, err=True),
    )
    if as_json:
        say_json(made.report.model_dump_json(indent=2))
        return
    console.print(machines_table(made.report))
    for line in reach_lines(made, config):
        say(line)
