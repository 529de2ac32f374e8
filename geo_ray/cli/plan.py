"""`geo-ray plan`: what would run where, how long it takes, what it costs; nothing is started."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import (
    check_plan_section,
    config_file,
    existing_file,
    existing_files,
    run_directory,
)

_file_type = click.Path(path_type=Path)
_out_type = click.Path(dir_okay=False, path_type=Path)


@click.command()
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
    "--from",
    "run_dir",
    type=click.Path(path_type=Path),
    callback=run_directory,
    metavar="RUN",
    help="Plan what is left of a run that follows a plan: whether a change pays.",
)
@click.option("--extrapolate", is_flag=True, help="Go beyond what the profile has measured.")
@click.option("--dry-run", is_flag=True, help="Only time and cost of the whole job, as ranges.")
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON, and nothing else.")
@click.option("--explain", is_flag=True, help="Every term of time and money.")
@click.option("--out", type=_out_type, help="Write the plan to this file, too.")
@click.option("--pareto", type=_out_type, help="Write a page that plots time against USD.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    policy: str,
    prices: tuple[Path, ...],
    links: Path | None,
    profile_file: Path | None,
    run_dir: Path | None,
    extrapolate: bool,
    dry_run: bool,
    as_json: bool,
    explain: bool,
    out: Path | None,
    pareto: Path | None,
) -> None:
    """Choose machines, averager, interval and codec for CONFIG, by time and money.

    CONFIG has a section `plan` that says what could be rented where. Prices come with this release
    and from `geo-ray prices`; links from a table, or from the section `emulate`.
    """
    check_plan_section(config, overrides)
    from rich.console import Console

    import geo_ray
    from geo_ray.cli.tables.plan import front_table, machines_table, terms_table, totals_text
    from geo_ray.observe.report.plan_page import write_plan_page

    inputs = geo_ray.PlanInputs(prices, links, profile_file, extrapolate)
    if run_dir is not None:
        decision = geo_ray.replan(run_dir, config, overrides, inputs=inputs)
        if as_json:
            click.echo(decision.plan.model_dump_json(indent=2))
        else:
            console = Console()
            console.print(decision.reason, highlight=False, soft_wrap=True)
            console.print(machines_table(decision.plan))
        if out is not None and decision.changed:
            decision.save(out)
        return
    planned = geo_ray.plan(
        config,
        overrides,
        policy=policy,  # type: ignore[arg-type]  # click has checked it
        inputs=inputs,
        front=pareto is not None,
    )
    chosen = planned.plan
    if dry_run:
        click.echo(totals_text(chosen))
        for note in chosen.notes:
            click.echo(f"note: {note}", err=True)
        return
    if out is not None:
        planned.save(out)
    if pareto is not None:
        points = [(p.total_s, p.total_usd, p.reason) for p in planned.front]
        write_plan_page(planned.name, points, (chosen.total_s, chosen.total_usd), pareto)
    if as_json:
        click.echo(chosen.model_dump_json(indent=2))
        return
    console = Console()
    console.print(machines_table(chosen))
    codec = chosen.codec or "no codec"
    console.print(
        f"averager {chosen.averager}, an exchange every {chosen.interval} steps, {codec}",
        highlight=False,
    )
    console.print(
        f"{totals_text(chosen)} ({chosen.usd_per_h:.2f} USD/h of machines)"
        + (f"; no plan is more than {chosen.gap:.1%} better" if policy == "optimal" else ""),
        highlight=False,
    )
    console.print(chosen.reason, highlight=False, soft_wrap=True)
    if explain:
        console.print(terms_table(chosen))
    if planned.front:
        console.print(front_table(planned.front))
    for note in chosen.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    for path in (out, pareto):
        if path is not None:
            console.print(f"written  {path}", highlight=False, soft_wrap=True)
