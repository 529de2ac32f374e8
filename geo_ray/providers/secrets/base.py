"""What a store of secrets must do."""

from __future__ import annotations

from typing import Protocol

from geo_ray.errors import ProviderRefusedError


class SecretStore(Protocol):
    """Texts by name; a value appears in no error and no log.

    Every call raises ``ProviderRefusedError`` if it will never work, ``ProviderUnreachableError``
    if it may have worked.
    """

    def get(self, name: str) -> str:
        """Return the newest value; that there is none is a ``ProviderRefusedError``."""

    def put(self, name: str, value: str) -> None:
        """Make a secret, or give it a new value."""

    def delete(self, name: str) -> None:
        """Remove a secret at once; one that is not there is no error."""


def missing(name: str, store: str) -> ProviderRefusedError:
    """Return the error of a secret that is not there."""
    return ProviderRefusedError(
        f"there is no secret {name} in {store}", fix="Put it there, or correct its name or region."
    )
