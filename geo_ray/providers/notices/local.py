"""Notices of the local cloud: a file in the machine's folder."""

from __future__ import annotations

import json
from pathlib import Path

from geo_ray.errors import ProviderUnreachableError
from geo_ray.providers.notices.base import MachineNotice, NoticeKind


class FileNotices:
    """See the module.

    Args:
        path: of the file, which appears with the notice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def machine_id(self) -> str:
        """Return the machine's name, which is that of its folder."""
        return self._path.parent.name

    def read(self) -> MachineNotice | None:
        """Return the present notice."""
        try:
            at = float(json.loads(self._path.read_text())["unix_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = type(error).__name__
            raise ProviderUnreachableError(f"{self._path} cannot be read: {told}") from None
        return MachineNotice(self.machine_id(), at, NoticeKind.TAKEN_BACK)
