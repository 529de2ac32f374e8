"""Preemption notices from the metadata services of AWS and Tencent Cloud, and of the local cloud.

AWS gives two minutes of notice for spot machines, and rebalance recommendations (IMDSv2). Tencent
Cloud gives the time in UTC+8. The local cloud writes a file. ``python -m geo_ray.cloud.notices``
prints the notice of the machine that it runs on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from geo_ray.base.errors import GeoRayError, ProviderRefusedError, ProviderUnreachableError


class NoticeKind(StrEnum):
    """Whether a machine will or may be reclaimed."""

    TAKEN_BACK = "taken_back"  # at the deadline
    RISK = "risk"  # elevated risk; the machine may stay


@dataclass(frozen=True, slots=True)
class MachineNotice:
    """Notice that a machine will be, or may be, reclaimed.

    Attributes:
        machine: id of the machine in the cloud.
        deadline_unix_s: when it is reclaimed; None: not given.
        kind: certain or possible.
    """

    machine: str
    deadline_unix_s: float | None
    kind: NoticeKind


class NoticeReader(Protocol):
    """Reads the metadata service of the machine that it runs on."""

    def machine_id(self) -> str:
        """Return the id of this machine in the cloud.

        Raises:
            ProviderUnreachableError: no metadata service answers; this is no machine of that cloud.
        """

    def read(self) -> MachineNotice | None:
        """Return the current notice. A certain reclaim takes precedence over a risk.

        Raises:
            ProviderUnreachableError: there is no answer, or an invalid one.
        """


_MOST_BYTES: Final = 65536
_NOT_FOUND: Final = 404


class MetadataRefusal(Exception):  # noqa: N818 - caught by the readers, never shown
    """The metadata service answered with a status other than success or not found.

    Args:
        status: HTTP status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def ask(
    url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", timeout_s: float
) -> str | None:
    """Return the text at a URL; None if it is not found.

    Raises:
        ProviderUnreachableError: the service does not answer.
        MetadataRefusal: the service answers with an error.
    """
    request = Request(url, headers=dict(headers or {}), method=method)  # noqa: S310 - of our own
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=timeout_s) as reply:
            return str(reply.read(_MOST_BYTES).decode("utf-8", "replace")).strip()
    except HTTPError as error:
        error.close()
        if error.code == _NOT_FOUND:
            return None
        raise MetadataRefusal(error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise ProviderUnreachableError(
            f"no metadata service answers at {url}: {type(error).__name__}",
            fix="Run this on a machine of that cloud with the metadata service enabled.",
        ) from None


AWS_METADATA: Final = "http://169.254.169.254"

_TOKEN_LIFE_S: Final = 21600
_EXPIRED: Final = 401


class AwsNotices:
    """AWS notices; see the module.

    Args:
        url: URL of the metadata service.
        timeout_s: timeout of a request.
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
                raise ProviderUnreachableError("the metadata service of aws returns no instance id")
            self._machine = found
        return self._machine

    def read(self) -> MachineNotice | None:
        """Return the current notice."""
        action = self._get("spot/instance-action")
        if action is not None:
            message = _table(action)
            if message.get("action") in ("terminate", "stop", "hibernate"):
                at = _unix_s(message.get("time"))
                return MachineNotice(self.machine_id(), at, NoticeKind.TAKEN_BACK)
        if self._get("events/recommendations/rebalance") is not None:
            return MachineNotice(self.machine_id(), None, NoticeKind.RISK)
        return None

    def _get(self, path: str) -> str | None:
        for _ in range(2):  # a token is valid for hours; retry once with a new one
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
        raise ProviderUnreachableError(f"the metadata service of aws returned no {path}")

    def _fresh_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_S)}
        url = f"{self._url}/latest/api/token"
        try:
            token = ask(url, headers, method="PUT", timeout_s=self._timeout_s)
        except MetadataRefusal as refusal:
            token = None
            message = str(refusal.status)
        else:
            message = "404"
        if not token:
            raise ProviderUnreachableError(
                f"the metadata service of aws returned no token ({message})"
            )
        return token


def _table(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ProviderUnreachableError("the metadata service of aws returned an invalid notice")
    return found


def _unix_s(text: object) -> float | None:
    """Return a time. A notice with an unreadable time is still a notice."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None


TENCENT_METADATA: Final = "http://metadata.tencentyun.com"

_ITS_TIME: Final = timezone(timedelta(hours=8))


class TencentNotices:
    """Tencent Cloud notices; see the module.

    Args:
        url: URL of the metadata service.
        timeout_s: timeout of a request.
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
                raise ProviderUnreachableError(
                    "the metadata service of tencent returns no instance id"
                )
            self._machine = found
        return self._machine

    def read(self) -> MachineNotice | None:
        """Return the current notice."""
        found = self._get("spot/termination-time")
        if not found:
            return None
        try:
            at = datetime.strptime(found, "%Y-%m-%d %H:%M:%S").replace(tzinfo=_ITS_TIME)
        except ValueError:  # a notice with an unreadable time is still a notice
            return MachineNotice(self.machine_id(), None, NoticeKind.TAKEN_BACK)
        return MachineNotice(self.machine_id(), at.timestamp(), NoticeKind.TAKEN_BACK)

    def _get(self, path: str) -> str | None:
        try:
            return ask(f"{self._url}/latest/meta-data/{path}", timeout_s=self._timeout_s)
        except MetadataRefusal as refusal:
            raise ProviderUnreachableError(
                f"the metadata service of tencent returned no {path} ({refusal.status})"
            ) from None


class FileNotices:
    """Local notices; see the module.

    Args:
        path: path of the file, which is written with the notice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def machine_id(self) -> str:
        """Return the name of the machine, which is that of its folder."""
        return self._path.parent.name

    def read(self) -> MachineNotice | None:
        """Return the current notice."""
        try:
            at = float(json.loads(self._path.read_text())["unix_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = type(error).__name__
            raise ProviderUnreachableError(f"{self._path} cannot be read: {message}") from None
        return MachineNotice(self.machine_id(), at, NoticeKind.TAKEN_BACK)


CLOUDS: Final = ("aws", "tencent", "local")


def open_notices(cloud: str, url: str | None = None, file: Path | None = None) -> NoticeReader:
    """Return the notice reader of a cloud.

    Args:
        cloud: one of `CLOUDS`.
        url: metadata service URL to use instead of the cloud's.
        file: notice file of the local cloud.

    Raises:
        ProviderRefusedError: the cloud is unknown, or the file of the local cloud is missing.
    """
    if cloud == "aws":
        return AwsNotices(url or AWS_METADATA)
    if cloud == "tencent":
        return TencentNotices(url or TENCENT_METADATA)
    if cloud == "local" and file is not None:
        return FileNotices(file)
    raise ProviderRefusedError(
        f"{cloud} has no notices", fix=f"Use one of {', '.join(CLOUDS)}; local: --file."
    )


def main() -> int:
    """Print the machine's id or its notice."""
    parser = argparse.ArgumentParser(prog="geo_ray.cloud.notices")
    parser.add_argument("--cloud", choices=CLOUDS, required=True)
    parser.add_argument("--url", help="metadata service URL to use instead of the cloud's")
    parser.add_argument("--file", type=Path, help="notice file of the local cloud")
    parser.add_argument("--machine-id", action="store_true", help="print the id of the machine")
    asked = parser.parse_args()
    try:
        reader = open_notices(asked.cloud, asked.url, asked.file)
        found = reader.machine_id() if asked.machine_id else reader.read()
    except GeoRayError as error:
        sys.stderr.write(f"error {error}\n")
        return error.exit_code
    sys.stdout.write(f"{found or 'no notice'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
