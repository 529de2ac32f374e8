"""`geo-ray export`: exports the trained model for PyTorch."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import RunRef, RunReference, loading, run_directory, telling


@click.command(short_help="Export the model of RUN to a file.")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Output file: model.safetensors, or model.pt for torch.load(..., weights_only=True).",
)
@click.option(
    "--from", "checkpoint", type=int, metavar="ID", help="Export the model of this checkpoint."
)
@click.option("--best", is_flag=True, help="Export the best model, saved by train.keep_best.")
def export(run_dir: RunRef, out: Path, checkpoint: int | None, best: bool) -> None:
    """Export the final model of RUN, its best model, or the model of a checkpoint."""
    loading("torch", "geo_ray.api.run")
    import geo_ray

    with telling(f"exporting {run_dir}"):
        path = geo_ray.open_run(run_dir).export(out, checkpoint, best=best)
    click.echo(f"model    {path}")
