"""`geo-ray train`: run an experiment on real actors."""

from __future__ import annotations

import time
from pathlib import Path

import click

from geo_ray.cli.follow import following, new_run, plan_option, planned


@click.command()
@click.argument(
    "config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option(
    "--resume",
    "resume_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="RUN",
    help="Go on with an earlier run from its newest whole checkpoint.",
)
@click.option(
    "--allow-drift", is_flag=True, help="Resume although CONFIG differs; the run keeps it."
)
@plan_option
@click.option("--plain", is_flag=True, help="Lines instead of a live table.")
def train(
    config: Path | None,
    overrides: tuple[str, ...],
    resume_dir: Path | None,
    allow_drift: bool,
    plan_file: Path | None,
    plain: bool,
) -> None:
    """Train as CONFIG says, or go on with a run.

    Ctrl-C saves a checkpoint and stops; a second one stops at once. With --resume RUN --plan FILE
    the run goes on with the machines of another plan.
    """
    from geo_ray.cli import main as entry
    from geo_ray.config.own import Where
    from geo_ray.job import rundir
    from geo_ray.job.auto import load_experiment
    from geo_ray.planning.plan import load_plan

    began_unix_s = min(entry.BEGAN_UNIX_S, time.time())
    if resume_dir is None:
        if config is None:
            raise click.UsageError("name a CONFIG, or a run with --resume")
        overrides, plan = planned(config, overrides, plan_file)
        experiment, advice = load_experiment(config, overrides)
        if advice is not None:
            click.echo(advice.reason, err=True)
        reason = advice.reason if advice else None
        run = new_run(experiment, config.parent, reason, plan)
    else:
        run, experiment = rundir.reopen(resume_dir, allow_drift=allow_drift)
        if plan_file is not None:
            if config is not None or overrides:
                raise click.UsageError("a run that is resumed with a plan has its own CONFIG")
            _check_resumable(run, experiment, experiment)
            experiment = rundir.follow(run, experiment, load_plan(plan_file))
        elif config is not None or overrides:
            source = config or run.path / rundir.CONFIG_FILE
            followed = rundir.followed_plan(run)
            if config is not None and followed is not None:
                overrides = following(config, overrides, followed)
            where = Where(config.parent if config else run.base_dir, allow_drift)
            wanted, _ = load_experiment(source, overrides, where)
            rundir.check_drift(experiment, wanted, allow=allow_drift)
            _check_resumable(run, experiment, wanted)
            rundir.adopt(run, wanted)
            experiment = wanted
        else:
            _check_resumable(run, experiment, experiment)
            if allow_drift:  # a file of the user's may have changed: so it does from now on
                rundir.adopt(run, experiment)
    _run(experiment, run, began_unix_s, resume=resume_dir is not None, plain=plain)


def _check_resumable(run, saved, wanted) -> None:  # type: ignore[no-untyped-def]
    from geo_ray.cli.ending import name_run
    from geo_ray.errors import GeoRayError
    from geo_ray.job.resumption import check_resumable

    try:
        check_resumable(run, saved, wanted)
    except GeoRayError as error:
        raise name_run(error, run.path) from error


def _run(  # type: ignore[no-untyped-def]
    experiment, run, began_unix_s: float, *, resume: bool, plain: bool
) -> None:
    from rich.console import Console

    from geo_ray.cli.ending import forget_unused, name_run, show_end, show_failure
    from geo_ray.errors import GeoRayError
    from geo_ray.observe.progress import Progress
    from geo_ray.runtime.control.train import Reporting
    from geo_ray.runtime.control.train import train as run_to_end

    console = Console(stderr=True)
    per_step = {
        r.name: 1 if experiment.train.mode == "sync" else r.workers for r in experiment.regions
    }
    total_steps = experiment.train.steps * max(per_step.values())
    with Progress(
        total_steps, experiment.region_names, console, True if plain else None
    ) as progress:
        reporting = Reporting(progress.status, [progress.feed], began_unix_s, progress.awaiting)
        try:
            summary = run_to_end(experiment, run, reporting, resume=resume)
        except GeoRayError as error:
            show_failure(run.path)
            raise name_run(error, run.path) from error
        finally:
            if not resume:
                forget_unused(run.path)
        progress.status("")
    show_end(summary, run.path)
