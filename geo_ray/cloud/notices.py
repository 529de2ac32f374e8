"""Preemption notices from the metadata services of AWS and Tencent Cloud, and of the local cloud.

AWS gives two minutes on the spot market and rebalance recommendations (IMDSv2); Tencent Cloud
names the time in UTC+8; the local cloud writes a file. ``python -m geo_ray.cloud.notices``
prints what the cloud says of the machine it runs on.
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
    """How sure it is that the machine goes."""

    TAKEN_BACK = "taken_back"  # at the deadline
    RISK = "risk"  # more likely than before; the machine may as well stay


@dataclass(frozen=True, slots=True)
class MachineNotice:
    """A cloud says that a machine will be, or may be, taken away.

    Attributes:
        machine: the cloud's name of it.
        deadline_unix_s: when it is gone; None: not said.
        kind: whether it surely goes.
    """

    machine: str
    deadline_unix_s: float | None
    kind: NoticeKind


class NoticeReader(Protocol):
    """Asks the metadata service of the machine that it runs on."""

    def machine_id(self) -> str:
        """Return the cloud's name of this machine.

        Raises:
            ProviderUnreachableError: nothing answers; this is no machine of that cloud.
        """

    def read(self) -> MachineNotice | None:
        """Return the present notice; a machine that is taken back hides a mere risk.

        Raises:
            ProviderUnreachableError: nothing answers, or nothing that makes sense.
        """


_MOST_BYTES: Final = 65536
_NOT_FOUND: Final = 404


class MetadataRefusal(Exception):  # noqa: N818 - caught by the readers, never shown
    """The service answered with a status that is neither success nor "not there".

    Args:
        status: of HTTP.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def ask(
    url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", timeout_s: float
) -> str | None:
    """Return the text at an address; None if there is none.

    Raises:
        ProviderUnreachableError: nobody answers.
        MetadataRefusal: it answers with an error.
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
            fix="Run this on a machine of that cloud, with its metadata service switched on.",
        ) from None


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


CLOUDS: Final = ("aws", "tencent", "local")


def open_notices(cloud: str, url: str | None = None, file: Path | None = None) -> NoticeReader:
    """Return the reader.

    Args:
        cloud: one of `CLOUDS`.
        url: of the metadata service, in place of the cloud's.
        file: of the local cloud's notice.

    Raises:
        ProviderRefusedError: there is no such cloud, or the local one's file is not named.
    """
    if cloud == "aws":
        return AwsNotices(url or AWS_METADATA)
    if cloud == "tencent":
        return TencentNotices(url or TENCENT_METADATA)
    if cloud == "local" and file is not None:
        return FileNotices(file)
    raise ProviderRefusedError(
        f"no notices can be read of {cloud}", fix=f"Use one of {', '.join(CLOUDS)}; local: --file."
    )


def main() -> int:
    """Print the machine's name, or its notice."""
    parser = argparse.ArgumentParser(prog="geo_ray.cloud.notices")
    parser.add_argument("--cloud", choices=CLOUDS, required=True)
    parser.add_argument("--url", help="of the metadata service, in place of the cloud's")
    parser.add_argument("--file", type=Path, help="of the local cloud's notice")
    parser.add_argument("--machine-id", action="store_true", help="print the machine's name")
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
