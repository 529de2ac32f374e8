"""The peers' own environment: made once where the user says, or for one run of `peers.py`."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import support

PEERS = ("torchft==0.2.0", "hivemind==1.1.12")
ALSO = (
    # torchft imports all of these, and names only some of them.
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    # With a newer one hivemind cannot read its own 8-bit tensors, and averages without them.
    "numpy<2.4",
)
_STAMP = "peers.txt"


def peers_python(directory: Path) -> Path:
    """The interpreter of an environment with both peers, which is made if it is not there.

    It has the same torch as ours, from where pip is configured to find it, so that all systems
    compute alike.

    Args:
        directory: of the environment.

    Raises:
        SystemExit: something else is there.
    """
    wanted = [f"torch=={version('torch')}", *PEERS, *ALSO]
    stamp = directory / _STAMP
    python = directory / "bin" / "python"
    if stamp.is_file() and stamp.read_text("utf-8").split() == wanted:
        return python
    if directory.exists() and any(directory.iterdir()) and not stamp.is_file():
        raise SystemExit(f"{directory} is not empty, and was not made here: name another directory")
    support.say("making the peers' environment (two to four minutes)")
    venv.create(directory, with_pip=True, symlinks=True, clear=stamp.is_file())
    stamp.write_text("unfinished\n", "utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
    stamp.write_text("\n".join(wanted) + "\n", "utf-8")
    return python
