"""`geo-ray export`: the trained parameters for plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import RunRef, RunReference, loading, run_directory, telling


@click.command(short_help="Write the model of RUN as a file of its own.")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="model.safetensors; or model.pt, which torch.load(..., weights_only=True) reads.",
)
@click.option("--from", "checkpoint", type=int, metavar="ID", help="Of this checkpoint.")
@click.option("--best", is_flag=True, help="The best one, which train.keep_best has kept.")
def export(run_dir: RunRef, out: Path, checkpoint: int | None, best: bool) -> None:
    """Write the model of RUN, its best one, or one of a checkpoint, as a file of its own."""
    loading("torch", "geo_ray.api.run")
    import geo_ray

    with telling(f"exporting {run_dir}"):
        path = geo_ray.open_run(run_dir).export(out, checkpoint, best=best)
    click.echo(f"model    {path}")
