"""`geo-ray dashboards`: writes files for Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("dashboards")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def dashboards(folder: Path) -> None:
    """Write files for Grafana and Prometheus into DIR.

    The files query the metrics that a run exports through Ray. Grafana: Dashboards, New, Import.
    Prometheus: add the rules to `rule_files` of its configuration.
    """
    from geo_ray.telemetry.dashboards import write_dashboards

    for path in write_dashboards(folder):
        click.echo(str(path))
