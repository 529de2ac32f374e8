"""`geo-ray plan`: what would run where, how long it takes, what it costs; nothing is started."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import (
    RunRef,
    RunReference,
    check_plan_section,
    config_file,
    existing_file,
    existing_files,
    loading,
    run_directory,
)
from geo_ray.cli.say import say, say_json
from geo_ray.errors import ConfigError
from geo_ray.util.ticking import ticking

if TYPE_CHECKING:
    from geo_ray.planning.plan import Plan

_NOT_OF_THE_REST = {"--policy": "policy", "--dry-run": "dry_run", "--pareto": "pareto"}
_file_type = click.Path(path_type=Path)
_out_type = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Choose machines and more for CONFIG, by time and money.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option(
    "--policy",
    type=click.Choice(["optimal", "cloudless", "everything", "fixed"]),
    default="optimal",
    show_default=True,
    help="Who decides: docs/planning.md.",
)
@click.option(
    "--prices",
    multiple=True,
    type=_file_type,
    callback=existing_files,
    help="Your prices; of several the later count more.  "
    "[default: those in GEO_RAY_PRICES, else prices.json]",
)
@click.option(
    "--links", type=_file_type, callback=existing_file, help="A link table of `geo-ray probe`."
)
@click.option(
    "--profile",
    "profile_file",
    type=_file_type,
    callback=existing_file,
    help="What `geo-ray profile` measured.  [default: one of this model in RUN.DIR/profiles]",
)
@click.option(
    "--loss",
    "loss_file",
    type=_file_type,
    callback=existing_file,
    help="What `geo-ray profile --loss` measured.  "
    "[default: of this task, in RUN.DIR/profiles/loss]",
)
@click.option(
    "--from",
    "run_dir",
    type=RunReference(),
    callback=run_directory,
    metavar="RUN",
    help="Plan what is left of a run that follows a plan: whether a change pays.",
)
@click.option(
    "--age-h",
    type=click.FloatRange(min=0),
    help="With --from: hours since the run's first machines were rented, for prices that fall with "
    "age.  [default: as long as the run has lasted]",
)
@click.option("--extrapolate", is_flag=True, help="Go beyond what the profile has measured.")
@click.option("--dry-run", is_flag=True, help="Only time and cost of the whole job, as ranges.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="The plan as JSON, and nothing else; with --dry-run time and cost.",
)
@click.option("--explain", is_flag=True, help="Every term of time and money.")
@click.option("--out", type=_out_type, help="Write the plan to this file, too.")
@click.option(
    "--out-tfvars",
    type=_out_type,
    help="Write its machines as variables of Terraform: docs/terraform.md.",
)
@click.option("--pareto", type=_out_type, help="Write a page that plots time against USD.")
@click.pass_context
def plan(
    context: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    policy: str,
    prices: tuple[Path, ...],
    links: Path | None,
    profile_file: Path | None,
    loss_file: Path | None,
    run_dir: RunRef | None,
    age_h: float | None,
    extrapolate: bool,
    dry_run: bool,
    as_json: bool,
    explain: bool,
    out: Path | None,
    out_tfvars: Path | None,
    pareto: Path | None,
) -> None:
    """Choose machines, averager, interval and codec for CONFIG, by time and money.

    CONFIG has a section `plan` that says what could be rented where. Prices come with this release
    and from `geo-ray prices`; links from a table, or from the section `emulate`.
    """
    if run_dir is not None:
        _check_rest(context)
    if age_h is not None and run_dir is None:
        raise click.UsageError("--age-h is the age of a run's machines: name the run with --from")
    check_plan_section(config, overrides)
    loading("torch", "geo_ray.api.planning")
    from rich.console import Console

    import geo_ray
    from geo_ray.cli.tables.plan import (
        front_table,
        loss_text,
        machines_table,
        terms_table,
        totals_json,
        totals_text,
    )
    from geo_ray.observe.report.plan_page import write_plan_page

    progress = partial(click.echo, err=True)
    inputs = geo_ray.PlanInputs(prices, links, profile_file, extrapolate, loss_file)
    if run_dir is not None:
        with ticking("planning", progress):
            decision = geo_ray.replan(run_dir, config, overrides, inputs=inputs, age_h=age_h)
        if as_json:
            say_json(decision.plan.model_dump_json(indent=2))
        else:
            console = Console()
            say(decision.reason)
            console.print(machines_table(decision.plan))
            say(loss_text(decision.plan))
            if explain:
                console.print(terms_table(decision.plan))
            for note in decision.plan.notes:
                say(f"note: {note}")
        if out is not None and decision.changed:
            decision.save(out)
        if out_tfvars is not None and decision.changed:
            decision.save_tfvars(out_tfvars)
        return
    with ticking("planning", progress):
        planned = geo_ray.plan(
            config,
            overrides,
            policy=policy,  # type: ignore[arg-type]  # click has checked it
            inputs=inputs,
            front=pareto is not None,
        )
    chosen = planned.plan
    if dry_run:
        if as_json:
            say_json(totals_json(chosen))
        else:
            say(totals_text(chosen))
        say(loss_text(chosen), err=True)
        for note in chosen.notes:
            say(f"note: {note}", err=True)
        return
    if out is not None:
        planned.save(out)
    if out_tfvars is not None:
        planned.save_tfvars(out_tfvars)
    if pareto is not None:
        points = [(p.total_s, p.total_usd, p.machines_text, p.reason) for p in planned.front]
        write_plan_page(planned.name, points, (chosen.total_s, chosen.total_usd), pareto)
    if as_json:
        say_json(chosen.model_dump_json(indent=2))
        return
    console = Console()
    console.print(machines_table(chosen))
    codec = chosen.codec or "no codec"
    say(f"averager {chosen.averager}, an exchange every {chosen.interval} steps, {codec}")
    say(loss_text(chosen))
    say(
        f"{totals_text(chosen)} ({chosen.usd_per_h:.2f} USD/h of workers{_stands(chosen)})"
        + (f"; no plan is {_better(chosen.gap)}" if policy == "optimal" else "")
    )
    say(chosen.reason)
    if explain:
        console.print(terms_table(chosen))
    if planned.front:
        console.print(front_table(planned.front))
    for note in chosen.notes:
        say(f"note: {note}")
    for path in (out, out_tfvars, pareto):
        if path is not None:
            say(f"written  {path}")


def _check_rest(context: click.Context) -> None:
    """Refuse options that planning the rest of a run does not have, rather than pass them over.

    Raises:
        ConfigError: names those that were given.
    """
    given = [
        name
        for name, key in _NOT_OF_THE_REST.items()
        if context.get_parameter_source(key) == click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: not with --from, which plans the rest of a run in one way",
            fix="Leave it out, or plan the whole job without --from.",
        )


def _stands(plan: Plan) -> str:
    usd_per_h = plan.stands_usd_per_h
    return f", {usd_per_h:.2f} of servers and disks" if usd_per_h else ""


def _better(gap: float) -> str:
    """What no plan is, beside one whose price is at most ``gap`` above the lowest."""
    return "better" if gap < 0.0005 else f"more than {gap:.1%} better"
