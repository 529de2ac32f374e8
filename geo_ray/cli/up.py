"""`geo-ray up`: creates the cluster of a configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import check_plan_section, config_file, loading, plan_option
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.planner.plan import Plan


@click.command(short_help="Create the cluster of CONFIG.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option(
    "--provider",
    type=click.Choice(["local", "aws", "tencent", "terraform"]),
    help="Provider of all machines; local: on this computer, at the same prices; terraform: on a "
    "stack created by Terraform.  [default: as in plan.regions]",
)
@click.option(
    "--from-terraform",
    "source",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE",
    help="The stack: directory of `terraform apply`, or a file of `terraform output -json`.",
)
@plan_option
@click.option(
    "--policy",
    type=click.Choice(["optimal", "cloudless", "everything", "fixed"]),
    default="optimal",
    show_default=True,
    help="Planning policy, without --plan.",
)
@click.option("--dry-run", is_flag=True, help="Show the machines to rent; start nothing.")
@click.option("--yes", is_flag=True, help="Rent machines without confirmation.")
@click.option(
    "--wait",
    "longest_s",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="Maximum seconds to wait for the plan's machines; later machines still join.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
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
    """Create the cluster of CONFIG: Ray's head, its autoscaler, and machines in all regions.

    With a Terraform stack, its head is used, and `geo-ray down` deletes only the machines that the
    autoscaler rented.

    The command can be repeated: it shows an existing cluster and completes an unfinished one.
    Pass the printed directory to `geo-ray status` and `geo-ray down`.
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
