"""Secrets in files that only their owner can read, for trials."""

from __future__ import annotations

import os
from pathlib import Path

from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.secrets.base import missing


class FileSecrets:
    """A directory with a file for each secret.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, name: str) -> str:
        """Return the newest value."""
        try:
            return self._path(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise missing(name, str(self._root)) from None

    def put(self, name: str, value: str) -> None:
        """Make a secret, or give it a new value."""
        path = self._path(name)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(value)
        beside.replace(path)

    def delete(self, name: str) -> None:
        """Remove a secret."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not name or name.startswith(".") or "\0" in name:
            raise ProviderRefusedError(
                f"{name!r} cannot be a secret's name", fix="Use letters, digits, '/', '-' and '_'."
            )
        return self._root / name.replace("%", "%25").replace("/", "%2F")
