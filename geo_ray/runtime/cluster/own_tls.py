"""Ray's own TLS with certificates that are made here, for clusters whose addresses are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from geo_ray.transport.security.certs import Authority

_DAYS: Final = 30.0


def tls_environment(
    folder: Path, addresses: Sequence[str], authority: Authority | None = None
) -> dict[str, str]:
    """Make a certificate, and return what Ray's processes need to use it.

    Args:
        folder: where it is put, with its key, for the owner only.
        addresses: of the nodes that use it; those of this machine are added.
        authority: that issues it; None: one that is forgotten again.
    """
    authority = authority or Authority.create("geo_ray cluster", _DAYS)
    hosts = tuple(dict.fromkeys((*addresses, "127.0.0.1", "localhost")))
    made = authority.issue("node", _DAYS / 2, hosts)
    found = {"RAY_USE_TLS": "1"}
    for name, content in (
        ("RAY_TLS_CA_CERT", made.ca_pem),
        ("RAY_TLS_SERVER_CERT", made.cert_pem),
        ("RAY_TLS_SERVER_KEY", made.key_pem),
    ):
        path = folder / f"{name.lower()}.pem"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        found[name] = str(path)
    return found
