"""What a region shows and trusts at one time, read anew whenever its files change."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import Final

from geo_ray.errors import CertificateError
from geo_ray.transport.security.revocation import revoked_serials
from geo_ray.transport.security.tls import (
    TlsFiles,
    TlsSource,
    client_context,
    server_context,
)
from geo_ray.util.rate_limited_log import RateLimitedLog

_LOGGER = logging.getLogger(__name__)
_ABSENT: Final = (0, 0, 0)


class Credentials:
    """Contexts for both ends of TLS, and what is revoked; any thread may ask.

    What was revoked once stays so while the process lives, whatever becomes of the list.

    Args:
        source: certificate, key, CAs and list.

    Raises:
        CertificateError: they cannot be used.
    """

    def __init__(self, source: TlsSource) -> None:
        self._quiet = RateLimitedLog(_LOGGER)
        self._lock = threading.Lock()  # one at a time loads
        self.revoked: frozenset[int] = frozenset()
        self.use(source)

    def use(self, source: TlsSource) -> None:
        """Use these from the next handshake on.

        Raises:
            CertificateError: they cannot be used; the earlier ones stay.
        """
        with self._lock:
            self._load(source, _stamps(source))

    def refresh(self) -> None:
        """Read the files again if one has changed; the earlier ones stay while these are not whole.

        Files that are copied one after the other may not fit together for a moment.
        """
        with self._lock:
            stamps = _stamps(self._source)
            if stamps == self._stamps:
                return
            try:
                self._load(self._source, stamps)
            except CertificateError as error:
                self._quiet.warning("refresh", f"the earlier certificate stays: {error.message}")
            else:
                _LOGGER.info("certificate, CAs and revocation list were read again")

    def _load(self, source: TlsSource, stamps: list[tuple[int, int, int]]) -> None:
        material = source.read() if isinstance(source, TlsFiles) else source
        revoked = revoked_serials(material.crl_pem, material.ca_pem)
        client, server = client_context(source, material), server_context(source, material)
        self.client: ssl.SSLContext = client
        self.server: ssl.SSLContext = server
        self.revoked = self.revoked | revoked
        self._source, self._stamps = source, stamps


def _stamps(source: TlsSource) -> list[tuple[int, int, int]]:
    """What tells that files have changed; taken before they are read."""
    if not isinstance(source, TlsFiles):
        return []
    return [_stamp(Path(name)) for name in (source.ca, source.cert, source.key, source.crl) if name]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return _ABSENT
    return found.st_mtime_ns, found.st_size, found.st_ino
