"""`geo-ray export`: exports the trained model for PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import RunRef, RunReference, loading, run_directory, telling

if TYPE_CHECKING:
    from geo_ray.runs.model_export import ExportFormat


_FORMATS = ("safetensors", "pt", "hf", "adapter", "dcp")


@click.command(short_help="Export the model of RUN to a file or directory.")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Output file: model.safetensors, or model.pt for torch.load(..., weights_only=True). "
    "A new directory for --format hf, adapter and dcp.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="Format; default: by the suffix of --out. hf: directory for from_pretrained of "
    "transformers. adapter: directory for PeftModel.from_pretrained. dcp: directory for "
    "torch.distributed.checkpoint.load.",
)
@click.option(
    "--from", "checkpoint", type=int, metavar="ID", help="Export the model of this checkpoint."
)
@click.option("--best", is_flag=True, help="Export the best model, saved by train.keep_best.")
def export(
    run_dir: RunRef, out: Path, form: ExportFormat | None, checkpoint: int | None, best: bool
) -> None:
    """Export the final model of RUN, its best model, or the model of a checkpoint."""
    loading("torch", "geo_ray.api.run")
    import geo_ray

    with telling(f"exporting {run_dir}"):
        path = geo_ray.open_run(run_dir).export(out, checkpoint, best=best, format=form)
    click.echo(f"model    {path}")
