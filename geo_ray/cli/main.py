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
from typing import Any

import click

from geo_ray.base.clock import COMMAND_BEGAN_UNIX_S
from geo_ray.base.errors import GeoRayError, InterruptedRunError
from geo_ray.base.output import terminal_outlived
from geo_ray.base.text import nearest_word, printable
from geo_ray.base.version import __version__

_BEGAN_UNIX_S = time.time()
"""When the user's command began, as near as Python can tell."""

_VERBS = {
    "init": ("geo_ray.cli.init", "init"),
    "train": ("geo_ray.cli.train", "train"),
    "simulate": ("geo_ray.cli.simulate", "simulate"),
    "compare": ("geo_ray.cli.compare", "compare"),
    "tune": ("geo_ray.cli.tune", "tune"),
    "program": ("geo_ray.cli.program", "program"),
    "profile": ("geo_ray.cli.profile", "profile"),
    "plan": ("geo_ray.cli.plan", "plan"),
    "inventory": ("geo_ray.cli.inventory", "inventory"),
    "config": ("geo_ray.cli.config", "config"),
    "check": ("geo_ray.cli.check", "check"),
    "data": ("geo_ray.cli.data", "data"),
    "probe": ("geo_ray.cli.probe", "probe"),
    "certs": ("geo_ray.cli.certs", "certs"),
    "checkpoints": ("geo_ray.cli.checkpoints", "checkpoints"),
    "stop": ("geo_ray.cli.stop", "stop"),
    "members": ("geo_ray.cli.members", "members"),
    "status": ("geo_ray.cli.status", "status"),
    "watch": ("geo_ray.cli.watch", "watch"),
    "events": ("geo_ray.cli.events", "events"),
    "dashboards": ("geo_ray.cli.dashboards", "dashboards"),
    "report": ("geo_ray.cli.report", "report"),
    "export": ("geo_ray.cli.export", "export"),
    "schedule": ("geo_ray.cli.schedule", "schedule"),
    "queue": ("geo_ray.cli.queue", "queue"),
    "prices": ("geo_ray.cli.prices", "prices"),
    "lab": ("geo_ray.cli.lab", "lab"),
    "up": ("geo_ray.cli.up", "up"),
    "down": ("geo_ray.cli.down", "down"),
}


_VERBS_THAT_OUTLIVE = frozenset(
    ("train", "simulate", "compare", "tune", "program", "profile", "up", "down")
)
"""Verbs that do something beside showing it: they go on if nobody reads what they show."""


class _Verbs(click.Group):
    """Imports a verb only when it is asked for, so that `--help` does not wait for PyTorch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, name = _VERBS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, which does not know the verbs that are not imported yet."""
        verb = args[0]
        near = nearest_word(verb, _VERBS)
        if near is not None and verb not in _VERBS and not ctx.resilient_parsing:
            ctx.fail(f"there is no verb '{verb}'; did you mean {near}?")
        return super().resolve_command(ctx, args)


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="geo-ray")
@click.pass_context
def root(context: click.Context) -> None:
    """Train one PyTorch model on data that must stay in several cloud regions."""
    from geo_ray.base.overrides import CALLED

    called, began = CALLED.set("--set"), COMMAND_BEGAN_UNIX_S.set(_BEGAN_UNIX_S)
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
    outlives = terminal_outlived() if _VERBS_THAT_OUTLIVE.intersection(given[:1]) else nullcontext()
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
