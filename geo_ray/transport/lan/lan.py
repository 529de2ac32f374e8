"""Requests and answers inside a region: a worker asks its server, a server its bridge.

Blocking sockets with buffers in place. When both ends run on one host they agree on a
`SharedBuffer`; tensors then pass through memory and the socket carries only the signal.
"""

from __future__ import annotations

from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.lan.server import Handler, LanConnection, LanServer
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

__all__ = ["Address", "Handler", "LanClient", "LanConfig", "LanConnection", "LanServer", "Meta"]
