"""`geo-ray checkpoints`: lists the checkpoints of a run."""

from __future__ import annotations

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
def checkpoints(run_dir: RunRef) -> None:
    """List the checkpoints of RUN.

    `geo-ray train --resume RUN` resumes from the newest healthy checkpoint, `--from ID` from
    another.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.text import Text

    import geo_ray
    from geo_ray.api.status import directory_of
    from geo_ray.base.tables import FittedTable
    from geo_ray.base.text import bytes_text
    from geo_ray.telemetry.event_log import EVENTS_FILE, read_events

    found = geo_ray.checkpoints(run_dir).to_pylist()
    if not found:
        events = read_events(directory_of(run_dir) / EVENTS_FILE)
        simulated = any(e["simulated"] for e in events if e.kind == "run_started")
        why = ": it was simulated, and simulations write no checkpoints" if simulated else ""
        click.echo(f"{run_dir} has no checkpoint{why}")
        return
    table = FittedTable(box=SIMPLE)
    for heading in ("id", "step", "saved at", "size", "regions", "state"):
        table.add_column(heading, justify="right" if heading in ("id", "step", "size") else "left")
    for row in found:
        size = "" if row["bytes"] is None else bytes_text(row["bytes"])
        step = "" if row["step"] is None else f"{row['step']:,}"
        color = "green" if row["state"] == "healthy" else "red"
        state = Text(row["state"], color)
        table.add_row(
            str(row["id"]), step, _minute(row["created"]), size, row["regions"] or "", state
        )
    Console().print(table)


def _minute(created: str | None) -> str:
    """Return date and time of an ISO text without fractions of a second."""
    return "" if created is None else created[:16].replace("T", " ")
