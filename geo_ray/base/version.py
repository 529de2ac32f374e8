"""The release, and the commit of the source tree."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__version__ = "0.2.0"

UNKNOWN_COMMIT = "unknown"


def source_commit(package: str = __file__) -> str:
    """Return the commit that the source tree of this package is at.

    Reads git's files; starts no process.

    Args:
        package: a file in ``geo_ray/base``; its tree is two directories above.

    Returns:
        The full id, or "unknown" if the package does not lie in the top directory of a git
        checkout, such as after the installation of a wheel.
    """
    from pathlib import Path

    git = Path(package).resolve().parents[2] / ".git"
    try:
        if git.is_file():  # a worktree or submodule
            git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
        shared = git / "commondir"
        common = git / shared.read_text("utf-8").strip() if shared.exists() else git
        head = (git / "HEAD").read_text("utf-8").strip()
        if head.startswith("ref:"):
            head = _ref(common, head.removeprefix("ref:").strip())
    except (OSError, ValueError):
        return UNKNOWN_COMMIT
    return head if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head) else UNKNOWN_COMMIT


def _ref(common: Path, name: str) -> str:
    loose = common / name
    if loose.exists():
        return loose.read_text("utf-8").strip()
    for line in (common / "packed-refs").read_text("utf-8").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return UNKNOWN_COMMIT
