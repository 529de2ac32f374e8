"""`geo-ray watch`: a run, or a queue, as it goes, on a page or in the terminal."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from geo_ray.base.text import printable
from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say


def _may_begin_later(
    context: click.Context, parameter: click.Parameter, path: RunRef
) -> RunRef | None:
    """Take also the configuration of a queue and, with --wait, a run that is not there yet."""
    may_be_missing = bool(context.params.get("wait"))
    if isinstance(path, Path) and path.suffix in (".yaml", ".yml"):
        return path
    if isinstance(path, Path) and may_be_missing and not path.exists():
        return path
    return run_directory(context, parameter, path)


@click.command("watch")
@click.argument("run_dir", metavar="RUN|QUEUE", type=RunReference(), callback=_may_begin_later)
@click.option(
    "--wait", is_flag=True, is_eager=True, help="RUN may begin later: it is shown as soon as it is."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="To serve on; any that is free."
)
@click.option("--open", "open_page", is_flag=True, help="Show the page in the browser.")
@click.option("--terminal", is_flag=True, help="Here instead of on a page.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    help="Seconds between two looks while somebody watches.",
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
    """Show RUN, or a QUEUE, as it goes, on a page or in the terminal.

    Regions and links, members, curves, money, machines; of a queue its jobs over time, as they were
    and as they are planned.

    Serves a page on this machine alone and prints its address, which holds a token: who has it may
    look. RUN may have ended, and with --wait it may begin later. Ctrl-C ends the page, and nothing
    else.
    """
    if isinstance(run_dir, Path) and not run_dir.exists():
        click.echo(f"{run_dir} is not there yet; it is shown as soon as it is", err=True)
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
        click.echo("Ctrl-C ends the page, and nothing else", err=True)
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
            if lines != shown:  # what is awaited is told once
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
