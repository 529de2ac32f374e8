"""What tenants ask of a queue: a small box for each of them in the queue's store.

A box is changed only as it was read, so two who put something in at once both succeed, one after
the other, and the queue takes out only what its journal has. Boxes are files or objects of their
own, so a tenant can be given access to its own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.config.base import StrictModel
from geo_ray.errors import QueueJournalError, QueueRequestError
from geo_ray.lease.store import ConditionalStore
from geo_ray.queue.job_spec import AnyRequest
from geo_ray.queue.packed import MOST_PACKED_BYTES, pack, unpack
from geo_ray.queue.tokens import is_signed, sign

_TRIES: Final = 50
_REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest)


class SignedRequest(StrictModel):
    """A request as text, and who says so."""

    id: str
    text: str
    signature: str


_BOX: TypeAdapter[list[SignedRequest]] = TypeAdapter(list[SignedRequest])


def box_key(tenant: str) -> str:
    """Return the key of a tenant's box."""
    return f"inbox-{tenant}.z"


def signed(request: AnyRequest, queue_id: str, token: str) -> SignedRequest:
    """Sign a request.

    Args:
        request: what is asked.
        queue_id: identity of the queue that may hear it, as its journal has it.
        token: of the tenant.

    Raises:
        QueueDeniedError: it is no token.
    """
    text = _REQUEST.dump_json(request).decode()
    return SignedRequest(id=request.id, text=text, signature=sign(token, queue_id, text))


def opened(found: SignedRequest, queue_id: str, key: str) -> AnyRequest | None:
    """Return what is asked; None: it makes no sense, or the tenant did not say so."""
    if not is_signed(key, queue_id, found.text, found.signature):
        return None
    try:
        request = _REQUEST.validate_json(found.text)
    except ValidationError:
        return None
    return request if request.id == found.id else None


def post(store: ConditionalStore, tenant: str, request: SignedRequest) -> None:
    """Put a request into a tenant's box.

    Raises:
        QueueRequestError: the box is full, as nobody empties it, or is fought over.
    """

    def put(box: list[SignedRequest]) -> list[SignedRequest]:
        return [*box, request]

    _change(store, tenant, put)


def look(store: ConditionalStore, tenant: str) -> list[SignedRequest]:
    """Return what is in a tenant's box; one that makes no sense is empty, see `remove`."""
    found = store.read(box_key(tenant))
    return [] if found is None else _read(found.data, tenant)


def remove(store: ConditionalStore, tenant: str, known: Collection[str]) -> None:
    """Take out what is written down elsewhere, and what makes no sense.

    Raises:
        QueueRequestError: the box is fought over.
    """
    _change(store, tenant, lambda box: [each for each in box if each.id not in known])


def _change(
    store: ConditionalStore,
    tenant: str,
    change: Callable[[list[SignedRequest]], list[SignedRequest]],
) -> None:
    for _ in range(_TRIES):
        found = store.read(box_key(tenant))
        box = [] if found is None else _read(found.data, tenant)
        data = pack(_BOX, change(box))
        if len(data) > MOST_PACKED_BYTES:
            raise QueueRequestError(
                f"the box of tenant {tenant} is full",
                fix="See with `geo-ray queue list` whether the queue is served.",
            )
        tag = store.write(box_key(tenant), data, None if found is None else found.tag)
        if tag is not None:
            return
    raise QueueRequestError(
        f"the box of tenant {tenant} changes faster than it can be written",
        fix="Try again.",
    )


def _read(data: bytes, tenant: str) -> list[SignedRequest]:
    try:
        return unpack(_BOX, data, box_key(tenant))
    except QueueJournalError:  # whoever may write there has put nonsense in
        return []
