"""`geo-ray`: the command line's root, and where errors become text and exit codes."""

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
"""When the user's command began, as near as Python can tell."""

_COMMANDS: Final = {
    "init": "Write a project into DIRECTORY that runs as it is.",
    "train": "Train as CONFIG says, or go on with a run.",
    "simulate": "Train as CONFIG says, on emulated links and a virtual clock.",
    "compare": "Run CONFIG's workload with several strategies.",
    "tune": "Search for the values with which a job is soonest or cheapest.",
    "program": "Draw, price, simulate or run a job that is written as a program.",
    "profile": "Measure the job of CONFIG, for `geo-ray plan`.",
    "plan": "Choose machines and more for CONFIG, by time and money.",
    "inventory": "Show what could be rented, as Terraform's outputs have it.",
    "config": "Show a configuration or its keys.",
    "check": "Check a strategy, a codec or a task of your own.",
    "data": "Write and check training data, a shard set per region.",
    "probe": "Measure goodput, round trips and loss of links.",
    "certs": "Make the certificates by which regions know each other.",
    "checkpoints": "List the checkpoints of RUN.",
    "stop": "Save RUN, wherever it goes on, and stop it.",
    "members": "Show the regions that take part in RUN, or change which do.",
    "status": "Say how RUN or CLUSTER stands.",
    "watch": "Show RUN, or a QUEUE, as it goes, on a page or in the terminal.",
    "events": "Hand the events of RUN to other programs.",
    "dashboards": "Write files for Grafana and Prometheus into DIR.",
    "report": "Write one HTML page about RUN and print its path.",
    "export": "Write the model of RUN as a file of its own.",
    "schedule": "Replay a trace of jobs under several policies.",
    "queue": "Jobs on a shared cluster, in a queue.",
    "prices": "Show the known prices, or ask a cloud for its present ones.",
    "lab": "Run regions as network namespaces joined by emulated links.",
    "up": "Make the cluster of CONFIG.",
    "down": "End CLUSTER, and all that it has rented.",
}
"""Every command with the line that `geo-ray --help` shows; the module `geo_ray.cli.NAME` has it."""

_OUTLIVING = frozenset(("train", "simulate", "compare", "tune", "program", "profile", "up", "down"))
"""Commands that continue when the terminal closes: they do more than show something."""


class _Commands(click.Group):
    """Imports a command when it is called; `--help` imports none."""

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
        """Resolve as click does, but suggest a name that is near to an unknown one."""
        command = args[0]
        near = nearest_word(command, _COMMANDS)
        if near is not None and command not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"there is no command '{command}'; did you mean {near}?")
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
    """Run the command line; errors are printed with their fix and give the exit code."""
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
    """Ends the process at exit without tearing the interpreter down.

    Destroying the objects of PyTorch and Ray takes seconds in which the terminal would wait. This
    is the first exit handler that is registered and therefore the last to run: all threads have
    been joined and all other handlers have run before.

    Attributes:
        code: exit code; that of a crash until the command has ended.
    """

    def __init__(self) -> None:
        self.code = 1

    def __call__(self) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads, or it is closed
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
        click.echo("stopped at once", err=True)
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
