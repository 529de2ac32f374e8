"""What a cloud's code of an error means for a launch, and for whoever has to mend it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from geo_ray.errors import (
    CloudError,
    CloudUnreachableError,
    ProviderRefusedError,
    ProviderUnreachableError,
)
from geo_ray.providers.base import LaunchFailure, LaunchRequest, Machine, Shortage

_CREDENTIALS: Final = (
    "AuthFailure",
    "ExpiredToken",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
_A_RIGHT: Final = "AuthFailure.UnauthorizedOperation"  # Tencent's, of a right after all
_PERMISSION: Final = re.compile(r"perform:? ([a-z0-9-]+:\w+)|\(([a-z]+:\w+)\)|action ([a-z]+:\w+)")


@contextmanager
def as_provider_errors(permission: str, denied: Callable[[str], bool]) -> Iterator[None]:
    """Turn errors of a cloud's session into those of providers.

    Args:
        permission: what the call needs, named if the cloud itself does not.
        denied: whether a code says that a right is missing.
    """
    try:
        yield
    except (ProviderRefusedError, ProviderUnreachableError):
        raise
    except CloudUnreachableError as error:
        raise ProviderUnreachableError(error.message) from None
    except CloudError as error:
        if error.said.startswith(_CREDENTIALS) and error.said != _A_RIGHT:
            raise ProviderRefusedError(
                error.message,
                fix="Renew the credentials; if they are right, set this machine's clock.",
            ) from None
        if not denied(error.said):
            raise ProviderRefusedError(error.message) from None
        found = _PERMISSION.search(error.message)
        named = next(filter(None, found.groups())) if found else permission
        raise ProviderRefusedError(
            f"{error.message} (missing: {named})",
            fix=f"Give the account or role the permission {named}; docs/providers.md lists all.",
        ) from None


def failure(request: LaunchRequest, missing: int, shortage: Shortage, reason: str) -> LaunchFailure:
    """Return what a request lacks."""
    return LaunchFailure(request.request_id, request.pool, missing, shortage, reason)


def unstarted(machine: Machine, request_id: str, shortage: Shortage, reason: str) -> LaunchFailure:
    """Return that a machine of a request was accepted and could not start."""
    return LaunchFailure(request_id, machine.pool, 1, shortage, reason, machine.id)
