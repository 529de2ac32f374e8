"""Calls to AWS: bounded, retried when it throttles, with typed errors for all failures.

Credentials come only from boto3's own chain (environment, ``~/.aws``, the machine's role). They are
read again when AWS refuses them, so keys that are rotated in ``~/.aws`` need no restart.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from geo_ray.clouds.replies import quoted
from geo_ray.errors import CloudError, CloudUnreachableError
from geo_ray.stores.sdk import invalid_answers, keys_of, may_have_expired

T = TypeVar("T")

CREDENTIALS_FIX: Final = (
    "Give the machine a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile in "
    "~/.aws."
)

_PAGE: Final = 100
_MOST_PAGES: Final = 1000
_SERVER_ERROR: Final = 500
_LASTING: Final = frozenset({"InsufficientInstanceCapacity", "InsufficientCapacity"})
SLOW_DOWN: Final = frozenset(
    {
        "EC2ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)


class Aws:
    """An account of AWS.

    Making a client costs more than what is asked by it, so there is one for each service and
    region as long as this lives.

    Args:
        endpoints: addresses by service, in place of those of AWS.
        attempts: tries per request, the first included.
        timeout_s: bound on connecting, and on each wait for bytes.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(
        self, endpoints: Mapping[str, str], *, attempts: int = 5, timeout_s: float = 20.0
    ) -> None:
        from boto3.session import Session  # takes a while to import
        from botocore.exceptions import BotoCoreError

        self._endpoints = dict(endpoints)
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._making = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}
        try:
            self._session = Session()
            frozen = keys_of(self._session)
        except BotoCoreError as error:
            raise CloudError(
                f"the credentials of AWS cannot be had: {type(error).__name__}", fix=CREDENTIALS_FIX
            ) from None
        if frozen is None:
            raise CloudError("there are no credentials of AWS", fix=CREDENTIALS_FIX)
        self._secrets: tuple[str | None, ...] = _secrets_of(frozen)

    def listed(
        self, service: str, region: str, operation: str, key: str, **arguments: Any
    ) -> list[Any]:
        """Return all items of all pages of an answer; see `call` for what it raises.

        Args:
            service: boto3's name of the service.
            region: region that is asked.
            operation: a method of boto3's client that gives pages.
            key: of the list in each page.
            **arguments: of the operation.
        """
        place = f"aws {service} in {region}"

        def pages(client: Any) -> list[Any]:
            pages = client.get_paginator(operation).paginate(
                **arguments, PaginationConfig={"PageSize": _PAGE}
            )
            found: list[Any] = []
            for number, page in enumerate(pages):
                items = page.get(key)
                if not isinstance(items, list) or number == _MOST_PAGES:
                    wrong = f"no {key}" if number < _MOST_PAGES else "pages without end"
                    raise CloudError(f"{place}: the answer is not valid ({wrong})")
                found += items
            return found

        return self._ask(place, service, region, pages)

    def call(self, service: str, region: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call one operation and return its answer.

        Args:
            service: boto3's name of the service.
            region: region that is asked.
            operation: a method of boto3's client.
            **arguments: of the operation.

        Raises:
            CloudUnreachableError: it did not answer, or asked to slow down until the last try.
            CloudError: it refused, or its answer makes no sense.
        """
        place = f"aws {service} {operation} in {region}"
        return self._ask(
            place, service, region, lambda client: dict(getattr(client, operation)(**arguments))
        )

    def _ask(self, place: str, service: str, region: str, ask: Callable[[Any], T]) -> T:
        """Send requests by a client; again by another one if there are new credentials."""
        from botocore.exceptions import ClientError

        with self._answering(place):
            session = self._session
            try:
                return ask(self._client(service, region))
            except ClientError as error:
                if not may_have_expired(error) or not self._renew_credentials(session):
                    raise
            return ask(self._client(service, region))

    def _renew_credentials(self, refused: Any) -> bool:
        """Read the credentials again; whether they differ from those of a session."""
        from boto3.session import Session

        with self._making:
            if self._session is refused:
                session = Session()
                keys = keys_of(session)
                if keys is None or keys == keys_of(refused):
                    return False
                # A late answer to the old keys may still quote them.
                self._secrets = (*_secrets_of(keys), *_secrets_of(keys_of(refused)))
                self._session = session
                self._clients.clear()
            return True

    @contextmanager
    def _answering(self, place: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from botocore.exceptions import ConnectionError as BotoConnectionError

        try:
            yield
        except ClientError as error:
            raise self._refusal(place, error.response) from None
        except (BotoConnectionError, HTTPClientError) as error:
            # The SDK's text is left out: it may quote signed addresses.
            raise CloudUnreachableError(f"{place} did not answer: {type(error).__name__}") from None
        except BotoCoreError as error:
            raise CloudError(f"{place}: {type(error).__name__}") from None
        except invalid_answers() as error:
            raise CloudError(f"{place}: the answer is not valid ({type(error).__name__})") from None

    def _client(self, service: str, region: str) -> Any:
        from botocore.config import Config

        with self._making:  # clients may be used by several threads, and not be made by them
            client = self._clients.get((service, region))
            if client is None:
                client = self._session.client(
                    service,
                    region_name=region,
                    endpoint_url=self._endpoints.get(service),
                    config=Config(
                        connect_timeout=self._timeout_s,
                        read_timeout=self._timeout_s,
                        retries={"mode": "standard", "total_max_attempts": self._attempts},
                    ),
                )
                self._clients[service, region] = client
            return client

    def _refusal(self, place: str, response: Mapping[str, Any]) -> CloudError:
        said = response.get("Error", {})
        code = quoted(str(said.get("Code", "unknown")), self._secrets)
        text = quoted(str(said.get("Message", "")), self._secrets)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in SLOW_DOWN:
            found: CloudError = CloudUnreachableError(
                f"{place} asked to slow down until the last try: {code}"
            )
        elif status >= _SERVER_ERROR and code not in _LASTING:
            found = CloudUnreachableError(f"{place} failed until the last try: {code}: {text}")
        else:
            found = CloudError(f"{place} refused: {code}: {text}")
        found.said = code
        return found


def _secrets_of(keys: Any) -> tuple[str | None, ...]:
    return keys.secret_key, keys.token, keys.access_key
