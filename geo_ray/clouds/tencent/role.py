"""Credentials of the role of the machine that this runs on, from its metadata service."""

from __future__ import annotations

import json
from typing import Final
from urllib.request import ProxyHandler, build_opener

from geo_ray.errors import CloudError

METADATA_VARIABLE: Final = "GEO_RAY_TENCENT_METADATA"
"""Address of the metadata service; set on Tencent's machines, so that nobody else asks in vain."""

_PATH: Final = "/latest/meta-data/cam/security-credentials/"
_LONGEST_S: Final = 5.0
_MOST_BYTES: Final = 65536


def role_credentials(url: str) -> tuple[str, str, str]:
    """Return a key's id, the key and the token; good for hours.

    Raises:
        CloudError: the machine has no role, or nobody answers.
    """
    try:
        name = _read(url + _PATH).splitlines()[0].strip()
        told = json.loads(_read(url + _PATH + name))
        return str(told["TmpSecretId"]), str(told["TmpSecretKey"]), str(told["Token"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CloudError(
            f"the machine's role cannot be had at {url}: {type(error).__name__}",
            fix="Give the machine a CAM role that may read the cluster's secrets.",
        ) from None


def _read(url: str) -> str:
    with build_opener(ProxyHandler({})).open(url, timeout=_LONGEST_S) as reply:
        return str(reply.read(_MOST_BYTES).decode())
