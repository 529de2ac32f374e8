"""Addresses of stores and of files in them, and the relative paths that a store accepts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from geo_ray.base.errors import StoreError

_OPTIONS = ("endpoint_url", "region", "addressing")
_HOW_TO_WRITE = (
    "Write s3://BUCKET/PREFIX?endpoint_url=URL&region=NAME&addressing=path|virtual; all options "
    "are optional."
)


@dataclass(frozen=True)
class S3Address:
    """A parsed ``s3://`` address.

    Attributes:
        bucket: the bucket.
        prefix: keys start with it and a slash; "" for the bucket's root.
        endpoint_url: server other than AWS, or None.
        region: the bucket's cloud region, or None for boto3's own choice.
        addressing: "path", "virtual" or "auto".
    """

    bucket: str
    prefix: str
    endpoint_url: str | None
    region: str | None
    addressing: str


def is_s3(uri: str) -> bool:
    """Return whether the address has the form ``s3://``."""
    return uri.startswith("s3://")


def parse_s3(uri: str) -> S3Address:
    """Parse an ``s3://bucket/prefix?...`` address.

    Raises:
        StoreError: unknown options, or credentials in the address (which are not repeated).
    """
    try:
        parts = urlsplit(uri)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        endpoint = options.get("endpoint_url")
        server = urlsplit(endpoint or "")
        _ = server.port  # parsed here to detect errors early
    except ValueError:  # its text may contain a secret
        raise StoreError("an s3:// address is invalid", fix=_HOW_TO_WRITE) from None
    if "@" in parts.netloc or "@" in server.netloc:
        raise StoreError(
            f"the address of bucket {parts.netloc.rpartition('@')[2]!r} contains credentials",
            fix="Remove them; credentials come from the environment, ~/.aws or the machine's role.",
        )
    unknown = sorted(set(options) - set(_OPTIONS))
    addressing = options.get("addressing", "auto")
    if not parts.netloc or unknown or addressing not in ("auto", "path", "virtual"):
        # Only names are shown, because a value may be a misplaced secret.
        raise StoreError(
            f"address of bucket {parts.netloc!r} is invalid (options {', '.join(sorted(options))})",
            fix=_HOW_TO_WRITE,
        )
    if endpoint is not None and (server.scheme not in ("http", "https") or not server.hostname):
        raise StoreError(
            f"endpoint_url of bucket {parts.netloc!r} is not an http or https address",
            fix="Write endpoint_url=https://HOST; escape '&' and '?' in it.",
        )
    return S3Address(
        bucket=parts.netloc,
        prefix=parts.path.strip("/"),
        endpoint_url=endpoint,
        region=options.get("region"),
        addressing=addressing,
    )


def local_path(uri: str) -> Path:
    """Return the absolute path of ``file:///dir`` or of a plain path.

    Raises:
        StoreError: another scheme, or a host.
    """
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise StoreError(
            f"store address is invalid: {error}",
            fix="Use a path, file:///DIR or s3://BUCKET/PREFIX.",
        ) from None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise StoreError(
            f"store address scheme {parts.scheme!r} is not supported",
            fix="Use a path, file:///DIR or s3://BUCKET/PREFIX.",
        )
    return Path(unquote(parts.path))


def join(uri: str, path: str) -> str:
    """Return the address of ``path`` below a store; ``s3://`` options stay at the end."""
    if is_s3(uri):
        base, mark, query = uri.partition("?")
        return f"{base.rstrip('/')}/{path}{mark}{query}"
    return (local_path(uri) / path).as_uri()


def split(uri: str) -> tuple[str, str]:
    """Split the address of a file into the store's address and the file name."""
    if is_s3(uri):
        base, mark, query = uri.partition("?")
        folder, _, name = base.rpartition("/")
        return f"{folder}{mark}{query}", name
    path = local_path(uri)
    return path.parent.as_uri(), path.name


def s3_uri(bucket: str, prefix: str = "", **options: str) -> str:
    """Build an ``s3://`` address; ``options`` are those of `S3Address`."""
    query = urlencode(options)
    return f"s3://{bucket}/{prefix}{'?' + query if query else ''}"


def problem_of_path(path: str) -> str | None:
    """Return why ``path`` is not a plain relative path inside a store, or None."""
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path or any(ord(char) < 32 for char in path):
        return "has a backslash or a control character"
    if ".." in PurePosixPath(path).parts:
        return "leaves its store by '..'"
    if str(PurePosixPath(path)) != path or path == ".":
        return "is not in its shortest form"
    return None


def checked_path(path: str, uri: str) -> str:
    """Return ``path`` if it stays inside the store.

    Raises:
        StoreError: it is absolute, has ``..`` or is otherwise not plain.
    """
    problem = problem_of_path(path)
    if problem:
        raise StoreError(
            f"path {path!r} {problem}; rejected for store {uri}",
            fix="Use a relative path such as us-east/train-00000.parquet.",
        )
    return path
