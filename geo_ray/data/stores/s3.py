"""A bucket as a store: AWS S3, Tencent COS and every other server of the S3 protocol.

Credentials come only from boto3's own chain (environment, ``~/.aws``, the machine's role). They are
never in an address, an error or a log line.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import closing
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from geo_ray.data.stores.paths import checked_path
from geo_ray.data.stores.uri import S3Address, parse_s3
from geo_ray.errors import ShardMissingError, StoreError

_log = logging.getLogger(__name__)
_COS_DOMAIN = ".myqcloud.com"
_PIECE_BYTES = 1 << 20
_MISSING = ("NoSuchKey", "404", "NotFound")

T = TypeVar("T")


class S3Store:
    """Objects of one bucket below a prefix.

    Every call ends: at most ``attempts`` tries, each bounded by the two timeouts, with boto3's
    jittered backoff between them.

    Args:
        uri: ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=...``.
        connect_timeout_s: bound on the connection's establishment.
        read_timeout_s: bound on each wait for bytes.
        attempts: tries per request, the first included.
    """

    def __init__(
        self,
        uri: str,
        *,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
        attempts: int = 4,
    ) -> None:
        self._uri = uri
        self._address = parse_s3(uri)
        self._attempts = attempts
        self._client = _client(self._address, connect_timeout_s, read_timeout_s, attempts)

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self._uri

    def read(self, path: str) -> bytes:
        """See `Store.read`."""
        key = self._key(path)

        def get() -> bytes:
            answer = self._client.get_object(Bucket=self._address.bucket, Key=key)
            # closing(), not the body's own `with`: that would hand out the raw stream below it,
            # whose errors are not boto3's and whose length is not checked.
            with closing(answer["Body"]) as body:
                return bytes(body.read())

        return self._call("read", path, lambda: self._again(get, path))

    def open(self, path: str) -> BinaryIO:
        """See `Store.open`: a copy on this machine's disk, without a name and gone when closed."""
        key = self._key(path)

        def get() -> BinaryIO:
            answer = self._client.get_object(Bucket=self._address.bucket, Key=key)
            copy = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's to close)
            try:
                with closing(answer["Body"]) as body:
                    for piece in body.iter_chunks(_PIECE_BYTES):
                        copy.write(piece)
                copy.seek(0)
            except BaseException:
                copy.close()
                raise
            return copy

        try:
            return self._call("read", path, lambda: self._again(get, path))
        except OSError as error:
            raise StoreError(
                f"no room for a copy of {path} of bucket {self._address.bucket!r}: {error}",
                fix="Free space, or set TMPDIR to a folder on a larger disk.",
            ) from error

    def write(self, path: str, data: bytes) -> None:
        """See `Store.write`: one PUT, which S3 and COS apply atomically."""
        key = self._key(path)
        self._call(
            "write",
            path,
            lambda: self._client.put_object(Bucket=self._address.bucket, Key=key, Body=data),
        )

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        bucket, key = self._address.bucket, self._key(path)
        try:
            self._call("look up", path, lambda: self._client.head_object(Bucket=bucket, Key=key))
        except ShardMissingError:
            # HEAD says 404 for a missing bucket too, and that is no answer to this question.
            self._call("reach", path, lambda: self._client.head_bucket(Bucket=bucket))
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        root = f"{self._address.prefix}/" if self._address.prefix else ""
        below = f"{root}{checked_path(prefix, self._uri)}/" if prefix else root

        def pages() -> list[str]:
            paginator = self._client.get_paginator("list_objects_v2")
            found = paginator.paginate(Bucket=self._address.bucket, Prefix=below)
            keys = [item["Key"] for page in found for item in page.get("Contents", ())]
            return sorted(key[len(root) :] for key in keys if not key.endswith("/"))

        return self._call("list", prefix or "/", pages)

    def _key(self, path: str) -> str:
        path = checked_path(path, self._uri)
        return f"{self._address.prefix}/{path}" if self._address.prefix else path

    def _again(self, get: Callable[[], T], path: str) -> T:
        """Repeat a download whose body broke off; boto3 itself repeats only until the headers."""
        from botocore.exceptions import (
            ConnectionClosedError,
            IncompleteReadError,
            ReadTimeoutError,
            ResponseStreamingError,
        )

        broken = (
            IncompleteReadError,
            ReadTimeoutError,
            ResponseStreamingError,
            ConnectionClosedError,
        )
        for attempt in range(1, self._attempts):
            try:
                return get()
            except broken as error:
                _log.warning(
                    "bucket %s: download of %s broke off (%s), attempt %d of %d",
                    self._address.bucket,
                    path,
                    type(error).__name__,
                    attempt,
                    self._attempts,
                )
        return get()

    def _call(self, verb: str, path: str, call: Callable[[], T]) -> T:
        """Run a request and turn every failure into an error of geo_ray's tree."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        place = f"bucket {self._address.bucket!r} at {self._address.endpoint_url or 'AWS'}"
        try:
            return call()
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if code in _MISSING and verb in ("read", "look up"):
                raise ShardMissingError(f"{path} is not in {place}") from None
            raise StoreError(f"{place} refused to {verb} {path}: {code}") from None
        except NoCredentialsError:
            raise StoreError(
                f"no credentials for {place}",
                fix="Give the machine a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "or a profile in ~/.aws.",
            ) from None
        except (BotoCoreError, Boto3Error) as error:
            # The SDK's text is left out of the chain: it may quote signed addresses.
            raise StoreError(
                f"{place} did not answer ({verb} {path}): {type(error).__name__}"
            ) from None


def _client(
    address: S3Address, connect_timeout_s: float, read_timeout_s: float, attempts: int
) -> Any:
    # Imported here: users of local directories do not pay for the SDK's start-up.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    options: dict[str, Any] = {}
    addressing = address.addressing
    if address.endpoint_url:
        host = urlsplit(address.endpoint_url).hostname or ""
        if addressing == "auto" and host.endswith(_COS_DOMAIN):
            addressing = "virtual"  # COS buckets made since 2024 refuse boto3's choice, path style
        # Servers other than AWS may not know the newer checksum trailers; sha256 of the manifest
        # checks the content anyway.
        options["request_checksum_calculation"] = "when_required"
        options["response_checksum_validation"] = "when_required"
    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": addressing},
        **options,
    )
    try:
        # An own session: boto3's default one is shared and not safe to use from several threads.
        return boto3.session.Session().client(
            "s3", endpoint_url=address.endpoint_url, region_name=address.region, config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise StoreError(
            f"no client for bucket {address.bucket!r}: {type(error).__name__}"
        ) from None
