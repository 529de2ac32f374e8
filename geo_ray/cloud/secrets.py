"""Secret stores of clusters: AWS Secrets Manager and Parameter Store, Tencent SSM, local files.

``python -m geo_ray.cloud.secrets`` prints a secret; machines call it while they boot.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol

from geo_ray.base.errors import CloudError, GeoRayError, ProviderRefusedError
from geo_ray.cloud.provider import as_provider_errors
from geo_ray.prices.aws import Aws
from geo_ray.prices.query import making_sense
from geo_ray.prices.tencent import Tencent


class SecretStore(Protocol):
    """Secrets by name. Values never appear in errors or logs.

    Every call raises ``ProviderRefusedError`` if it can never succeed, and
    ``ProviderUnreachableError`` if its outcome is unknown.
    """

    def get(self, name: str) -> str:
        """Return the newest value; a missing secret is a ``ProviderRefusedError``."""

    def put(self, name: str, value: str) -> None:
        """Create a secret or add a new value."""

    def delete(self, name: str) -> None:
        """Delete a secret immediately; a missing one is ignored."""


def missing(name: str, store: str) -> ProviderRefusedError:
    """Return the error of a missing secret."""
    return ProviderRefusedError(
        f"{store} has no secret {name}", fix="Put it there, or correct its name or region."
    )


class FileSecrets:
    """Secrets in the files of a directory.

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
        """Create a secret or add a new value."""
        path = self._path(name)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(
            os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w"
        ) as file:
            file.write(value)
        temporary.replace(path)

    def delete(self, name: str) -> None:
        """Delete a secret."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not name or name.startswith(".") or "\0" in name:
            raise ProviderRefusedError(
                f"{name!r} cannot be a secret's name", fix="Use letters, digits, '/', '-' and '_'."
            )
        return self._root / name.replace("%", "%25").replace("/", "%2F")


_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})


class SecretsManagerSecrets:
    """AWS Secrets Manager in a region.

    Args:
        region: AWS region.
        endpoints: endpoint overrides by service.
        attempts: attempts per request.
    """

    def __init__(
        self, region: str, endpoints: Mapping[str, str] | None = None, *, attempts: int = 5
    ) -> None:
        self._region = region
        self._aws = Aws(endpoints or {}, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _aws_errors("secretsmanager:GetSecretValue"):
            try:
                return str(self._call("get_secret_value", SecretId=name)["SecretString"])
            except CloudError as error:
                if error.said == "ResourceNotFoundException":
                    raise missing(name, f"Secrets Manager of {self._region}") from None
                raise

    def put(self, name: str, value: str) -> None:
        """Create a secret or add a new value."""
        with _aws_errors("secretsmanager:CreateSecret, secretsmanager:PutSecretValue"):
            try:
                self._call("create_secret", Name=name, SecretString=value)
            except CloudError as error:
                if error.said != "ResourceExistsException":
                    raise
                self._call("put_secret_value", SecretId=name, SecretString=value)

    def delete(self, name: str) -> None:
        """Delete a secret immediately, without a recovery window."""
        with _aws_errors("secretsmanager:DeleteSecret"):
            try:
                self._call("delete_secret", SecretId=name, ForceDeleteWithoutRecovery=True)
            except CloudError as error:
                if error.said != "ResourceNotFoundException":
                    raise

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self._aws.call("secretsmanager", self._region, operation, **arguments)


class ParameterSecrets:
    """Encrypted Systems Manager parameters in a region.

    Args:
        region: AWS region.
        endpoints: endpoint overrides by service.
        attempts: attempts per request.
    """

    def __init__(
        self, region: str, endpoints: Mapping[str, str] | None = None, *, attempts: int = 5
    ) -> None:
        self._region = region
        self._aws = Aws(endpoints or {}, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _aws_errors("ssm:GetParameter"):
            try:
                reply = self._call("get_parameter", Name=name, WithDecryption=True)
            except CloudError as error:
                if error.said == "ParameterNotFound":
                    raise missing(name, f"the parameters of {self._region}") from None
                raise
            return str(reply["Parameter"]["Value"])

    def put(self, name: str, value: str) -> None:
        """Create a secret or add a new value."""
        with _aws_errors("ssm:PutParameter"):
            self._call("put_parameter", Name=name, Value=value, Type="SecureString", Overwrite=True)

    def delete(self, name: str) -> None:
        """Delete a secret."""
        with _aws_errors("ssm:DeleteParameter"):
            try:
                self._call("delete_parameter", Name=name)
            except CloudError as error:
                if error.said != "ParameterNotFound":
                    raise

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        name = str(arguments.pop("Name"))
        if "/" in name and not name.startswith("/"):
            name = f"/{name}"  # a path must begin with a slash
        return self._aws.call("ssm", self._region, operation, Name=name, **arguments)


def _aws_errors(permission: str) -> AbstractContextManager[None]:
    return as_provider_errors(permission, _DENIED.__contains__)


_MISSING = "ResourceNotFound"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class TencentSecrets:
    """Tencent SSM secrets of a region; each put creates a version, and the newest one is used.

    Args:
        region: Tencent Cloud region.
        endpoint: endpoint override.
        attempts: attempts per request.
    """

    def __init__(self, region: str, endpoint: str | None = None, *, attempts: int = 5) -> None:
        self._region = region
        self._tencent = Tencent(endpoint, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _tencent_errors("ssm:GetSecretValue"), making_sense("tencent ssm"):
            versions = self._versions(name)
            if not versions:
                raise missing(name, f"the secrets of {self._region}")
            asked = {"SecretName": name, "VersionId": max(versions)}
            return str(self._call("GetSecretValue", asked)["SecretString"])

    def put(self, name: str, value: str) -> None:
        """Create a secret or add a new value."""
        version = f"v{time.time_ns():020d}-{secrets.token_hex(4)}"  # sorted by time
        asked = {"SecretName": name, "VersionId": version, "SecretString": value}
        with _tencent_errors("ssm:CreateSecret, ssm:PutSecretValue, ssm:DeleteSecretVersion"):
            try:
                self._call("CreateSecret", asked)
            except CloudError as error:
                if not error.said.startswith("ResourceInUse"):
                    raise
                self._forget(name)
                self._call("PutSecretValue", asked)

    def delete(self, name: str) -> None:
        """Delete a secret immediately; it must be disabled first."""
        with _tencent_errors("ssm:DisableSecret, ssm:DeleteSecret"):
            try:
                self._call("DisableSecret", {"SecretName": name})
                self._call("DeleteSecret", {"SecretName": name, "RecoveryWindowInDays": 0})
            except CloudError as error:
                if not error.said.startswith(_MISSING):
                    raise

    def _forget(self, name: str) -> None:
        """Delete all versions but the newest: the cloud allows ten."""
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


def _tencent_errors(permission: str) -> AbstractContextManager[None]:
    return as_provider_errors(permission, _is_denied_by_tencent)


def _is_denied_by_tencent(code: str) -> bool:
    return code.startswith(("UnauthorizedOperation", "AuthFailure"))


KINDS: Final = ("aws-secretsmanager", "aws-ssm", "tencent-ssm", "file")


def open_secrets(kind: str, place: str, endpoint: str | None = None) -> SecretStore:
    """Return a secret store.

    Args:
        kind: one of `KINDS`.
        place: region of the cloud; for ``file``, the directory.
        endpoint: endpoint override.

    Raises:
        ProviderRefusedError: the kind is unknown.
        CloudError: there are no credentials.
    """
    match kind:
        case "aws-secretsmanager":
            return SecretsManagerSecrets(place, {"secretsmanager": endpoint} if endpoint else {})
        case "aws-ssm":
            return ParameterSecrets(place, {"ssm": endpoint} if endpoint else {})
        case "tencent-ssm":
            return TencentSecrets(place, endpoint)
        case "file":
            return FileSecrets(Path(place))
    raise ProviderRefusedError(
        f"unknown kind of secret store: {kind!r}", fix=f"Use one of {', '.join(KINDS)}."
    )


def main() -> int:
    """Print the secret. Errors go to standard error and never contain the value."""
    parser = argparse.ArgumentParser(prog="geo_ray.cloud.secrets")
    parser.add_argument("--store", choices=KINDS, required=True)
    parser.add_argument("--region", required=True, help="region, or the directory of a file store")
    parser.add_argument("--endpoint", help="endpoint override")
    parser.add_argument("name")
    asked = parser.parse_args()
    try:
        sys.stdout.write(open_secrets(asked.store, asked.region, asked.endpoint).get(asked.name))
    except GeoRayError as error:
        sys.stderr.write(f"error {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
