"""What is written for people costs nothing but itself if nobody reads it any more."""

from __future__ import annotations

import os
import pty
import signal
import sys
import threading
from io import BytesIO, StringIO, TextIOWrapper
from typing import TextIO

import pytest
from rich.console import Console

from geo_ray.base.output import OutlivingStream, outliving, terminal_outlived


def closed_pipe() -> TextIO:
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w")


def test_a_closed_pipe_is_written_to_without_an_error() -> None:
    with closed_pipe() as pipe:
        console = Console(file=outliving(pipe))
        console.print("step 1")
        console.print("step 2")
        os.write(pipe.fileno(), b"what C code or a child writes does not fail either")
    with pytest.raises(BrokenPipeError), closed_pipe() as plain:
        Console(file=plain).print("step 1")
        plain.flush()


def test_a_terminal_that_is_gone_is_written_to_without_an_error() -> None:
    near, far = pty.openpty()
    with os.fdopen(far, "w") as terminal:
        shown = outliving(terminal)
        assert shown.isatty()
        os.close(near)
        for _ in range(2):
            shown.write("step 1\n")
            shown.flush()


def test_a_character_that_the_terminal_lacks_silences_nothing() -> None:
    kept = BytesIO()
    shown = outliving(TextIOWrapper(kept, encoding="ascii", write_through=True))
    assert shown.write("2 \u00d7 3\n") == 6
    shown.write("file \udcff\nnext\n")
    assert kept.getvalue() == b"2 \\xd7 3\nfile \\udcff\nnext\n"


def test_what_is_read_arrives_and_other_errors_are_raised() -> None:
    kept = StringIO()
    shown = outliving(kept)
    assert shown.write("one\n") == 4 and shown.getvalue() == "one\n"  # type: ignore[attr-defined]
    shown.writelines(["two\n", "three\n"])
    assert kept.getvalue() == "one\ntwo\nthree\n"
    assert outliving(shown) is shown
    with pytest.raises(TypeError):
        shown.write(b"bytes")  # type: ignore[arg-type]
    kept.close()
    assert shown.write("four") == 4


def test_sighup_is_passed_over_for_as_long_as_the_work_takes() -> None:
    before = sys.stdout, sys.stderr, signal.getsignal(signal.SIGHUP)
    with terminal_outlived():
        os.kill(os.getpid(), signal.SIGHUP)
        assert isinstance(sys.stdout, OutlivingStream) and isinstance(sys.stderr, OutlivingStream)
    assert (sys.stdout, sys.stderr, signal.getsignal(signal.SIGHUP)) == before


def test_who_handles_sighup_still_does() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with terminal_outlived():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGHUP]


def test_other_threads_change_no_signal() -> None:
    seen: list[object] = []

    def work() -> None:
        with terminal_outlived():
            seen.append(signal.getsignal(signal.SIGHUP))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGHUP)]
