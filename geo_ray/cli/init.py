"""`geo-ray init`: writes a project that runs without changes."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Write a project that runs without changes into DIRECTORY.")
@click.argument("directory", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--from",
    "starter",
    type=click.Choice(["quickstart", "csv", "language_model", "own"]),
    default="quickstart",
    show_default=True,
    help="Template of the project.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
def init(directory: Path, starter: str, force: bool) -> None:
    """Write a project into DIRECTORY: configuration, task and README. It runs without changes."""
    from geo_ray.api.config import init_project

    files = init_project(directory, starter, force=force)
    for path in files:
        click.echo(f"written  {path}")
    config = next(path for path in sorted(files, reverse=True) if path.suffix == ".yaml")
    click.echo(f"next     geo-ray simulate {config}")
