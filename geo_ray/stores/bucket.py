"""One bucket of a server of the S3 protocol, and every failure as an error of geo_ray's tree.

Credentials come only from boto3's own chain (environment, ``~/.aws``, the machine's role). They are
never in an address, an error or a log line. They are read again when a server refuses them, so keys
that are rotated in ``~/.aws`` need no restart.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from geo_ray.errors import StoreError
from geo_ray.stores.sdk import invalid_answers, keys_of, may_have_expired, status_of
from geo_ray.stores.uri import S3Address

T = TypeVar("T")

_COS_DOMAIN: Final = ".myqcloud.com"
_MISSING: Final = ("NoSuchKey", "404", "NotFound")
_THERE: Final = (409, 412)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Every call ends: at most so many tries, each bounded by the two timeouts.

    Attributes:
        connect_timeout_s: bound on the connection's establishment.
        read_timeout_s: bound on each wait for bytes.
        attempts: tries per request, the first included; boto3's jittered backoff between them.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    attempts: int = 4


class Bucket:
    """Requests to one bucket; threads may share it. Keys are whole, with the address's prefix.

    A key that is not there is a `FileNotFoundError` where it is read, one that is there a
    `FileExistsError` where it is written ``once``. All else is a `StoreError`.

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
        """boto3's client; may be another one at the next request."""
        return self._client

    def put(
        self,
        key: str,
        data: bytes | bytearray,
        *,
        once: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object whole.

        Args:
            key: where.
            data: what.
            once: only if there is none.
            metadata: kept beside it.
        """
        options: dict[str, Any] = {"IfNoneMatch": "*"} if once else {}
        options |= {"Metadata": dict(metadata)} if metadata else {}
        verb = "create" if once else "write"
        self.ask(verb, key, "put_object", Key=key, Body=data, **options)

    def check_conditions(
        self, key: str, data: bytes | bytearray, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Make sure that the server refuses a conditional write over an object that is there.

        Asks once in the life of this object. Call it between a conditional write and the first act
        that relies on it.

        Args:
            key: of an object that this process has just written ``once``.
            data: its content, which is written again if the server ignores the condition.
            metadata: as it was written.

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
            f"{self.place} writes over objects although it is told not to "
            "(If-None-Match: *), so two writers would not notice each other",
            fix="Use a server that knows conditional writes for run.dir, checkpoint.store, queues "
            "and clusters, or keep them in a directory.",
        )

    def metadata(self, key: str) -> dict[str, str]:
        """What was kept beside an object."""
        return dict(self.ask("look up", key, "head_object", Key=key)["Metadata"])

    def get(self, key: str, start: int = 0, etag: str | None = None) -> dict[str, Any]:
        """Begin to read an object; boto3's answer, whose ``Body`` the caller closes.

        Args:
            key: the object.
            start: the first byte.
            etag: of the version that is asked for; another is a `FileNotFoundError`.
        """
        options: dict[str, str] = {"Range": f"bytes={start}-"} if start else {}
        options |= {"IfMatch": etag} if etag else {}
        return dict(self.ask("read", key, "get_object", Key=key, **options))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every object whose key begins with ``prefix``."""

        def pages() -> dict[str, int]:
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            )
            return {i["Key"]: int(i["Size"]) for page in pages for i in page.get("Contents", ())}

        return self.call("list", prefix, pages)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is not there does no harm."""
        for key in keys:  # one by one: not every server takes lists with the checksums of today
            self.ask("delete", key, "delete_object", Key=key)

    # -------------------------------------------------------------- objects in pieces

    def begin_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """Begin to write an object in pieces; the name of this upload."""
        answer = self.ask("write", key, "create_multipart_upload", Key=key, Metadata=dict(metadata))
        return str(answer["UploadId"])

    def put_piece(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Write one piece, numbered from 1; the tag that `end_upload` wants."""
        answer = self.ask(
            "write", key, "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data
        )
        return str(answer["ETag"])

    def end_upload(self, key: str, upload: str, tags: Iterable[str], *, once: bool) -> None:
        """Make an object of its pieces, which are in order."""
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
        """Give an upload up; one that is not there does no harm."""
        try:
            self.ask("delete", key, "abort_multipart_upload", Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and name of every upload below ``prefix`` that was begun and not ended."""

        def pages() -> list[tuple[str, str]]:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            )
            found = [(i["Key"], i["UploadId"]) for page in pages for i in page.get("Uploads", ())]
            # Some servers list all that there are.
            return [(key, upload) for key, upload in found if key.startswith(prefix)]

        return self.call("list", prefix, pages)

    # -------------------------------------------------------------- requests

    def ask(self, verb: str, what: str, operation: str, **arguments: Any) -> Any:
        """Send one request of boto3's client, and answer or raise as the class says."""
        bucket = self.address.bucket

        def request() -> Any:
            return getattr(self.client, operation)(Bucket=bucket, **arguments)

        return self.call(verb, what, request)

    def call(self, verb: str, what: str, call: Callable[[], T]) -> T:
        """Run what sends requests.

        Args:
            verb: what it does, for messages.
            what: with which key.
            call: sends them by `client`; called again if there are new credentials.
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
                raise FileNotFoundError(
                    f"{what}: its upload was given up in {self.place}"
                ) from None
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
            # The SDK's text is left out of the chain: it may quote signed addresses.
            raise StoreError(
                f"{self.place} did not answer ({verb} {what}): {type(error).__name__}"
            ) from None
        except invalid_answers() as error:
            raise StoreError(
                f"{self.place}: the answer is not valid ({verb} {what}): {type(error).__name__}"
            ) from None

    def _renew_credentials(self, refused: Any) -> bool:
        """Read the credentials again; whether they differ from those of a client."""
        with self._client_lock:
            if self._client is refused:
                session, client = self._connected()
                if keys_of(session) == keys_of(self._session):
                    return False
                self._session, self._client = session, client
            return True

    def _connected(self) -> tuple[Any, Any]:
        """A session of boto3's with the present credentials, and its client."""
        # Imported here: users of local directories do not pay for the SDK's start-up.
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        options: dict[str, Any] = {}
        s3: dict[str, Any] = {"addressing_style": self.address.addressing}
        if self.endpoint_url:
            host = urlsplit(self.endpoint_url).hostname or ""
            if self.address.addressing == "auto" and host.endswith(_COS_DOMAIN):
                # COS buckets made since 2024 refuse boto3's choice, path style.
                s3["addressing_style"] = "virtual"
            # Servers other than AWS may not know the newer checksum trailers; sha256 of the
            # manifest checks the content anyway.
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
            # boto3's default session is shared and not safe to use from several threads.
            session = boto3.session.Session()
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
    """The server of an address; None for AWS itself.

    That of the address, else the one that boto3 finds: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or a
    profile's ``endpoint_url``.

    Raises:
        StoreError: the profile cannot be read, or the server's address carries credentials.
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
        raise StoreError(f"the profile of AWS cannot be read: {type(error).__name__}") from None
    if found is not None and "@" in urlsplit(found).netloc:
        raise StoreError(
            "the configured endpoint_url of S3 carries credentials",
            fix="Remove them; credentials come from the environment, ~/.aws or the machine's role.",
        )
    return None if found is None else str(found)


def broken_downloads() -> tuple[type[Exception], ...]:
    """What the body of an answer raises that breaks off; boto3 itself repeats until the headers."""
    from botocore.exceptions import (
        ConnectionClosedError,
        IncompleteReadError,
        ReadTimeoutError,
        ResponseStreamingError,
    )

    return (IncompleteReadError, ReadTimeoutError, ResponseStreamingError, ConnectionClosedError)


def _keep_for_cos(request: Any, **_: Any) -> None:
    """Say in COS's own words, too, that nothing is to be written over."""
    host = urlsplit(request.url).hostname or ""
    if host.endswith(_COS_DOMAIN) and "If-None-Match" in request.headers:
        request.headers["x-cos-forbid-overwrite"] = "true"
