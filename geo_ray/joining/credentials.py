"""What a region needs to join a run, in one file.

The file has PEM blocks: the region's certificate and private key, the certificates of the CA, and a
block ``GEO-RAY RUN`` with the run's id and key. Keep it secret: with it, a process can take part as
that region.
"""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from geo_ray.base.errors import CertificateError
from geo_ray.transport.security.tls import TlsBytes

_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z0-9 -]+)-----\s(.*?)-----END \1-----", re.S)
_RUN: Final = "GEO-RAY RUN"
_FIX: Final = "Use the file that `geo-ray serve` wrote for this region."


@dataclass(frozen=True, slots=True)
class JoinCredentials:
    """Credentials of one region, or of the server.

    Attributes:
        region: whose they are.
        run_id: the run.
        key: the run's secret.
        certificate: for TLS.
    """

    region: str
    run_id: str
    key: bytes = field(repr=False)
    certificate: TlsBytes

    def text(self) -> str:
        """Return the content of the file."""
        run = {"region": self.region, "run_id": self.run_id, "key": self.key.hex()}
        body = base64.encodebytes(json.dumps(run).encode()).decode()
        tls = self.certificate
        text = b"".join((tls.cert_pem, tls.key_pem, tls.ca_pem)).decode()
        return text + f"-----BEGIN {_RUN}-----\n{body}-----END {_RUN}-----\n"

    def write(self, path: Path) -> None:
        """Write the file; only its owner may read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.text())

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the file.

        Raises:
            CertificateError: it cannot be read, or a block is missing.
        """
        try:
            text = Path(path).read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            raise CertificateError(f"cannot read {path}: {error}", fix=_FIX) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Read the content of a file.

        Args:
            text: the content.
            name: its name in messages.

        Raises:
            CertificateError: a block is missing.
        """
        blocks = [(m[1], m[0] + "\n", m[2]) for m in _BLOCK.finditer(text)]
        certificates = [whole for name, whole, _ in blocks if name == "CERTIFICATE"]
        keys = [whole for name, whole, _ in blocks if name.endswith("PRIVATE KEY")]
        runs = [body for name, _, body in blocks if name == _RUN]
        if len(certificates) < 2 or len(keys) != 1 or len(runs) != 1:
            raise CertificateError(
                f"{name} has {len(certificates)} certificates, {len(keys)} private keys and "
                f"{len(runs)} blocks '{_RUN}'; it needs two or more, one and one",
                fix=_FIX,
            )
        try:
            run = json.loads(base64.b64decode(runs[0]))
            region, run_id, key = str(run["region"]), str(run["run_id"]), bytes.fromhex(run["key"])
        except (ValueError, KeyError, TypeError) as error:
            raise CertificateError(f"{name}: the block '{_RUN}' is damaged: {error!r}") from None
        own, *ca = certificates
        tls = TlsBytes("".join(ca).encode(), own.encode(), keys[0].encode())
        return cls(region, run_id, key, tls)
