"""What every caller of AWS's SDK needs: whether new credentials help, and errors without a tree."""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any, Final

_REFUSED: Final = (400, 401, 403)  # also for keys that have expired; HEAD answers have no code


def may_have_expired(error: Any) -> bool:
    """Say whether the credentials of a request may be why it was refused.

    Args:
        error: a `botocore.exceptions.ClientError`.
    """
    return status_of(error) in _REFUSED


def status_of(error: Any) -> int | None:
    """Return the HTTP status of a `botocore.exceptions.ClientError`; None if it has none."""
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def keys_of(session: Any) -> Any:
    """Return the present credentials of a session of boto3's; None if there are none."""
    credentials = session.get_credentials()
    return None if credentials is None else credentials.get_frozen_credentials()


def invalid_answers() -> tuple[type[Exception], ...]:
    """Return what the SDK raises, outside its own tree of errors, for an answer without sense."""
    from botocore.parsers import ResponseParserError

    return (ResponseParserError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
