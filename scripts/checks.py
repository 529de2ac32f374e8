"""All that `scripts/test` checks: what can be at the same time, with a summary of the parts.

A few parts run at a time; when one ends the next begins, the longest first, so that no core is left
idle before the end. The output of one part at a time is shown as it comes; that of another follows
as a whole when the screen is free. Ctrl-C is passed on: all parts clean up and end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

KILL_AFTER_S = 90.0  # after Ctrl-C; a cluster takes a while to go
POLL_S = 0.1
AT_A_TIME = 4  # those with clusters, links and contracts wait more than half of their time
NUM_SLOWEST = 20
NICE = 3  # half the share of the others
ENVIRONMENT = "environment"
LINKS = "links"  # wait for networks and stores a part of the time and need no cluster
WHOLE_RUNS = "whole runs"  # the longest that need a cluster, beside as many shorter ones
STRATEGIES = "strategies"
RUN_UNITS = "units of runs"  # the later half of the alphabet: two halves end sooner than one part
# Patterns of test files; a file belongs to the first part with a pattern that matches its path.
PARTS = {
    ENVIRONMENT: ("tests/integration/cli/test_environment.py",),
    LINKS: (
        "tests/contract/transport/test_transport*.py",
        "tests/chaos/transport/test_transport*.py",
        "tests/integration/*_in_process.py",
        "tests/integration/*_paths.py",
        "tests/integration/lab/test_lab_[clnr]*.py",
        "tests/integration/runs/test_remote_runs.py",
        "tests/integration/runs/test_store_troubles.py",
        "tests/integration/runtime/test_averager_failure.py",
        "tests/integration/runtime/test_large_updates.py",
        "tests/integration/runtime/test_overlay_rounds.py",
        "tests/integration/transport/test_udp_channel.py",
    ),
    WHOLE_RUNS: (
        "tests/chaos/*",
        "tests/integration/api/test_api_train.py",
        "tests/integration/cli/test_cluster_pages.py",
        "tests/integration/joining/test_[jors]*.py",
        "tests/integration/cloud/test_clusters_local.py",
        "tests/integration/runs/test_store_checkpoints.py",
    ),
    STRATEGIES: ("tests/contract/strategies/*",),
    "contracts": ("tests/contract/*",),
    "clusters": ("tests/integration/*",),
    "simulations": ("tests/sim/*",),
    "properties": ("tests/property/*",),
    RUN_UNITS: ("tests/unit/[r-t]*",),
    "units": ("tests/*",),
}
SITE = ["env", "NO_MKDOCS_2_WARNING=1", "mkdocs", "build", "--strict", "--quiet"]
USAGE = """\
scripts/test                    style, types and all tests but those marked slow
scripts/test --all              the slow ones too
scripts/test FEATURE... [ARGS]  the tests of features in all layers; ARGS go to pytest
scripts/test ARGS               pytest with these arguments

Features:"""
LAYERS = ("unit", "property", "contract", "sim", "integration", "chaos")


class Part:
    """A command in a session of its own, its output in a file without a name.

    Args:
        name: of the part.
        command: with its arguments.
        nice: how much less it is preferred to others, 0 to 19.
    """

    def __init__(self, name: str, command: Sequence[str], nice: int = 0) -> None:
        self.name = name
        self.status: int | None = None
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the part
        self._num_shown_bytes = 0
        self._has_heading = False
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            ["nice", "-n", str(nice), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with suppress(OSError):  # where Linux shares the cores among sessions first
            Path(f"/proc/{self._process.pid}/autogroup").write_text(str(nice))

    def has_ended(self) -> bool:
        """Says whether it has; notes how, and what it and its children used."""
        if self.status is None:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.wall_s = time.monotonic() - self._started
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it and its children, unless it has ended."""
        if not self.has_ended():
            os.killpg(self._process.pid, number)

    def show_more(self) -> None:
        """Prints what has come since the last time."""
        if not self._has_heading:
            print(f"---------- {self.name}", flush=True)
            self._has_heading = True
        text = os.pread(self._output.fileno(), 1 << 30, self._num_shown_bytes)
        self._num_shown_bytes += len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.flush()

    def result(self) -> str:
        """Returns one line on how it went and, if pytest ran, the line it closed with."""
        word = "ok" if self.status == 0 else f"FAILED (exit status {self.status})"
        own = f"{word:6} {self.name}: {self.wall_s:.0f} s, {self.cpu_s:.0f} s of CPU"
        lines = self._lines()
        return f"{own}\n{lines[-1]}" if lines and "==" in lines[-1] else own

    def skipped(self) -> list[str]:
        """Returns what pytest's short summary says of the tests that were skipped."""
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in self._lines()]
        return [line.removeprefix("SKIPPED ") for line in plain if line.startswith("SKIPPED [")]

    def slowest(self) -> list[str]:
        """Returns what `tests/conftest.py` says of the test files that took most CPU."""
        return [line for line in self._lines() if re.match(r"CPU +[\d.]+ s ", line)]

    def _lines(self) -> list[str]:
        return os.pread(self._output.fileno(), 1 << 30, 0).decode(errors="replace").splitlines()


@dataclass(frozen=True)
class Task:
    """What a part is to be; see `Part`."""

    name: str
    command: Sequence[str]
    nice: int = 0


class Checks:
    """Runs parts, shows what they print, and sums up."""

    def __init__(self) -> None:
        self._parts: list[Part] = []  # in the order of their starts
        self._unshown: list[Part] = []  # the first of them has the screen

    def run(self, tasks: Sequence[Task], at_a_time: int) -> None:
        """Runs some tasks at a time, in their order."""
        waiting = list(tasks)
        while True:
            while waiting and self._num_running() < at_a_time:
                task = waiting.pop(0)
                part = Part(task.name, task.command, task.nice)
                self._parts.append(part)
                self._unshown.append(part)
            if not self._show() and not waiting:
                return
            time.sleep(POLL_S)

    def _num_running(self) -> int:
        return sum(not part.has_ended() for part in self._parts)

    def interrupt(self) -> None:
        """Has all parts clean up and end; kills those that do not, or at once if told twice."""
        deadline = time.monotonic() + KILL_AFTER_S
        try:
            for part in self._parts:
                part.send(signal.SIGINT)
            while time.monotonic() < deadline and self._show():
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            pass
        for part in self._parts:
            part.send(signal.SIGKILL)

    def sum_up(self) -> bool:
        """Prints the skipped tests, the slowest files and how each part went, failures last.

        Returns:
            Whether all parts passed.
        """
        if skipped := [line for part in self._parts for line in part.skipped()]:
            print("---------- skipped tests")
            print(*skipped, sep="\n")
        if slowest := [line for part in self._parts for line in part.slowest()]:
            print("---------- files that took most CPU")
            print(*sorted(slowest, key=_seconds_of, reverse=True)[:NUM_SLOWEST], sep="\n")
        print("---------- all parts")
        for part in sorted(self._parts, key=lambda part: part.status != 0):
            print(part.result())
        return all(part.status == 0 for part in self._parts)

    def _show(self) -> bool:
        """Shows what a part prints until it has ended, then another; says whether any is left."""
        while self._unshown:
            part = self._unshown[0]
            ended = part.has_ended()
            part.show_more()
            if not ended:
                return True
            self._unshown.pop(0)
            self._unshown.sort(key=lambda part: not part.has_ended())  # whole ones first
        return False


def _seconds_of(line: str) -> float:
    return float(line.split()[1])


def run_all(tasks: Sequence[Task], at_a_time: int) -> int:
    """Runs the tasks and sums up; returns the exit status."""
    # A shell that begins this in the background has it ignore interrupts, and so all children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    checks = Checks()
    try:
        checks.run(tasks, at_a_time)
    except KeyboardInterrupt:
        checks.interrupt()
        checks.sum_up()
        return 130
    return 0 if checks.sum_up() else 1


def pytest(*arguments: str, slow: bool) -> list[str]:
    """Returns the command for some of the tests."""
    color = ["--color=yes"] if sys.stdout.isatty() else []
    chosen = [] if slow else ["-m", "not slow"]
    return [sys.executable, "-m", "pytest", *color, *chosen, *arguments]


def part_of(path: str) -> str:
    """Returns the part that runs a test file."""
    return next(
        part
        for part, patterns in PARTS.items()
        if any(fnmatch(path, pattern) for pattern in patterns)
    )


def files() -> dict[str, list[str]]:
    """Returns the test files of each part."""
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    for path in sorted(map(str, Path().glob("tests/**/test_*.py"))):
        found[part_of(path)].append(path)
    return found


def features() -> dict[str, list[str]]:
    """Returns the test folders of each feature, which is a package of geo_ray or one inside it."""
    found: dict[str, list[str]] = {}
    for layer in LAYERS:
        for folder in sorted(Path("tests", layer).glob("**/")):
            if folder.name not in (layer, "__pycache__"):
                found.setdefault(folder.name, []).append(str(folder))
    return dict(sorted(found.items()))


def everything(slow: bool) -> list[Task]:
    """Returns what must pass, those marked slow too or not."""
    of = files()
    of["units"] += of.pop(ENVIRONMENT)

    def tests(*parts: str, nice: int = 0) -> list[Task]:
        return [Task(part, pytest(*of[part], slow=slow), nice) for part in parts]

    # Parts that need a cluster wait half of their time, and take longest. They are preferred to the
    # others, which take the cores that those leave: the processes of a cluster keep both cores busy
    # while they start, and a head or a node that gets no turn for a minute gives up.
    return [
        Task("ruff", ["ruff", "check", "."]),  # a few seconds
        Task("format", ["ruff", "format", "--check", "."]),
        *tests("clusters", WHOLE_RUNS),
        *tests(LINKS, "simulations", "contracts", RUN_UNITS, "units", "properties", nice=NICE),
        *tests(STRATEGIES, nice=NICE),
        Task("mypy", ["mypy"], NICE),
        Task("site", SITE, NICE),
    ]


def chosen(arguments: Sequence[str]) -> list[str] | None:
    """Returns pytest's arguments where features come first, None if the first word names none."""
    known = features()
    named = list(takewhile(known.__contains__, arguments))
    rest = arguments[len(named) :]
    if rest and not rest[0].startswith("-") and not Path(rest[0].partition("::")[0]).exists():
        return None
    folders = sorted({folder for feature in named for folder in known[feature]})
    outer = [one for one in folders if not any(one.startswith(f"{other}/") for other in folders)]
    return [*(["-m", "not slow"] if named else []), *outer, *rest]


def main(arguments: Sequence[str]) -> int:
    """Runs everything, the tests of some features, or pytest with these arguments."""
    if not arguments or arguments[0] == "--all":
        return run_all(everything(slow=bool(arguments)), AT_A_TIME)
    if arguments[0] in ("-h", "--help"):
        print(USAGE, *features())
        return 0
    given = chosen(arguments)
    if given is None:
        print("No such feature, file or folder:", *arguments, file=sys.stderr)
        print(USAGE, *features(), file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", *given]
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
