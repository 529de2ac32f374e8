"""`geo-ray queue`: manages jobs in the queue of a shared cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console

from geo_ray.base.tables import FittedTable
from geo_ray.base.text import coarse_text, duration_text, number_text
from geo_ray.cli.paths import config_file, loading
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.api.queue import QueueAnswer, QueueUser
    from geo_ray.scheduler.queue.report import QueueJobRow, QueueReport


_WIDTH: Final = 150
_ENDED: Final = 10


def wide_console() -> Console:
    """Return the console for tables of jobs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH))


def jobs_table(report: QueueReport, *, with_ended: bool = False) -> FittedTable:
    """Print a line per job."""
    table = FittedTable(
        leave_out=("speed", "utility", "starts", "value", "ends"),
        whole=("state",),
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in ("job", "tenant", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "deadline", "done", "ends", "speed", "starts", "utility"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    ended = [row for row in report.jobs if row.state == "ended"]
    hidden = set() if with_ended else {row.name for row in ended[:-_ENDED]}
    for row in report.jobs:
        if row.name in hidden:
            continue
        cells = (
            row.name,
            row.tenant,
            _state(report, row),
            f"{row.value:g}",
            _deadline_text(row),
            f"{row.done:.0%}",
            "" if report.is_served is False else _ends(row),
            f"{row.factor:.2f}",
            str(row.attempts),
            "" if row.utility is None else number_text(row.utility),
            row.message if row.code is None else f"{row.code}: {row.message}",
        )
        table.add_row(*cells)
    return table


def queue_line(report: QueueReport) -> str:
    """Return a line about the queue."""
    capacity = "; ".join(
        f"{name} {cpus:g} CPUs" + (f", {gpus:g} GPUs" if gpus else "")
        for name, (gpus, cpus) in report.capacity.items()
    )
    ago = coarse_text(max(0.0, time.time() - report.written_unix_s))
    slot = "no slot yet" if report.slot is None else f"slot {report.slot}"
    return (
        f"{report.name}: {report.policy}, {slot} of {duration_text(report.slot_s)}; "
        f"{capacity or 'no machines'}; written {ago} ago"
        + ("; not served: nothing changes" if report.is_served is False else "")
    )


def value_line(row: QueueJobRow) -> str:
    """Return the line that shows the value of a job."""
    deadline_s = row.deadline_s
    half = "" if deadline_s is None else f", half of it after {duration_text(deadline_s)}"
    return f"value    {row.value:g}{half}"


def job_lines(report: QueueReport, row: QueueJobRow) -> list[str]:
    """Return the lines of `geo-ray queue show`."""
    from geo_ray.scheduler.queue.slots import workers_text

    state = _state(report, row)
    lines = [
        f"job      {row.name} of tenant {row.tenant}: {state}"
        + (f", {row.message}" if row.message else ""),
        f"run      {report.runs}/{row.id}",
        value_line(row) + ("" if row.utility is None else f"; achieved {number_text(row.utility)}"),
        f"done     {row.done:.1%}, {row.factor:.2f} times the estimated speed",
        f"starts   {row.attempts}",
    ]
    for each in row.segments:
        since_s = each.since_unix_s - row.submitted_unix_s
        until = "now" if each.until_unix_s is None else duration_text(
            each.until_unix_s - row.submitted_unix_s
        )  # fmt: skip
        lines.append(f"had      {duration_text(since_s)} to {until}: {workers_text(each.workers)}")
    for each in row.planned:
        since_s = each.since_unix_s - row.submitted_unix_s
        until = "later" if each.until_unix_s is None else duration_text(
            each.until_unix_s - row.submitted_unix_s
        )  # fmt: skip
        lines.append(f"will     {duration_text(since_s)} to {until}: {workers_text(each.workers)}")
    if report.is_served is False and row.state != "ended":
        lines.append("         the queue is not served: nothing changes until then")
    return lines


def _state(report: QueueReport, row: QueueJobRow) -> str:
    """Return the state of a job; if the queue is not served, its last state."""
    state = row.outcome or row.state
    goes = row.state in ("running", "leaving")
    return f"was {state}" if goes and report.is_served is False else state


def _ends(row: QueueJobRow) -> str:
    ends_s = row.ends_unix_s
    return "" if ends_s is None else f"in {coarse_text(max(0.0, ends_s - time.time()))}"


def _deadline_text(row: QueueJobRow) -> str:
    if row.deadline_s is None:
        return "none"
    if row.ended_unix_s is not None:
        return f"after {duration_text(row.deadline_s)}"
    left_s = row.submitted_unix_s + row.deadline_s - time.time()
    return f"in {coarse_text(left_s)}" if left_s > 0 else "over"


_queue = click.argument("queue", metavar="QUEUE")
_wait = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Timeout in seconds for the queue to accept the request.",
)
_tenant = click.option(
    "--tenant", envvar="GEO_RAY_QUEUE_TENANT", required=True, help="Tenant of the request."
)
_token = click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the tenant's token.  [default: the variable GEO_RAY_QUEUE_TOKEN]",
)
_value = click.option(
    "--value",
    type=click.FloatRange(min=0, min_open=True),
    help="Value of the job if it finishes at once.  [a new job: 1]",
)
_deadline = click.option(
    "--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True),
    help="Seconds after submission at which half of the value is lost.  [a new job: none]",
)  # fmt: skip
_urgency = click.option(
    "--urgency",
    type=click.FloatRange(min=0),
    help="Decay per slot: 0 none, 1 moderate, 5 no value when late.  [a new job: 2]",
)


@click.group("queue", short_help="Manage a queue of jobs on a shared cluster.")
def queue() -> None:
    """Manage a queue of jobs on a shared cluster.

    QUEUE is the queue's directory, an s3:// address, or its configuration:
    docs/operations/queue.md.
    """


@queue.command("start")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option("--address", default="auto", show_default=True, help="Address of the cluster's head.")
def start(config: Path, overrides: tuple[str, ...], address: str) -> None:
    """Serve the queue of CONFIG from the cluster, until `geo-ray queue stop`."""
    loading("torch", "ray", "geo_ray.api.queue")
    click.echo(f"reading {config} and querying the cluster", err=True)
    from geo_ray.api.queue import start_queue

    place = start_queue(config, overrides, address=address)
    click.echo(f"served   {place}")
    click.echo(f"next     geo-ray queue submit {place} CONFIG, and geo-ray watch {place}", err=True)


@queue.command("stop")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option("--address", default="auto", show_default=True, help="Address of the cluster's head.")
def stop(config: Path, overrides: tuple[str, ...], address: str) -> None:
    """Stop serving the queue of CONFIG. Its jobs continue."""
    loading("torch", "ray", "geo_ray.api.queue")
    click.echo(f"reading {config} and querying the cluster", err=True)
    from geo_ray.api.queue import stop_queue

    was = stop_queue(config, overrides, address=address)
    click.echo("stopped serving; running jobs continue" if was else "the queue is not served")


@queue.command("token")
def token() -> None:
    """Create a token for a tenant, and the key for the queue's configuration."""
    from geo_ray.api.queue import new_queue_token

    secret, key = new_queue_token()
    click.echo(f"token    {secret}")
    click.echo(f"key      {key}")
    click.echo("The token is the tenant's secret; put the key into tenants.NAME.key.", err=True)


@queue.command("submit")
@_queue
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option("--name", help="Name of the job.  [default: that of CONFIG]")
@_value
@_deadline
@_urgency
@click.option(
    "--rows-per-s", type=click.FloatRange(min=0, min_open=True), help="Speed of a worker."
)
@click.option("--anywhere", is_flag=True, help="The job's data are in every region of the queue.")
@click.option(
    "--most-workers",
    type=click.IntRange(1),
    help="Maximum number of workers.  [default: as configured]",
)
@click.option(
    "--working-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Custom code, below the tenant's working_dirs.",
)
@_tenant
@_token
@_wait
def submit(
    queue: str,
    config: Path,
    overrides: tuple[str, ...],
    name: str | None,
    value: float | None,
    deadline_s: float | None,
    urgency: float | None,
    rows_per_s: float | None,
    anywhere: bool,
    most_workers: int | None,
    working_dir: Path | None,
    tenant: str,
    token_file: Path | None,
    wait_s: float,
) -> None:
    """Submit the training of CONFIG as a job to QUEUE."""
    loading("torch", "geo_ray.api.queue")
    user = _user(tenant, token_file)
    click.echo(f"reading {config} and querying {queue}", err=True)
    from geo_ray.api.queue import submit_job
    from geo_ray.scheduler.queue.job_spec import JobHints, JobValue

    answer = submit_job(
        queue,
        config,
        overrides,
        user=user,
        name=name,
        value=JobValue(**_said(value, deadline_s, urgency)),
        hints=JobHints(rows_per_s, anywhere, most_workers),
        working_dir=working_dir,
        wait_s=wait_s,
    )
    _show(answer, "accepted; the next slot decides about it")


@queue.command("list")
@_queue
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--all", "with_ended", is_flag=True, help="Include jobs that ended long ago.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page.")
def list_jobs(queue: str, as_json: bool, with_ended: bool, page: Path | None) -> None:
    """Show the running and waiting jobs of QUEUE, and why they wait."""
    click.echo(f"reading {queue}", err=True)
    from geo_ray.api.queue import queue_report, save_queue_page

    report = queue_report(queue)
    if page is not None:
        click.echo(f"page     {save_queue_page(queue, page)}", err=True)
    if as_json:
        say_json(report.model_dump_json(indent=2))
        return
    console = wide_console()
    console.print(jobs_table(report, with_ended=with_ended))
    say(queue_line(report))


@queue.command("show")
@_queue
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def show(queue: str, job: str, as_json: bool) -> None:
    """Show JOB of QUEUE: its machines over time, its progress and its value."""
    click.echo(f"reading {queue}", err=True)
    from geo_ray.api.queue import queue_report
    from geo_ray.base.errors import QueueRequestError

    report = queue_report(queue)
    row = report.job(job)
    if row is None:
        known = ", ".join(each.name for each in report.jobs) or "none"
        raise QueueRequestError(f"no job {job}; the jobs are: {known}")
    if as_json:
        say_json(row.model_dump_json(indent=2))
        return
    for line in job_lines(report, row):
        say(line)


@queue.command("cancel")
@_queue
@click.argument("job")
@_tenant
@_token
@_wait
def cancel(queue: str, job: str, tenant: str, token_file: Path | None, wait_s: float) -> None:
    """Cancel JOB of QUEUE; a running job is saved first."""
    user = _user(tenant, token_file)
    click.echo(f"asking {queue}", err=True)
    from geo_ray.api.queue import cancel_job

    _show(cancel_job(queue, job, user=user, wait_s=wait_s), "cancelled")


@queue.command("move")
@_queue
@click.argument("job")
@click.option("--first", "position", flag_value="first", help="Place the job first.")
@click.option("--last", "position", flag_value="last", help="Place the job last.")
@click.option("--before", metavar="OTHER", help="Place the job before this job.")
@_value
@_deadline
@_urgency
@_tenant
@_token
@_wait
def move(
    queue: str,
    job: str,
    position: str | None,
    before: str | None,
    value: float | None,
    deadline_s: float | None,
    urgency: float | None,
    tenant: str,
    token_file: Path | None,
    wait_s: float,
) -> None:
    """Change the position, value or deadline of JOB in QUEUE. Omitted options stay unchanged.

    Positions apply to policies that use the order (fifo), value and deadline to policies that use
    them (pd_ors). Only an operator can move a job ahead of other tenants' jobs.
    """
    user = _user(tenant, token_file)
    click.echo(f"asking {queue}", err=True)
    from geo_ray.api.queue import move_job, queue_report
    from geo_ray.scheduler.queue.job_spec import ValueChange

    change = _said(value, deadline_s, urgency)
    answer = move_job(
        queue,
        job,
        user=user,
        position=position,  # type: ignore[arg-type]  # click has checked it
        before=before,
        value=ValueChange(**change) if change else None,
        wait_s=wait_s,
    )
    _show(answer, "moved; effective from the next slot")
    row = queue_report(queue).job(job) if answer.is_processed and change else None
    if row is not None:
        click.echo(value_line(row))


def _user(tenant: str, token_file: Path | None) -> QueueUser:
    import os

    from geo_ray.api.queue import QueueUser
    from geo_ray.base.errors import QueueDeniedError

    token = os.environ.get("GEO_RAY_QUEUE_TOKEN")
    if token_file is not None:
        token = token_file.read_text()
    if not token:
        raise QueueDeniedError(
            f"no token for tenant {tenant}",
            fix="Give a file with --token-file, or set GEO_RAY_QUEUE_TOKEN.",
        )
    return QueueUser(tenant, token.strip())


def _said(value: float | None, deadline_s: float | None, urgency: float | None) -> dict[str, float]:
    said = {"value": value, "deadline_s": deadline_s, "urgency": urgency}
    return {key: value for key, value in said.items() if value is not None}


def _show(answer: QueueAnswer, text: str) -> None:
    if answer.is_processed:
        click.echo(text)
    else:
        click.echo("stored in the tenant's inbox: the queue is not being served")
