"""`geo-ray train`: runs an experiment on Ray actors."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import (
    RunRef,
    RunReference,
    check_config,
    config_file,
    dry_run_option,
    loading,
    plan_option,
    run_directory,
    steps_hint,
)


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option(
    "--resume",
    "resume_dir",
    type=RunReference(),
    callback=run_directory,
    metavar="RUN",
    help="Resume a run from its newest complete and healthy checkpoint.",
)
@click.option(
    "--from",
    "checkpoint",
    type=click.IntRange(min=0),
    metavar="ID",
    help="With --resume: resume from this checkpoint; `geo-ray checkpoints RUN` lists them.",
)
@click.option(
    "--allow-change",
    "allow_changes",
    multiple=True,
    metavar="KEY|FILE",
    help="With --resume: allow CONFIG to differ from the run in KEY and the keys below it, or "
    "allow "
    "a change of FILE with a custom class. Keys of --set may always differ.",
)
@plan_option
@steps_hint
@dry_run_option
@click.option(
    "--detach",
    is_flag=True,
    help="Return as soon as the run trains; on an existing cluster.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of a live table.")
def train(
    config: Path | None,
    overrides: tuple[str, ...],
    resume_dir: RunRef | None,
    checkpoint: int | None,
    allow_changes: tuple[str, ...],
    plan_file: Path | None,
    dry_run: bool,
    detach: bool,
    plain: bool,
) -> None:
    """Train with CONFIG, or resume a run.

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once. With --resume RUN --plan
    FILE the run continues with the machines of another plan.
    """
    if resume_dir is None and config is None:
        raise click.UsageError("give a CONFIG, or a run with --resume")
    if checkpoint is not None and resume_dir is None:
        raise click.UsageError("--from ID requires --resume RUN")
    if resume_dir is not None and plan_file is not None and (config is not None or overrides):
        raise click.UsageError("--resume with --plan uses the run's own configuration: omit CONFIG")
    if dry_run and resume_dir is not None:
        raise click.UsageError("--dry-run checks a new run: omit --resume")
    if config is not None and resume_dir is None:
        check_config(config, overrides, loads_loops=True)
    loading("torch", "ray", "geo_ray.api.check" if dry_run else "geo_ray.api.train")
    if dry_run and config is not None:
        from geo_ray.cli.ending import show_check

        show_check(config, overrides, plan_file)
        return
    import geo_ray
    from geo_ray.cli.ending import show_detached, show_end

    run = geo_ray.train(
        config,
        overrides,
        resume=resume_dir,
        checkpoint=checkpoint,
        plan=plan_file,
        allow_changes=allow_changes,
        progress="plain" if plain else True,
        detach=detach,
    )
    if detach and not run.finished:
        show_detached(run)
    else:
        show_end(run)
