"""Secrets in Tencent Cloud's Secrets Manager (SSM)."""

from __future__ import annotations

import re
import secrets
import time
from contextlib import AbstractContextManager
from typing import Any

from geo_ray.clouds.replies import making_sense
from geo_ray.clouds.tencent.session import Tencent
from geo_ray.errors import CloudError, ProviderRefusedError
from geo_ray.providers.refusals import as_provider_errors
from geo_ray.providers.secrets.base import missing

_MISSING = "ResourceNotFound"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class TencentSecrets:
    """Secrets of a region; each put makes a version, and the newest one counts.

    Args:
        region: Tencent's name of it.
        endpoint: address in place of Tencent's.
        attempts: tries of a request.
    """

    def __init__(self, region: str, endpoint: str | None = None, *, attempts: int = 5) -> None:
        self._region = region
        self._tencent = Tencent(endpoint, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _errors("ssm:GetSecretValue"), making_sense("tencent ssm"):
            versions = self._versions(name)
            if not versions:
                raise missing(name, f"the secrets of {self._region}")
            asked = {"SecretName": name, "VersionId": max(versions)}
            return str(self._call("GetSecretValue", asked)["SecretString"])

    def put(self, name: str, value: str) -> None:
        """Make a secret, or give it a new value."""
        version = f"v{time.time_ns():020d}-{secrets.token_hex(4)}"  # their order is that of time
        asked = {"SecretName": name, "VersionId": version, "SecretString": value}
        with _errors("ssm:CreateSecret, ssm:PutSecretValue, ssm:DeleteSecretVersion"):
            try:
                self._call("CreateSecret", asked)
            except CloudError as error:
                if not error.said.startswith("ResourceInUse"):
                    raise
                self._forget(name)
                self._call("PutSecretValue", asked)

    def delete(self, name: str) -> None:
        """Remove a secret at once; it has to be disabled first."""
        with _errors("ssm:DisableSecret, ssm:DeleteSecret"):
            try:
                self._call("DisableSecret", {"SecretName": name})
                self._call("DeleteSecret", {"SecretName": name, "RecoveryWindowInDays": 0})
            except CloudError as error:
                if not error.said.startswith(_MISSING):
                    raise

    def _forget(self, name: str) -> None:
        """Remove all versions but the newest: the cloud keeps ten."""
        for version in sorted(self._versions(name))[:-1]:
            self._call("DeleteSecretVersion", {"SecretName": name, "VersionId": version})

    def _versions(self, name: str) -> list[str]:
        try:
            reply = self._call("ListSecretVersionIds", {"SecretName": name})
        except CloudError as error:
            if error.said.startswith(_MISSING):
                return []
            raise
        return [str(one["VersionId"]) for one in reply["Versions"]]

    def _call(self, action: str, asked: dict[str, Any]) -> dict[str, Any]:
        if not _NAME.fullmatch(asked["SecretName"]):
            raise ProviderRefusedError(
                f"{asked['SecretName']!r} cannot be a secret's name at tencent",
                fix="Use letters, digits, '-' and '_', at most 128, a letter or digit first.",
            )
        return self._tencent.call(self._region, action, asked, product="ssm")


def _errors(permission: str) -> AbstractContextManager[None]:
    return as_provider_errors(
        permission, lambda code: code.startswith(("UnauthorizedOperation", "AuthFailure"))
    )
