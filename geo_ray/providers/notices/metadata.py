"""Short, bounded requests to a metadata service, which is never behind a proxy."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from geo_ray.errors import ProviderUnreachableError

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
