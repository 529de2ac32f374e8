"""What is shown now, once for all who watch: each is sent what has changed since it last looked.

Nothing is queued for anybody. Who is slow gets the newest of every section when it takes it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class _Section:
    version: int
    html: str


class Board:
    """Sections with versions; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, _Section] = {}
        self._version = 0
        self._since = lru_cache(maxsize=16)(self._made_since)

    @property
    def version(self) -> int:
        """Grows by one with every change."""
        return self._version

    def put(self, sections: Mapping[str, str]) -> bool:
        """Show these sections; those that are not named stay.

        Returns:
            Whether anything has changed.
        """
        with self._lock:
            changed = {
                name: html
                for name, html in sections.items()
                if name not in self._sections or self._sections[name].html != html
            }
            if changed:
                version = self._version + 1
                new = {name: _Section(version, html) for name, html in changed.items()}
                self._sections = {**self._sections, **new}
                self._version = version
            return bool(changed)

    def since(self, version: int) -> tuple[int, bytes]:
        """Give the newest version, and the sections that are newer than ``version`` as JSON.

        All who have seen the same are given the same bytes, which are made once.
        """
        with self._lock:
            return self._since(version, self._version)

    def _made_since(self, version: int, newest: int) -> tuple[int, bytes]:
        found = {name: each.html for name, each in self._sections.items() if each.version > version}
        return newest, json.dumps(found, separators=(",", ":")).encode()
