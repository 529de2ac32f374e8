"""Which paths a store accepts: plain, relative, and never out of it."""

from __future__ import annotations

from pathlib import PurePosixPath

from geo_ray.errors import StoreError


def problem_of_path(path: str) -> str | None:
    """Why ``path`` is no plain relative path inside a store; None if it is one."""
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path or any(ord(char) < 32 for char in path):
        return "has a backslash or a control character"
    if ".." in PurePosixPath(path).parts:
        return "leaves its store by '..'"
    if str(PurePosixPath(path)) != path or path == ".":
        return "is not in its shortest form"
    return None


def checked_path(path: str, uri: str) -> str:
    """Return ``path`` if it stays inside the store.

    Raises:
        StoreError: if it is absolute, has ``..`` or is otherwise not plain.
    """
    problem = problem_of_path(path)
    if problem:
        raise StoreError(
            f"path {path!r} {problem}; refused for store {uri}",
            fix="Use a relative path such as us-east/train-00000.parquet.",
        )
    return path
