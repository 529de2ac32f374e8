"""Secrets in AWS: Secrets Manager, or the Parameter Store of Systems Manager, which is cheaper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from geo_ray.clouds.aws.session import Aws
from geo_ray.errors import CloudError
from geo_ray.providers.refusals import as_provider_errors
from geo_ray.providers.secrets.base import missing

_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})


class SecretsManagerSecrets:
    """Secrets Manager of a region.

    Args:
        region: AWS's name of it.
        endpoints: addresses by service, in place of those of AWS.
        attempts: tries of a request.
    """

    def __init__(
        self, region: str, endpoints: Mapping[str, str] | None = None, *, attempts: int = 5
    ) -> None:
        self._region = region
        self._aws = Aws(endpoints or {}, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _errors("secretsmanager:GetSecretValue"):
            try:
                return str(self._call("get_secret_value", SecretId=name)["SecretString"])
            except CloudError as error:
                if error.said == "ResourceNotFoundException":
                    raise missing(name, f"Secrets Manager of {self._region}") from None
                raise

    def put(self, name: str, value: str) -> None:
        """Make a secret, or give it a new value."""
        with _errors("secretsmanager:CreateSecret, secretsmanager:PutSecretValue"):
            try:
                self._call("create_secret", Name=name, SecretString=value)
            except CloudError as error:
                if error.said != "ResourceExistsException":
                    raise
                self._call("put_secret_value", SecretId=name, SecretString=value)

    def delete(self, name: str) -> None:
        """Remove a secret at once, without a time in which it could be had back."""
        with _errors("secretsmanager:DeleteSecret"):
            try:
                self._call("delete_secret", SecretId=name, ForceDeleteWithoutRecovery=True)
            except CloudError as error:
                if error.said != "ResourceNotFoundException":
                    raise

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self._aws.call("secretsmanager", self._region, operation, **arguments)


class ParameterSecrets:
    """Encrypted parameters of Systems Manager in a region.

    Args:
        region: AWS's name of it.
        endpoints: addresses by service, in place of those of AWS.
        attempts: tries of a request.
    """

    def __init__(
        self, region: str, endpoints: Mapping[str, str] | None = None, *, attempts: int = 5
    ) -> None:
        self._region = region
        self._aws = Aws(endpoints or {}, attempts=attempts)

    def get(self, name: str) -> str:
        """Return the newest value."""
        with _errors("ssm:GetParameter"):
            try:
                reply = self._call("get_parameter", Name=name, WithDecryption=True)
            except CloudError as error:
                if error.said == "ParameterNotFound":
                    raise missing(name, f"the parameters of {self._region}") from None
                raise
            return str(reply["Parameter"]["Value"])

    def put(self, name: str, value: str) -> None:
        """Make a secret, or give it a new value."""
        with _errors("ssm:PutParameter"):
            self._call("put_parameter", Name=name, Value=value, Type="SecureString", Overwrite=True)

    def delete(self, name: str) -> None:
        """Remove a secret."""
        with _errors("ssm:DeleteParameter"):
            try:
                self._call("delete_parameter", Name=name)
            except CloudError as error:
                if error.said != "ParameterNotFound":
                    raise

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        name = str(arguments.pop("Name"))
        if "/" in name and not name.startswith("/"):
            name = f"/{name}"  # a path has to begin at the root
        return self._aws.call("ssm", self._region, operation, Name=name, **arguments)


def _errors(permission: str) -> AbstractContextManager[None]:
    return as_provider_errors(permission, _DENIED.__contains__)
