"""`geo-ray watch`: shows live progress of a run or queue, on a page or in the terminal."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from geo_ray.base.text import printable
from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say


def _may_begin_later(
    context: click.Context, parameter: click.Parameter, path: RunRef
) -> RunRef | None:
    """Also accept the configuration of a queue and, with --wait, a run that does not exist yet."""
    may_be_missing = bool(context.params.get("wait"))
    if isinstance(path, Path) and path.suffix in (".yaml", ".yml"):
        return path
    if isinstance(path, Path) and may_be_missing and not path.exists():
        return path
    return run_directory(context, parameter, path)


@click.command("watch")
@click.argument("run_dir", metavar="RUN|QUEUE", type=RunReference(), callback=_may_begin_later)
@click.option("--wait", is_flag=True, is_eager=True, help="Wait for RUN to start.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the page.  [default: any free port]",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--terminal", is_flag=True, help="Show progress in the terminal instead of on a page."
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    help="Seconds between two updates while the page is open.",
)
@click.option(
    "--machines", help="Directory or s3:// address with the journal of the run's autoscaler."
)
def watch(
    run_dir: RunRef,
    wait: bool,
    port: int,
    open_page: bool,
    terminal: bool,
    every_s: float,
    machines: str | None,
) -> None:
    """Show live progress of RUN or QUEUE, on a page or in the terminal.

    A run: regions and links, members, curves, cost and machines. A queue: past and planned jobs
    over time.

    The page is served on this machine only. Its printed address contains a token, which grants
    access. RUN may have ended; with --wait it may start later. Ctrl-C ends only the page.
    """
    if isinstance(run_dir, Path) and not run_dir.exists():
        click.echo(f"waiting for {run_dir} to start", err=True)
    import geo_ray
    from geo_ray.api.queue import names_queue

    if terminal and names_queue(run_dir):
        _show_queue_here(run_dir, every_s)
        return
    if terminal:
        _show_here(run_dir, every_s, machines)
        return
    with geo_ray.watch(run_dir, port=port, every_s=every_s, machines=machines) as page:
        click.echo(page.url)
        click.echo("Ctrl-C ends only the page", err=True)
        with suppress(KeyboardInterrupt):
            if open_page:
                webbrowser.open(page.url)
            page.wait()


def _show_here(run_dir: RunRef, every_s: float, machines: str | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from geo_ray.api.live import follow_view
    from geo_ray.telemetry.live.page import view_lines, view_text

    views = follow_view(run_dir, every_s=every_s, machines=machines)
    console = Console()
    if not console.is_terminal:
        shown: list[str] = []
        for view in views:
            lines = view_lines(view)
            if lines != shown:  # repeated lines are shown once
                say("\n".join(lines))
            shown = lines
        return
    with Live(auto_refresh=False, console=console) as live:
        for view in views:
            live.update(view_text(view), refresh=True)


def _show_queue_here(queue: RunRef, every_s: float) -> None:
    import time

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from geo_ray.api.queue import queue_report
    from geo_ray.cli.queue import jobs_table, queue_line, wide_console

    console = wide_console()
    with Live(auto_refresh=False, console=console) as live:
        while True:
            report = queue_report(queue)
            line = Text(printable(queue_line(report)))
            live.update(Group(jobs_table(report), line), refresh=True)
            if not console.is_terminal:
                return
            time.sleep(every_s)
