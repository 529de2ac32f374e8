"""The process that simulates cases of a comparison, one after another: JSON lines in, lines out."""

from __future__ import annotations

import os
import signal
import sys

from geo_ray.sweep.pool import answer_to


def main() -> None:
    """Answer every line on standard input; ends with it."""
    # Ctrl-C is for the process that the user started; it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task that prints is no answer
        for line in sys.stdin:
            answers.write(answer_to(line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
