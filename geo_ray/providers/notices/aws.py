"""Notices of AWS: the spot market's two minutes, and its rebalance recommendations (IMDSv2)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Final

from geo_ray.errors import ProviderUnreachableError
from geo_ray.providers.notices.base import MachineNotice, NoticeKind
from geo_ray.providers.notices.metadata import MetadataRefusal, ask

AWS_METADATA: Final = "http://169.254.169.254"

_TOKEN_LIFE_S: Final = 21600
_EXPIRED: Final = 401


class AwsNotices:
    """See the module.

    Args:
        url: of the metadata service.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, url: str = AWS_METADATA, *, timeout_s: float = 2.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._token: str | None = None
        self._machine: str | None = None

    def machine_id(self) -> str:
        """Return the instance's id."""
        if self._machine is None:
            found = self._get("instance-id")
            if not found:
                raise ProviderUnreachableError("the metadata service of aws names no instance")
            self._machine = found
        return self._machine

    def read(self) -> MachineNotice | None:
        """Return the present notice."""
        action = self._get("spot/instance-action")
        if action is not None:
            told = _table(action)
            if told.get("action") in ("terminate", "stop", "hibernate"):
                at = _unix_s(told.get("time"))
                return MachineNotice(self.machine_id(), at, NoticeKind.TAKEN_BACK)
        if self._get("events/recommendations/rebalance") is not None:
            return MachineNotice(self.machine_id(), None, NoticeKind.RISK)
        return None

    def _get(self, path: str) -> str | None:
        for _ in range(2):  # a token is good for hours, and then not
            if self._token is None:
                self._token = self._fresh_token()
            headers = {"X-aws-ec2-metadata-token": self._token}
            try:
                url = f"{self._url}/latest/meta-data/{path}"
                return ask(url, headers, timeout_s=self._timeout_s)
            except MetadataRefusal as refusal:
                self._token = None
                if refusal.status != _EXPIRED:
                    break
        raise ProviderUnreachableError(f"the metadata service of aws does not tell {path}")

    def _fresh_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_S)}
        url = f"{self._url}/latest/api/token"
        try:
            token = ask(url, headers, method="PUT", timeout_s=self._timeout_s)
        except MetadataRefusal as refusal:
            token = None
            told = str(refusal.status)
        else:
            told = "404"
        if not token:
            raise ProviderUnreachableError(f"the metadata service of aws gives no token ({told})")
        return token


def _table(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ProviderUnreachableError("the metadata service of aws sent a notice without sense")
    return found


def _unix_s(text: object) -> float | None:
    """Return a time; a notice whose time cannot be read is one nevertheless."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None
