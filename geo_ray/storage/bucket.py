"""Buckets of S3-compatible servers: requests, streaming reads and multipart uploads.

Every failure is an error of geo_ray. Credentials come only from boto3's own chain (environment,
``~/.aws``, the machine's role). They never appear in an address, an error or a log line. They
are read again when a server rejects them, so keys rotated in ``~/.aws`` need no restart. An
upload is sent in pieces; a failed piece is sent again.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import io
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from geo_ray.base.errors import GeoRayError, StoreError
from geo_ray.base.threads import give_way
from geo_ray.storage.uri import S3Address

_REFUSED: Final = (400, 401, 403)  # also for expired keys; HEAD answers have no code


def may_have_expired(error: Any) -> bool:
    """Return whether a request may have been rejected because of its credentials.

    Args:
        error: a `botocore.exceptions.ClientError`.
    """
    return status_of(error) in _REFUSED


def status_of(error: Any) -> int | None:
    """Return the HTTP status of a `botocore.exceptions.ClientError`; None if it has none."""
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def new_session() -> Any:
    """Return a separate session of boto3, with the current credentials.

    boto3's default session is shared and not thread-safe.

    Raises:
        BotoCoreError: the user's configuration cannot be read.
    """
    # Imported here: local directories do not need the slow import of the SDK.
    import boto3
    from botocore.session import get_session

    session = get_session()
    loader = session.get_component("data_loader")
    loader.file_loader = _service_files()
    loader._cache = _answers(session.get_config_variable("data_path"))
    return boto3.session.Session(botocore_session=session)


@cache
def _service_files() -> Any:
    """Return the loader of the SDK's service descriptions; decodes each large file once."""
    from botocore.loaders import JSONFileLoader

    files = JSONFileLoader()
    files.load_file = cache(files.load_file)  # type: ignore[method-assign]
    return files


@cache
def _answers(data_path: str | None) -> dict[Any, Any]:
    """Return the cached directory listings of the SDK's loaders; each would list 400 folders."""
    return {}


def keys_of(session: Any) -> Any:
    """Return the current credentials of a boto3 session, or None."""
    credentials = session.get_credentials()
    return None if credentials is None else credentials.get_frozen_credentials()


def invalid_answers() -> tuple[type[Exception], ...]:
    """Return the exceptions outside the SDK's own hierarchy that it raises for invalid answers."""
    from botocore.parsers import ResponseParserError

    return (ResponseParserError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


T = TypeVar("T")

_COS_DOMAIN: Final = ".myqcloud.com"
_MISSING: Final = ("NoSuchKey", "404", "NotFound")
_THERE: Final = (409, 412)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request, so that every call ends.

    Attributes:
        connect_timeout_s: timeout of the connection.
        read_timeout_s: timeout of each wait for bytes.
        attempts: attempts per request, including the first; with boto3's jittered backoff.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    attempts: int = 4


class Bucket:
    """Requests to one bucket; thread-safe. Keys are complete, with the address's prefix.

    A read of a missing key raises `FileNotFoundError`, a write ``once`` of an existing key
    `FileExistsError`. Other failures are a `StoreError`.

    Args:
        address: of the bucket.
        limits: of each request.
    """

    def __init__(self, address: S3Address, limits: RequestLimits) -> None:
        self.address = address
        self.limits = limits
        self.endpoint_url = endpoint_of(address)
        self.place = f"bucket {address.bucket!r} at {self.endpoint_url or 'AWS'}"
        self._client_lock = threading.Lock()
        self._session, self._client = self._connected()
        self._keeps_conditions = False

    @property
    def client(self) -> Any:
        """boto3's client; may be replaced at the next request."""
        return self._client

    def put(
        self,
        key: str,
        data: bytes | bytearray,
        *,
        once: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object.

        Args:
            key: key of the object.
            data: content.
            once: write only if the object does not exist.
            metadata: metadata of the object.
        """
        options: dict[str, Any] = {"IfNoneMatch": "*"} if once else {}
        options |= {"Metadata": dict(metadata)} if metadata else {}
        verb = "create" if once else "write"
        self.ask(verb, key, "put_object", Key=key, Body=data, **options)

    def check_conditions(
        self, key: str, data: bytes | bytearray, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Verify that the server rejects a conditional write over an existing object.

        The check runs once per instance. Call it between a conditional write and the first action
        that relies on it.

        Args:
            key: key of an object that this process has just written ``once``.
            data: its content, which is written again if the server ignores the condition.
            metadata: its metadata.

        Raises:
            StoreError: the server ignores the condition, or does not answer.
        """
        if self._keeps_conditions:
            return
        try:
            self.put(key, data, once=True, metadata=metadata)
        except FileExistsError:
            self._keeps_conditions = True
            return
        raise StoreError(
            f"{self.place} overwrites objects despite a conditional write "
            "(If-None-Match: *), so two writers would not detect each other",
            fix="Use a server with conditional writes for run.dir, checkpoint.store, queues "
            "and clusters, or use a directory.",
        )

    def metadata(self, key: str) -> dict[str, str]:
        """Return the metadata of an object."""
        return dict(self.ask("look up", key, "head_object", Key=key)["Metadata"])

    def get(self, key: str, start: int = 0, etag: str | None = None) -> dict[str, Any]:
        """Start reading an object; return boto3's answer, whose ``Body`` the caller closes.

        Args:
            key: key of the object.
            start: first byte.
            etag: version of the object; another version raises `FileNotFoundError`.
        """
        options: dict[str, str] = {"Range": f"bytes={start}-"} if start else {}
        options |= {"IfMatch": etag} if etag else {}
        return dict(self.ask("read", key, "get_object", Key=key, **options))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of every object whose key begins with ``prefix``."""

        def pages() -> dict[str, int]:
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            )
            return {i["Key"]: int(i["Size"]) for page in pages for i in page.get("Contents", ())}

        return self.call("list", prefix, pages)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
        for key in keys:  # one by one, because some servers reject lists with current checksums
            self.ask("delete", key, "delete_object", Key=key)

    # -------------------------------------------------------------- objects in pieces

    def begin_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """Start a multipart upload; return its id."""
        answer = self.ask("write", key, "create_multipart_upload", Key=key, Metadata=dict(metadata))
        return str(answer["UploadId"])

    def put_piece(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Write one piece, numbered from 1; return its tag for `end_upload`."""
        answer = self.ask(
            "write", key, "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data
        )
        return str(answer["ETag"])

    def end_upload(self, key: str, upload: str, tags: Iterable[str], *, once: bool) -> None:
        """Complete an upload from its ordered pieces."""
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(tags, 1)]
        self.ask(
            "create" if once else "write",
            key,
            "complete_multipart_upload",
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
            **({"IfNoneMatch": "*"} if once else {}),
        )

    def drop_upload(self, key: str, upload: str) -> None:
        """Abort an upload; a missing one is ignored."""
        try:
            self.ask("delete", key, "abort_multipart_upload", Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return key and id of every unfinished upload below ``prefix``."""

        def pages() -> list[tuple[str, str]]:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            )
            found = [(i["Key"], i["UploadId"]) for page in pages for i in page.get("Uploads", ())]
            # Some servers ignore the prefix.
            return [(key, upload) for key, upload in found if key.startswith(prefix)]

        return self.call("list", prefix, pages)

    # -------------------------------------------------------------- requests

    def ask(self, verb: str, what: str, operation: str, **arguments: Any) -> Any:
        """Send one request of boto3's client; errors are those of the class."""
        bucket = self.address.bucket

        def request() -> Any:
            return getattr(self.client, operation)(Bucket=bucket, **arguments)

        return self.call(verb, what, request)

    def call(self, verb: str, what: str, call: Callable[[], T]) -> T:
        """Run a function that sends requests, and convert its errors.

        Args:
            verb: verb of the operation, for messages.
            what: key of the operation.
            call: sends requests with `client`; repeated after new credentials.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            client = self.client
            try:
                return call()
            except ClientError as error:
                if not may_have_expired(error) or not self._renew_credentials(client):
                    raise
            return call()
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if verb in ("read", "look up") and code in (*_MISSING, "PreconditionFailed", "412"):
                raise FileNotFoundError(f"{what} is not in {self.place}") from None
            if code == "NoSuchUpload":
                raise FileNotFoundError(f"{what}: its upload was aborted in {self.place}") from None
            if verb == "create" and status_of(error) in _THERE:
                raise FileExistsError(f"{what} is in {self.place} already") from None
            raise StoreError(f"{self.place} refused to {verb} {what}: {code}") from None
        except NoCredentialsError:
            raise StoreError(
                f"no credentials for {self.place}",
                fix="Give the machine a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "or a profile in ~/.aws.",
            ) from None
        except (BotoCoreError, Boto3Error) as error:
            # The SDK's text is omitted, because it may contain signed addresses.
            raise StoreError(
                f"{self.place} did not answer ({verb} {what}): {type(error).__name__}"
            ) from None
        except invalid_answers() as error:
            raise StoreError(
                f"{self.place}: the answer is not valid ({verb} {what}): {type(error).__name__}"
            ) from None

    def _renew_credentials(self, refused: Any) -> bool:
        """Read the credentials again; return whether they differ from those of a client."""
        with self._client_lock:
            if self._client is refused:
                session, client = self._connected()
                if keys_of(session) == keys_of(self._session):
                    return False
                self._session, self._client = session, client
            return True

    def _connected(self) -> tuple[Any, Any]:
        """Create a boto3 session with the current credentials, and its client."""
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        options: dict[str, Any] = {}
        s3: dict[str, Any] = {"addressing_style": self.address.addressing}
        if self.endpoint_url:
            host = urlsplit(self.endpoint_url).hostname or ""
            if self.address.addressing == "auto" and host.endswith(_COS_DOMAIN):
                # COS buckets made since 2024 reject boto3's default, path style.
                s3["addressing_style"] = "virtual"
            # Servers other than AWS may not support the newer checksum trailers; the sha256 of the
            # manifest verifies the content in any case.
            options["request_checksum_calculation"] = "when_required"
            options["response_checksum_validation"] = "when_required"
        config = Config(
            connect_timeout=self.limits.connect_timeout_s,
            read_timeout=self.limits.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": self.limits.attempts},
            s3=s3,
            **options,
        )
        try:
            session = new_session()
            client = session.client(
                "s3",
                endpoint_url=self.endpoint_url,
                region_name=self.address.region,
                config=config,
            )
        except (BotoCoreError, ValueError) as error:
            raise StoreError(
                f"no client for bucket {self.address.bucket!r}: {type(error).__name__}"
            ) from None
        client.meta.events.register("before-sign.s3", _keep_for_cos)
        return session, client


def endpoint_of(address: S3Address) -> str | None:
    """Return the server of an address; None for AWS.

    It is that of the address, or the one that boto3 finds: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL,
    or a profile's ``endpoint_url``.

    Raises:
        StoreError: the profile cannot be read, or the server's address contains credentials.
    """
    if address.endpoint_url is not None:
        return address.endpoint_url
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    try:
        session = get_session()
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None
        found = ConfiguredEndpointProvider(
            full_config=session.full_config,
            scoped_config=session.get_scoped_config(),
            client_name="s3",
        ).provide()
    except BotoCoreError as error:
        raise StoreError(f"the AWS profile cannot be read: {type(error).__name__}") from None
    if found is not None and "@" in urlsplit(found).netloc:
        raise StoreError(
            "the configured endpoint_url of S3 contains credentials",
            fix="Remove them; credentials come from the environment, ~/.aws or the machine's role.",
        )
    return None if found is None else str(found)


def broken_downloads() -> tuple[type[Exception], ...]:
    """Return the errors of interrupted bodies; boto3 itself retries only until the headers."""
    from botocore.exceptions import (
        ConnectionClosedError,
        IncompleteReadError,
        ReadTimeoutError,
        ResponseStreamingError,
    )

    return (IncompleteReadError, ReadTimeoutError, ResponseStreamingError, ConnectionClosedError)


def _keep_for_cos(request: Any, **_: Any) -> None:
    """Add COS's own header for a write that must not overwrite."""
    host = urlsplit(request.url).hostname or ""
    if host.endswith(_COS_DOMAIN) and "If-None-Match" in request.headers:
        request.headers["x-cos-forbid-overwrite"] = "true"


_log = logging.getLogger(__name__)


class ObjectReader(io.RawIOBase):
    """Reads an object, and resumes interrupted downloads; fails after repeated interruptions.

    Args:
        bucket: the bucket.
        key: key of the object.

    Raises:
        FileNotFoundError: the object does not exist.
        StoreError: the store does not answer or refuses; also raised by `readinto`.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        self._position = 0
        answer = bucket.get(key)
        self.size = int(answer["ContentLength"])
        self._etag = str(answer["ETag"])
        self._body: Any = answer["Body"]
        self._left = bucket.limits.attempts

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of ``buffer``; 0 at the end."""
        while True:
            if self._position >= self.size:
                return 0
            try:
                size = self._bucket.call("read", self._key, partial(self._read, buffer))
            except FileNotFoundError as error:  # it existed before
                raise StoreError(f"{error}: it changed while it was read") from None
            if size:
                self._position += size
                self._left = self._bucket.limits.attempts
                return size
            self._body.close()
            self._body = None

    def close(self) -> None:
        """Close the connection."""
        if self._body is not None:
            self._body.close()
        super().close()

    def _read(self, buffer: Any) -> int:
        """Read some bytes; 0 if the connection broke and can be retried."""
        if self._body is None:
            self._body = self._bucket.get(self._key, self._position, self._etag)["Body"]
        cause = "end"
        try:
            size = int(self._body.readinto(buffer))
        except broken_downloads() as error:
            size, cause = 0, type(error).__name__
        if size == 0:
            self._left -= 1
            where = f"{self._key} at byte {self._position}"
            if self._left <= 0:
                raise StoreError(f"{self._bucket.place}: the download of {where} was interrupted")
            _log.warning("download of %s was interrupted (%s)", where, cause)
        return size


PIECE_BYTES: Final = 8 << 20
_MOST_PIECES: Final = 10_000  # limit of pieces per object
_LANES: Final = 2  # parallel uploads of pieces
_NAME: Final = "geo-ray-upload"


def upload_once(
    bucket: Bucket,
    key: str,
    chunks: Iterable[memoryview | bytes],
    num_bytes: int,
    note: Callable[[str], None] = lambda step: None,
) -> None:
    """Write a new object atomically.

    The bytes pass through a few buffers of one piece each, whatever the object's size. A piece is
    retried, as configured in `RequestLimits`, if the server fails or the connection breaks. The
    sending threads have the lowest priority. After a lost answer, the existing object is compared
    with this one.

    Args:
        bucket: the bucket.
        key: key of the object.
        chunks: content; each chunk is valid until the next is requested.
        num_bytes: total size; determines the size of pieces.
        note: called with each finished step.

    Raises:
        FileExistsError: another object exists.
        StoreError: the store does not answer, refuses or is full. Nothing of the object remains.
    """
    mine = {_NAME: secrets.token_hex(16)}
    try:
        if num_bytes <= PIECE_BYTES:
            data = bytearray()
            for chunk in chunks:
                data += chunk
            note("opened")
            bucket.put(key, data, once=True, metadata=mine)
        else:
            _in_pieces(bucket, key, chunks, num_bytes, mine, note)
    except FileExistsError:
        if not _is_there(bucket, key, mine):
            raise
    note("written")


def _is_there(bucket: Bucket, key: str, mine: dict[str, str]) -> bool:
    try:
        return bucket.metadata(key).get(_NAME) == mine[_NAME]
    except FileNotFoundError:
        return False


def _in_pieces(
    bucket: Bucket,
    key: str,
    chunks: Iterable[memoryview | bytes],
    num_bytes: int,
    mine: dict[str, str],
    note: Callable[[str], None],
) -> None:
    upload = bucket.begin_upload(key, mine)
    note("opened")
    size = max(PIECE_BYTES, -(-num_bytes // _MOST_PIECES))
    free: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(_LANES + 1):
        free.put(bytearray(size))

    def send(number: int, piece: bytearray) -> str:
        try:
            return bucket.put_piece(key, upload, number, piece)
        finally:
            free.put(piece)

    tags: list[str] = []
    sent: deque[Future[str]] = deque()
    try:
        with ThreadPoolExecutor(_LANES, "upload", give_way) as lanes:
            try:
                for number, piece in enumerate(_filled(chunks, free), 1):
                    sent.append(lanes.submit(send, number, piece))
                    note("chunk_written")
                    while sent and sent[0].done():
                        tags.append(
                            sent.popleft().result()
                        )  # raises after a failure, so that no more are sent
                tags += [each.result() for each in sent]
            except BaseException:
                lanes.shutdown(wait=False, cancel_futures=True)
                raise
        bucket.end_upload(key, upload, tags, once=True)
    except BaseException as error:
        _drop(bucket, key, upload)
        if isinstance(error, FileNotFoundError) and _is_there(bucket, key, mine):
            return  # it was completed, but the answer was lost
        raise _gone(error) from None


def _gone(error: BaseException) -> BaseException:
    """Convert the error of an upload that another process has aborted."""
    if isinstance(error, FileNotFoundError):
        return FileExistsError(str(error))
    return error


def _drop(bucket: Bucket, key: str, upload: str) -> None:
    """Abort an upload; if that fails, the next save removes its pieces."""
    try:
        bucket.drop_upload(key, upload)
    except GeoRayError as error:
        _log.warning("pieces of %s remain in %s: %s", key, bucket.place, error.message)


def _filled(
    chunks: Iterable[memoryview | bytes], free: SimpleQueue[bytearray]
) -> Iterator[bytearray]:
    """Yield buffers filled with the content; the last one is truncated."""
    piece, used = free.get(), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            size = min(len(rest), len(piece) - used)
            piece[used : used + size] = rest[:size]
            used += size
            rest = rest[size:]
            if used == len(piece):
                yield piece
                piece, used = free.get(), 0
    if used:
        del piece[used:]
        yield piece
