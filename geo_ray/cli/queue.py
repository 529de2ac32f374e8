"""`geo-ray queue`: jobs on a shared cluster, in a queue that decides who has what when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from geo_ray.cli.paths import config_file, loading
from geo_ray.cli.say import say, say_json

if TYPE_CHECKING:
    from geo_ray.api.queue.jobs import QueueAnswer, QueueUser

_queue = click.argument("queue", metavar="QUEUE")
_wait = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Longest wait in seconds for the queue to hear of it.",
)
_tenant = click.option(
    "--tenant", envvar="GEO_RAY_QUEUE_TENANT", required=True, help="Whose name this is asked in."
)
_token = click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With the tenant's token.  [default: the variable GEO_RAY_QUEUE_TOKEN]",
)
_worth = click.option(
    "--worth",
    type=click.FloatRange(min=0, min_open=True),
    help="Of the job, done at once.  [a new job: 1]",
)
_deadline = click.option(
    "--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True),
    help="Seconds from the submission to when half of the worth is gone.  [a new job: none]",
)  # fmt: skip
_urgency = click.option(
    "--urgency",
    type=click.FloatRange(min=0),
    help="Per slot: 0 does not mind, 1 minds, 5 is worth nothing when late.  [a new job: 2]",
)


@click.group("queue", short_help="Jobs on a shared cluster, in a queue.")
def queue() -> None:
    """Jobs on a shared cluster, in a queue that decides who has what when.

    QUEUE is the queue's folder, an s3:// address, or its configuration. docs/queue.md.
    """


@queue.command("start")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option("--address", default="auto", show_default=True, help="Of the cluster's head.")
def start(config: Path, overrides: tuple[str, ...], address: str) -> None:
    """Serve the queue of CONFIG from the cluster, until `geo-ray queue stop`."""
    loading("torch", "ray", "geo_ray.api.queue.serve")
    click.echo(f"reading {config}, and asking the cluster", err=True)
    import geo_ray

    place = geo_ray.start_queue(config, overrides, address=address)
    click.echo(f"served   {place}")
    click.echo(f"next     geo-ray queue submit {place} CONFIG, and geo-ray watch {place}", err=True)


@queue.command("stop")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option("--address", default="auto", show_default=True, help="Of the cluster's head.")
def stop(config: Path, overrides: tuple[str, ...], address: str) -> None:
    """Serve the queue of CONFIG no more. Its jobs go on."""
    loading("torch", "ray", "geo_ray.api.queue.serve")
    click.echo(f"reading {config}, and asking the cluster", err=True)
    import geo_ray

    was = geo_ray.stop_queue(config, overrides, address=address)
    click.echo("not served any more; jobs that run go on" if was else "nobody serves it")


@queue.command("token")
def token() -> None:
    """Make a token for a tenant, and the key for the queue's configuration."""
    import geo_ray

    secret, key = geo_ray.new_queue_token()
    click.echo(f"token    {secret}")
    click.echo(f"key      {key}")
    click.echo("The token is the tenant's secret; the key goes into tenants.NAME.key.", err=True)


@queue.command("submit")
@_queue
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@click.option("--name", help="Of the job.  [default: the configuration's]")
@_worth
@_deadline
@_urgency
@click.option("--rows-per-s", type=click.FloatRange(min=0, min_open=True), help="Of a worker.")
@click.option("--anywhere", is_flag=True, help="The job's data are in every region of the queue.")
@click.option("--most-workers", type=click.IntRange(1), help="In all.  [default: as configured]")
@click.option(
    "--working-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Own code, below the tenant's working_dirs.",
)
@_tenant
@_token
@_wait
def submit(
    queue: str,
    config: Path,
    overrides: tuple[str, ...],
    name: str | None,
    worth: float | None,
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
    """Submit what CONFIG trains, as a job of QUEUE."""
    loading("torch", "geo_ray.api.queue.jobs")
    user = _user(tenant, token_file)
    click.echo(f"reading {config}, and asking {queue}", err=True)
    import geo_ray
    from geo_ray.api.queue.jobs import JobHints, JobWorth

    answer = geo_ray.submit_job(
        queue,
        config,
        overrides,
        user=user,
        name=name,
        worth=JobWorth(**_said(worth, deadline_s, urgency)),
        hints=JobHints(rows_per_s, anywhere, most_workers),
        working_dir=working_dir,
        wait_s=wait_s,
    )
    _show(answer, "taken in; the next slot decides about it")


@queue.command("list")
@_queue
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--all", "with_ended", is_flag=True, help="Also jobs that ended long ago.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page, too.")
def list_jobs(queue: str, as_json: bool, with_ended: bool, page: Path | None) -> None:
    """Show the jobs of QUEUE: who runs, who waits, and why."""
    click.echo(f"reading {queue}", err=True)
    import geo_ray
    from geo_ray.cli.tables.queue import jobs_table, queue_line, wide_console

    report = geo_ray.queue_report(queue)
    if page is not None:
        click.echo(f"page     {geo_ray.save_queue_page(queue, page)}", err=True)
    if as_json:
        say_json(report.model_dump_json(indent=2))
        return
    console = wide_console()
    console.print(jobs_table(report, with_ended=with_ended))
    say(queue_line(report))


@queue.command("show")
@_queue
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def show(queue: str, job: str, as_json: bool) -> None:
    """Show JOB of QUEUE: what it had when, how far it is, what it is worth."""
    click.echo(f"reading {queue}", err=True)
    import geo_ray
    from geo_ray.cli.tables.queue import job_lines
    from geo_ray.errors import QueueRequestError

    report = geo_ray.queue_report(queue)
    row = report.job(job)
    if row is None:
        known = ", ".join(each.name for each in report.jobs) or "none"
        raise QueueRequestError(f"there is no job {job}; jobs are: {known}")
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
    """Cancel JOB of QUEUE; one that runs is saved first."""
    user = _user(tenant, token_file)
    click.echo(f"asking {queue}", err=True)
    import geo_ray

    _show(geo_ray.cancel_job(queue, job, user=user, wait_s=wait_s), "cancelled")


@queue.command("move")
@_queue
@click.argument("job")
@click.option("--first", "place", flag_value="first", help="Before all others.")
@click.option("--last", "place", flag_value="last", help="Behind all others.")
@click.option("--before", metavar="OTHER", help="Before this job.")
@_worth
@_deadline
@_urgency
@_tenant
@_token
@_wait
def move(
    queue: str,
    job: str,
    place: str | None,
    before: str | None,
    worth: float | None,
    deadline_s: float | None,
    urgency: float | None,
    tenant: str,
    token_file: Path | None,
    wait_s: float,
) -> None:
    """Change the place of JOB in QUEUE, or what it is worth. What is not named stays as it was.

    Places count for policies that go by order (fifo), worth and deadline for those that go by them
    (pd_ors). A job passes others' only in an operator's name.
    """
    user = _user(tenant, token_file)
    click.echo(f"asking {queue}", err=True)
    import geo_ray

    change = _said(worth, deadline_s, urgency)
    answer = geo_ray.move_job(
        queue,
        job,
        user=user,
        place=place,  # type: ignore[arg-type]  # click has checked it
        before=before,
        worth=geo_ray.WorthChange(**change) if change else None,
        wait_s=wait_s,
    )
    _show(answer, "moved; it counts from the next slot on")
    row = geo_ray.queue_report(queue).job(job) if answer.is_taken and change else None
    if row is not None:
        from geo_ray.cli.tables.queue import worth_line

        click.echo(worth_line(row))


def _user(tenant: str, token_file: Path | None) -> QueueUser:
    import os

    from geo_ray.api.queue.jobs import QueueUser
    from geo_ray.errors import QueueDeniedError

    token = os.environ.get("GEO_RAY_QUEUE_TOKEN")
    if token_file is not None:
        token = token_file.read_text()
    if not token:
        raise QueueDeniedError(
            f"no token of tenant {tenant} is given",
            fix="Name a file with --token-file, or set GEO_RAY_QUEUE_TOKEN.",
        )
    return QueueUser(tenant, token.strip())


def _said(worth: float | None, deadline_s: float | None, urgency: float | None) -> dict[str, float]:
    said = {"worth": worth, "deadline_s": deadline_s, "urgency": urgency}
    return {key: value for key, value in said.items() if value is not None}


def _show(answer: QueueAnswer, text: str) -> None:
    if answer.is_taken:
        click.echo(text)
    else:
        click.echo("it lies in the tenant's box: nobody serves the queue at this moment")
