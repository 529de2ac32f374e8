"""The pages of the documentation: their blocks, and a reader that runs their commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from geo_ray.cli.main import root
from tests.support.train_support import WAIT_S, eventually

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE_ADDRESS: Final = r"http://127\.0\.0\.1:\d+/\?token=\S+(?=\s)"
BIN: Final = Path(sys.executable).parent
FENCED: Final = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        section: the heading above it.
        language: of the fence.
        saved_as: the file that the text before it, or its first line, names; "" if none.
        body: its content.
    """

    section: str
    language: str
    saved_as: str
    body: str

    @property
    def commands(self) -> list[str]:
        """Its commands; of a console, the lines after a prompt. A loop is one command."""
        lines = self.body.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif self.language not in ("bash", "sh"):
            lines = []
        plain = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
        found: list[str] = []
        is_open = False
        for line in (" ".join(line.split()) for line in plain if line):
            found = [*found[:-1], f"{found[-1]}\n{line}"] if is_open else [*found, line]
            is_open = found[-1].count('"') % 2 == 1 or (
                found[-1].startswith("for ") and not re.search(r"\bdone$", found[-1])
            )
        return found


def blocks(page: str, section: str | None = None) -> list[Block]:
    """The blocks of a page, or of one of its sections, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCED.finditer(text):
        indent, language, body = match.groups()
        above = text[: match.start()]
        headings = re.findall(r"^#+ (.+)$", FENCED.sub("", above), flags=re.M)
        before = above.rstrip().rpartition("\n\n")[2]
        names = re.findall(r"\bas\s+`([\w./-]+\.\w+)`", before)
        names = names or re.findall(r"\A# ([\w/-]+\.\w+)$", body, flags=re.M)
        body = re.sub(rf"^{indent}", "", body, flags=re.M)
        found.append(Block(headings[-1], language, names[-1] if names else "", body))
    return [block for block in found if section is None or block.section == section]


def commands(page: str, section: str | None = None) -> list[str]:
    """The commands of a page, or of one of its sections, in their order."""
    return [command for block in blocks(page, section) for command in block.commands]


def sources(page: str, language: str) -> list[str]:
    """The bodies of the blocks in a language."""
    return [block.body for block in blocks(page) if block.language == language]


def save(page: str) -> None:
    """Write the files that a page has its reader save."""
    for block in blocks(page):
        if block.saved_as:
            Path(block.saved_as).parent.mkdir(parents=True, exist_ok=True)
            Path(block.saved_as).write_text(block.body)


@dataclass
class Reader:
    """Runs commands in the current directory, as a reader of a page does.

    Attributes:
        monkeypatch: for variables and directories that a command changes.
        values: what the reader enters for the words in capitals of a page.
    """

    monkeypatch: pytest.MonkeyPatch
    values: dict[str, str] = field(default_factory=dict)

    def filled(self, command: str) -> str:
        """The command with the reader's values."""
        for name, value in self.values.items():
            command = re.sub(rf"(?<![\w-]){re.escape(name)}\b", lambda _, to=value: to, command)
        return command

    def run(self, command: str, answer: str = "", *, exit_code: int = 0) -> str:
        """Run a command to its end; what it prints.

        Args:
            command: a line of a page. `geo-ray` runs in this process, which has PyTorch loaded.
            answer: what the reader types.
            exit_code: that is expected.
        """
        command = self.filled(command)
        words = shlex.split(command)
        if words[0] == "export":
            for word in words[1:]:
                name, _, value = word.partition("=")
                self.monkeypatch.setenv(name, value)
            return ""
        if words[0] == "cd":
            self.monkeypatch.chdir(words[1])
            return ""
        if words[0] == "geo-ray" and words[1:3] != ["lab", "run"]:  # which replaces its process
            done = CliRunner().invoke(root, words[1:], input=answer)
            code = getattr(done.exception, "exit_code", done.exit_code)
            assert code == exit_code, f"{command}\n{done.output}\n{done.exception!r}"
            return done.output
        finished = subprocess.run(
            ["bash", "-euc", command],
            env=self.environment(),
            input=answer,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        said = finished.stdout + finished.stderr
        assert finished.returncode == exit_code, f"{command}\n{said}"
        return said

    def environment(self) -> dict[str, str]:
        """The environment of a process: geo_ray and Ray of this installation come first."""
        return {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:.",
            "PYTHONUNBUFFERED": "1",
        }

    @contextmanager
    def until_ctrl_c(
        self, command: str, shows: str, *, exit_code: int = 0
    ) -> Iterator[re.Match[str]]:
        """Start a command, wait for its first output, and end it with Ctrl-C.

        Args:
            command: a line of a page.
            shows: pattern of what it prints before the body of the ``with`` begins.
            exit_code: that is expected after Ctrl-C.
        """
        command = self.filled(command)
        log = Path("until_ctrl_c.log").resolve()
        with log.open("w+b") as out:
            process = subprocess.Popen(
                shlex.split(command),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            try:
                found = eventually(
                    lambda: re.search(shows, log.read_text()) or process.poll() is not None,
                    f"{command} shows {shows}",
                )
                assert isinstance(found, re.Match), f"{command}\n{log.read_text()}"
                yield found
                process.send_signal(signal.SIGINT)
                assert process.wait(WAIT_S) == exit_code, f"{command}\n{log.read_text()}"
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    try:
                        process.wait(WAIT_S / 4)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()

    def interrupted(self, command: str, when: Callable[[], object], *, exit_code: int) -> str:
        """Run `geo-ray` in this process, and press Ctrl-C once a condition holds."""
        lock, ended = threading.Lock(), threading.Event()

        def press() -> None:
            while not ended.wait(0.02):
                if when():
                    with lock:
                        if not ended.is_set():
                            os.kill(os.getpid(), signal.SIGINT)
                    return

        thread = threading.Thread(target=press)
        thread.start()
        try:
            return self.run(command, exit_code=exit_code)
        finally:
            try:
                with lock:
                    ended.set()
                    time.sleep(0)  # a late signal is delivered here
            except KeyboardInterrupt:
                ended.set()
            thread.join()
