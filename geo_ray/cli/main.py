"""`geo-ray`: root of the command line; converts errors to text and exit codes."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

import click

from geo_ray.base.clock import COMMAND_BEGAN_UNIX_S
from geo_ray.base.errors import GeoRayError, InterruptedRunError
from geo_ray.base.output import terminal_outlived
from geo_ray.base.text import nearest_word, printable
from geo_ray.base.version import __version__, source_commit

BEGAN_UNIX_S = time.time()
"""Start time of the user's command, as accurately as Python can determine it."""

_COMMANDS: Final = {
    "init": "Write a project that runs without changes into DIRECTORY.",
    "train": "Train with CONFIG, or resume a run.",
    "serve": "Serve the run of CONFIG to regions that join it from their own training loops.",
    "simulate": "Simulate the training of CONFIG on emulated links and a virtual clock.",
    "compare": "Run CONFIG's workload with several strategies.",
    "tune": "Search for the fastest or cheapest configuration of a job.",
    "program": "Draw, price, simulate or run a program.",
    "profile": "Measure the job of CONFIG for `geo-ray plan`.",
    "plan": "Choose machines and settings for CONFIG by time and cost.",
    "inventory": "Show the machines that a Terraform stack offers.",
    "config": "Show a configuration or its keys.",
    "check": "Check a custom strategy, codec or task.",
    "data": "Write and check training data: one set of shards per region.",
    "probe": "Measure goodput, round trips and loss of links.",
    "certs": "Manage the certificates of a deployment.",
    "checkpoints": "List the checkpoints of RUN.",
    "stop": "Save RUN and stop it, wherever it runs.",
    "members": "Show the member regions of RUN, or change them.",
    "status": "Show the state of RUN or CLUSTER.",
    "watch": "Show live progress of RUN or QUEUE, on a page or in the terminal.",
    "events": "Export the events of RUN to other programs.",
    "dashboards": "Write files for Grafana and Prometheus into DIR.",
    "report": "Write an HTML report of RUN and print its path.",
    "export": "Export the model of RUN to a file or directory.",
    "schedule": "Replay a job trace under several policies.",
    "queue": "Manage a queue of jobs on a shared cluster.",
    "prices": "Show the known prices, or fetch the current ones from a cloud.",
    "lab": "Emulate regions as network namespaces joined by emulated links.",
    "up": "Create the cluster of CONFIG.",
    "down": "Delete CLUSTER and all its machines.",
}
"""Summary by command, shown by `geo-ray --help`; the module is `geo_ray.cli.NAME`."""

_OUTLIVING = frozenset(
    ("train", "serve", "simulate", "compare", "tune", "program", "profile", "up", "down")
)
"""Commands that continue when the terminal closes, because they do more than show output."""


class _Commands(click.Group):
    """A group that imports a command when it is called; `--help` imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"geo_ray.cli.{cmd_name}"), cmd_name)
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; suggest the nearest name for an unknown one."""
        command = args[0]
        near = nearest_word(command, _COMMANDS)
        if near is not None and command not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"no command '{command}'; did you mean {near}?")
        return super().resolve_command(ctx, args)


def _show_version(context: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"geo-ray {__version__} (commit {source_commit()})")
        context.exit()


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the commit, and exit.",
)
@click.pass_context
def root(context: click.Context) -> None:
    """Train one PyTorch model on data that must stay in several cloud regions."""
    from geo_ray.base.overrides import CALLED

    called, began = CALLED.set("--set"), COMMAND_BEGAN_UNIX_S.set(BEGAN_UNIX_S)
    context.call_on_close(partial(CALLED.reset, called))
    context.call_on_close(partial(COMMAND_BEGAN_UNIX_S.reset, began))


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; print errors with their fix and exit with their code."""
    if arguments is not None:
        return _outliving(arguments)
    leaving = _QuickExit()
    atexit.register(leaving)
    try:
        code = _outliving(sys.argv[1:])
    except SystemExit as error:
        leaving.code = error.code if isinstance(error.code, int) else 1
        raise
    leaving.code = code if isinstance(code, int) else 0
    return code


class _QuickExit:
    """Exits the process at interpreter exit without tearing the interpreter down.

    Destroying the objects of PyTorch and Ray takes seconds during which the terminal would wait.
    The handler is registered first and therefore runs last: all threads have been joined and all
    other handlers have run.

    Attributes:
        code: exit code; that of a crash until the command has ended.
    """

    def __init__(self) -> None:
        self.code = 1

    def __call__(self) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
                stream.flush()
        os._exit(self.code)


def _outliving(given: list[str]) -> Any:
    outlives = terminal_outlived() if _OUTLIVING.intersection(given[:1]) else nullcontext()
    with outlives:
        return _main(given)


def _main(arguments: list[str]) -> Any:
    try:
        # click's own mode would turn Ctrl-C into "Aborted!" with exit code 1
        return root.main(args=arguments, prog_name="geo-ray", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except InterruptedRunError as error:
        click.echo(printable(f"stopped: {error.message}\n  {error.fix}"), err=True)
        sys.exit(error.exit_code)
    except GeoRayError as error:
        click.secho(printable(f"error {error}"), fg="red", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
