"""Opens a store of secrets by the kind that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.secrets.aws import ParameterSecrets, SecretsManagerSecrets
from geo_ray.providers.secrets.base import SecretStore
from geo_ray.providers.secrets.local import FileSecrets
from geo_ray.providers.secrets.tencent import TencentSecrets

KINDS: Final = ("aws-secretsmanager", "aws-ssm", "tencent-ssm", "file")


def open_secrets(kind: str, place: str, endpoint: str | None = None) -> SecretStore:
    """Return a store.

    Args:
        kind: one of `KINDS`.
        place: region of the cloud; of ``file`` the directory.
        endpoint: address in place of the cloud's.

    Raises:
        ProviderRefusedError: there is no such kind.
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
        f"there is no store of secrets of kind {kind!r}", fix=f"Use one of {', '.join(KINDS)}."
    )
