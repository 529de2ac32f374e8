"""Notices of Tencent Cloud: when a spot machine is taken back, told in the time of UTC+8."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Final

from geo_ray.errors import ProviderUnreachableError
from geo_ray.providers.notices.base import MachineNotice, NoticeKind
from geo_ray.providers.notices.metadata import MetadataRefusal, ask

TENCENT_METADATA: Final = "http://metadata.tencentyun.com"

_ITS_TIME: Final = timezone(timedelta(hours=8))


class TencentNotices:
    """See the module.

    Args:
        url: of the metadata service.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, url: str = TENCENT_METADATA, *, timeout_s: float = 2.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._machine: str | None = None

    def machine_id(self) -> str:
        """Return the instance's id."""
        if self._machine is None:
            found = self._get("instance-id")
            if not found:
                raise ProviderUnreachableError("the metadata service of tencent names no instance")
            self._machine = found
        return self._machine

    def read(self) -> MachineNotice | None:
        """Return the present notice."""
        found = self._get("spot/termination-time")
        if not found:
            return None
        try:
            at = datetime.strptime(found, "%Y-%m-%d %H:%M:%S").replace(tzinfo=_ITS_TIME)
        except ValueError:  # a notice whose time cannot be read is one nevertheless
            return MachineNotice(self.machine_id(), None, NoticeKind.TAKEN_BACK)
        return MachineNotice(self.machine_id(), at.timestamp(), NoticeKind.TAKEN_BACK)

    def _get(self, path: str) -> str | None:
        try:
            return ask(f"{self._url}/latest/meta-data/{path}", timeout_s=self._timeout_s)
        except MetadataRefusal as refusal:
            raise ProviderUnreachableError(
                f"the metadata service of tencent does not tell {path} ({refusal.status})"
            ) from None
