"""The command line when nobody reads what it shows any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

GEO_RAY = [sys.executable, "-m", "geo_ray.cli.main"]
CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    changes = ["train.steps=6", "train.eval_every=3", f"run.dir={tmp_path}"]
    arguments = [item for change in changes for item in ("--set", change)]
    process = subprocess.Popen(
        [*GEO_RAY, "simulate", str(CONFIG), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "it has begun to show something"
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "quickstart" / "summary.json").exists()
    assert (tmp_path / "quickstart" / "report.html").exists()


def test_a_verb_that_only_shows_something_ends_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*GEO_RAY, "config", "schema"], stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    said = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert done.returncode == 1 and not said
