"""`geo-ray dashboards`: files for Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("dashboards")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def dashboards(folder: Path) -> None:
    """Write files for Grafana and Prometheus into DIR.

    They ask for the metrics that a run serves through Ray. In Grafana: Dashboards, New, Import. In
    Prometheus: `rule_files` of its configuration.
    """
    from geo_ray.telemetry.dashboards import write_dashboards

    for path in write_dashboards(folder):
        click.echo(str(path))
