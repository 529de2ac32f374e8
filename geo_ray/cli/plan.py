"""`geo-ray plan`: plans machines and settings of a run, with their time and cost.

Nothing is started.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD

from geo_ray.base.errors import ConfigError
from geo_ray.base.output import ticking
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text, duration_text
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
from geo_ray.planner.memory import terms_text
from geo_ray.planner.plan import Plan, differing_machines


def machines_table(plan: Plan) -> FittedTable:
    """Print the machines of the plan."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("region", "machines", "market"):
        table.add_column(heading)
    for heading in ("rows per step", "USD/h each", "step"):
        table.add_column(heading, justify="right")
    for region in plan.regions:
        for index, each in enumerate(region.machines):
            table.add_row(
                region.region if index == 0 else "",
                f"{each.count} x {each.type}",
                each.market.replace("_", "-"),
                f"{each.rows}",
                f"{each.usd_per_h:.4g}",
                f"{region.step_s:.3g} s" if index == 0 else "",
            )
    return table


def terms_table(plan: Plan) -> FittedTable:
    """Print every term of time and cost."""
    table = FittedTable("term", box=SIMPLE_HEAD)
    for heading in ("time", "USD", "share"):
        table.add_column(heading, justify="right")
    for name, seconds in plan.seconds.items():
        table.add_row(name, duration_text(seconds), "", f"{seconds / plan.total_s:.1%}")
    table.add_section()
    for name, usd in plan.usd.items():
        table.add_row(name, "", f"{usd:.2f}", f"{usd / plan.total_usd:.1%}")
    table.add_section()
    table.add_row("all", duration_text(plan.total_s), f"{plan.total_usd:.2f}", "")
    return table


def loss_text(plan: Plan) -> str:
    """Return the loss that interval and codec cost, and the source of the number."""
    if plan.loss is None:
        return "loss     unknown"
    how = "measured for this task" if plan.loss.measured else "assumed: a rough table for any task"
    if plan.loss.expected is None:
        return f"loss     training diverged with this interval and codec ({how})"
    return f"loss     {plan.loss.expected:.2%} more than plain training ({how})"


def memory_lines(plan: Plan, *, explain: bool = False) -> list[str]:
    """Return the memory of each group and of the averager.

    Args:
        plan: the plan.
        explain: whether to add every term.
    """
    lines = [
        f"memory   {each.region}: {each.memory.text(explain=explain)}"
        for each in plan.regions
        if each.memory is not None
    ]
    if plan.serving:
        found = terms_text(plan.serving) if explain else bytes_text(sum(plan.serving.values()))
        lines.append(f"memory   averager in {plan.averager}: {found}")
    return lines


def totals_text(plan: Plan) -> str:
    """Return time and cost with their expected ranges."""
    time_text, usd_text = duration_text(plan.total_s), f"{plan.total_usd:.2f} USD"
    low_s, high_s = plan.seconds_range or (0.0, 0.0)
    if low_s < high_s:
        time_text += f" ({duration_text(low_s)} to {duration_text(high_s)})"
    low, high = plan.usd_range or (0.0, 0.0)
    if low < high:
        usd_text += f" ({low:.2f} to {high:.2f})"
    return f"{time_text}, {usd_text}"


def totals_json(plan: Plan) -> str:
    """Return the plan as JSON for programs."""
    totals = {
        "seconds": plan.total_s,
        "seconds_range": plan.seconds_range,
        "usd": plan.total_usd,
        "usd_range": plan.usd_range,
    }
    return json.dumps(totals, indent=2)


def front_table(plans: Sequence[Plan]) -> FittedTable:
    """Print the Pareto front of time and cost."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("time", "USD"):
        table.add_column(heading, justify="right")
    for heading in ("averager", "exchange", "note, and machines that differ"):
        table.add_column(heading)
    for plan, machines in zip(plans, differing_machines(plans), strict=True):
        table.add_row(
            duration_text(plan.total_s),
            f"{plan.total_usd:.2f}",
            plan.averager,
            f"{plan.interval} steps, {plan.codec or 'no codec'}",
            f"{plan.reason}\n{machines}".rstrip(),
        )
    return table


_NOT_OF_THE_REST = {"--policy": "policy", "--dry-run": "dry_run", "--pareto": "pareto"}
_file_type = click.Path(path_type=Path)
_out_type = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Choose machines and settings for CONFIG by time and cost.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option(
    "--policy",
    type=click.Choice(["optimal", "cloudless", "everything", "fixed"]),
    default="optimal",
    show_default=True,
    help="Planning policy: docs/guides/planning.md.",
)
@click.option(
    "--prices",
    multiple=True,
    type=_file_type,
    callback=existing_files,
    help="Price file; later files override earlier ones.  "
    "[default: those in GEO_RAY_PRICES, else prices.json]",
)
@click.option(
    "--links",
    type=_file_type,
    callback=existing_file,
    help="Link table written by `geo-ray probe`.",
)
@click.option(
    "--profile",
    "profile_file",
    type=_file_type,
    callback=existing_file,
    help="Profile written by `geo-ray profile`.  [default: of this model, in RUN.DIR/profiles]",
)
@click.option(
    "--loss",
    "loss_file",
    type=_file_type,
    callback=existing_file,
    help="Loss profile written by `geo-ray profile --loss`.  "
    "[default: of this task, in RUN.DIR/profiles/loss]",
)
@click.option(
    "--from",
    "run_dir",
    type=RunReference(),
    callback=run_directory,
    metavar="RUN",
    help="Plan the rest of a run that follows a plan: whether a change pays off.",
)
@click.option(
    "--age-h",
    type=click.FloatRange(min=0),
    help="With --from: hours since the run's first machines were rented, for prices that decrease "
    "with "
    "age.  [default: the run's duration]",
)
@click.option("--extrapolate", is_flag=True, help="Allow values outside the measured range.")
@click.option("--dry-run", is_flag=True, help="Print only ranges of the job's time and cost.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the plan as JSON only; with --dry-run time and cost.",
)
@click.option("--explain", is_flag=True, help="Print every term of time and cost.")
@click.option("--out", type=_out_type, help="Also write the plan to this file.")
@click.option(
    "--out-tfvars",
    type=_out_type,
    help="Also write its machines as Terraform variables: docs/operations/terraform.md.",
)
@click.option("--pareto", type=_out_type, help="Also write a page that plots time against USD.")
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
    """Choose machines, averager, interval and codec for CONFIG by time and cost.

    The section `plan` of CONFIG lists the machines that can be rented in each region. Prices come
    with this release and from `geo-ray prices`; links from a table or the section `emulate`.
    """
    if run_dir is not None:
        _check_rest(context)
    if age_h is not None and run_dir is None:
        raise click.UsageError("--age-h is the age of a run's machines: give the run with --from")
    check_plan_section(config, overrides)
    loading("torch", "geo_ray.api.plan")
    from rich.console import Console

    import geo_ray
    from geo_ray.api.plan import PlanInputs, replan
    from geo_ray.telemetry.html_page import write_plan_page

    progress = partial(click.echo, err=True)
    inputs = PlanInputs(prices, links, profile_file, extrapolate, loss_file)
    if run_dir is not None:
        with ticking("planning", progress):
            decision = replan(run_dir, config, overrides, inputs=inputs, age_h=age_h)
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
    say(f"averager {chosen.averager}, exchange every {chosen.interval} steps, {codec}")
    for line in memory_lines(chosen, explain=explain):
        say(line)
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
    """Reject options that do not apply to planning the rest of a run.

    Raises:
        ConfigError: names the rejected options.
    """
    given = [
        name
        for name, key in _NOT_OF_THE_REST.items()
        if context.get_parameter_source(key) == click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: not allowed with --from, which plans the rest of a run",
            fix="Omit it, or plan the whole job without --from.",
        )


def _stands(plan: Plan) -> str:
    usd_per_h = plan.fixed_usd_per_h
    return f", {usd_per_h:.2f} of servers and disks" if usd_per_h else ""


def _better(gap: float) -> str:
    """Return the optimality statement for a plan within ``gap`` of the lowest price."""
    return "better" if gap < 0.0005 else f"more than {gap:.1%} better"
