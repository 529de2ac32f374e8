"""Addresses used instead of a cloud's own: a private endpoint, a proxy, a server of a test."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from geo_ray.errors import CloudError

_FIX = "Write --endpoint https://HOST, or --endpoint SERVICE=https://HOST for one service."


def parse_endpoints(texts: Iterable[str], services: Iterable[str]) -> dict[str, str]:
    """Return addresses by service.

    Args:
        texts: ``URL`` for all services, ``SERVICE=URL`` for one; later ones override earlier ones.
        services: of the cloud.

    Raises:
        CloudError: an address is not valid, or of an unknown service.
    """
    known = tuple(services)
    found: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = "", text
        if name and name not in known:
            raise CloudError(f"no service {name!r}; there are {', '.join(known)}", fix=_FIX)
        _check(url)
        found.update(dict.fromkeys([name] if name else known, url.rstrip("/")))
    return found


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise CloudError("an endpoint is no http or https address", fix=_FIX)
    if parts.username is not None or parts.query or parts.path.strip("/"):
        raise CloudError(
            f"the endpoint at {parts.hostname} has more than a host and a port", fix=_FIX
        )
