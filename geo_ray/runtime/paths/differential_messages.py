"""Small messages of differential transmission over the connection."""

from __future__ import annotations

import logging

from geo_ray.errors import DeadlineExceededError, LinkDownError
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)

DATAGRAMS = b"datagrams"
"""What the key of a connection is derived for."""


def notify(endpoint: Endpoint, peer: str, kind: str, meta: Meta) -> None:
    """Send a small message ahead of all data; one that finds no room is not worth waiting for."""
    try:
        endpoint.send(peer, Message(kind, meta, b"", "control", CONTROL), deadline_s=0.0)
    except (DeadlineExceededError, LinkDownError) as error:
        log.debug("region %s was not sent %s: %s", peer, kind, error.message)
