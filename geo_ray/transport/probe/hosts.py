"""A probe between two hosts, without a cluster: one listens, the other dials and measures."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from geo_ray.base.errors import ConfigError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.links import LinkRecord
from geo_ray.transport.probe.node import ProbeNode
from geo_ray.transport.probe.plan import ProbePlan, ProbeProgress
from geo_ray.transport.security.cert_store import files_of
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

KEY_VARIABLE: Final = "GEO_RAY_PROBE_KEY"
_RUN: Final = "geo-ray-probe"
_LISTENER: Final = "listener"
_SHORTEST_KEY: Final = 16
_POLL_S: Final = 0.1
_WAIT_S: Final = 3600.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ProbeSide:
    """Settings of this end.

    Attributes:
        region: its name in the table; with ``certs`` that of its certificate; None: the host's.
        certs: directory with `regions/NAME/`; None: no TLS, both ends share a key.
        peer: region of the listening end; required for dialing with ``certs``.
        key: that both ends share, 16 characters or more; default: that in GEO_RAY_PROBE_KEY.
    """

    region: str | None = None
    certs: str | os.PathLike[str] | None = None
    peer: str | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """This end's in the table."""
        return self.region or socket.gethostname()

    @property
    def shared_key(self) -> str:
        """The key that was given, or is in the environment; "" if there is none."""
        return self.key or os.environ.get(KEY_VARIABLE, "")

    def endpoint(self, node: ProbeNode, anonymous: str, key_text: str) -> Endpoint:
        """Return an endpoint that accepts every peer with a certificate of the CA, or the key.

        Raises:
            CertificateError: the certificate cannot be used.
            ConfigError: the key is too short.
        """
        if self.certs is None:
            identity = EndpointIdentity(_RUN, anonymous, 1, _key(key_text))
            return Endpoint(identity, node.on_message, TransportConfig(tls="off"))
        identity = EndpointIdentity(_RUN, self.name, time.time_ns(), _key("known by certificate"))
        return Endpoint(
            identity,
            node.on_message,
            TransportConfig(tls="required"),
            certificate=files_of(Path(self.certs), self.name),
        )


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Address of a listening end.

    Attributes:
        host: the address that it is bound to.
        port: of TCP and UDP.
        key: the generated key that the other end needs, or "".
    """

    host: str
    port: int
    key: str = field(repr=False)


def serve(
    bind: str,
    side: ProbeSide,
    on_listening: Callable[[ProbeAddress], None],
    on_served: Callable[[int], None],
    *,
    once: bool,
) -> None:
    """Answer probes until Ctrl-C, or one.

    Args:
        bind: HOST:PORT of TCP and UDP; port 0 takes a free one.
        side: this end; without certificates and key a key is generated.
        on_listening: called once with the address, before the first probe.
        on_served: called with the number of probes after each.
        once: end after the first.

    Raises:
        GeoRayError: the port is not available, or the certificate cannot be used.
    """
    host, port = address_of(bind)
    made_up = "" if side.certs is not None or side.shared_key else secrets.token_hex(16)
    node = ProbeNode(side.name, (host, port))
    with ExitStack() as stack:
        endpoint = stack.enter_context(side.endpoint(node, _LISTENER, side.shared_key or made_up))
        stack.callback(node.close)
        node.use(endpoint)
        _, bound = endpoint.listen(host, port)
        on_listening(ProbeAddress(host, bound, made_up))
        served = 0
        while not (once and served):
            if node.wait_served(served + 1, _WAIT_S):
                served += 1
                on_served(served)


def measure(
    target: str,
    side: ProbeSide,
    plan: ProbePlan,
    show: Callable[[str, str, ProbeProgress], None],
) -> list[LinkRecord]:
    """Probe both directions between this host and a listening one.

    Args:
        target: HOST:PORT of the listening end.
        side: this end.
        plan: settings of the measurement.
        show: called a few times a second with the direction and the progress.

    Raises:
        ConfigError: there is no key, or with certificates no name of the peer.
        GeoRayError: it cannot be reached, refuses key or certificate, or does not answer.
    """
    address = address_of(target)
    peer = _LISTENER if side.certs is None else side.peer
    if peer is None:
        raise ConfigError(
            "with certificates the other end has a name",
            fix="Add --peer (peer=...), the region of the listening end.",
        )
    node = ProbeNode(side.name, (_wildcard(address), 0))
    with ExitStack() as stack:
        anonymous = f"dialer-{secrets.token_hex(4)}"
        endpoint = stack.enter_context(side.endpoint(node, anonymous, side.shared_key))
        stack.callback(node.close)
        node.use(endpoint)
        node.dialed(peer, address[0])
        endpoint.connect(peer, address)
        endpoint.wait_connected([peer], plan.timeout_s)
        there = _while_showing(
            partial(node.measure, peer, plan), node, partial(show, side.name, target)
        )
        # Last: a listener that serves one probe ends when it has sent this.
        back = _while_showing(
            partial(node.measure_back, peer, plan), node, partial(show, target, side.name)
        )
    return [there.model_copy(update={"dst": back.src}), back]


def address_of(text: str) -> Address:
    """Host and port of ``HOST:PORT``.

    Raises:
        ConfigError: it has another form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{text!r} is neither HOST:PORT nor a .yaml file", fix="Write it like 10.0.0.5:8476."
        )
    return host, int(port)


def _while_showing(
    work: Callable[[], Result], node: ProbeNode, show: Callable[[ProbeProgress], None]
) -> Result:
    """Run a node's ``work`` in a thread, so that progress is shown and Ctrl-C works."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="probe", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        show(node.progress())
    if errors:
        raise errors[0]
    return results[0]


def _key(text: str) -> bytes:
    if len(text) < _SHORTEST_KEY:
        raise ConfigError(
            f"the probe's key has fewer than {_SHORTEST_KEY} characters",
            fix=f"Take the key that the listening end shows, or set {KEY_VARIABLE} on both hosts.",
        )
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"geo-ray-probe").digest()


def _wildcard(address: Address) -> str:
    """Return the address to bind UDP to, so that it can reach ``address``."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    except OSError:
        return "0.0.0.0"  # noqa: S104  (the dial will say what is wrong with the name)
    return "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104
