"""`geo-ray probe` between two hosts, without a cluster."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import click
from rich.console import Console

from geo_ray.cli.tables.probe import describe
from geo_ray.errors import ConfigError
from geo_ray.transport.endpoint.endpoint import (
    Address,
    Endpoint,
    EndpointIdentity,
    TransportConfig,
)
from geo_ray.transport.links.record import LinkRecord
from geo_ray.transport.probe.plan import ProbePlan
from geo_ray.transport.probe.probe import ProbeNode
from geo_ray.transport.security.cert_store import files_of

_VARIABLE: Final = "GEO_RAY_PROBE_KEY"
_RUN: Final = "geo-ray-probe"
_LISTENER: Final = "listener"
_SHORTEST_KEY: Final = 16
_POLL_S: Final = 0.1
_WAIT_S: Final = 3600.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ProbeSide:
    """How this end takes part.

    Attributes:
        region: its name in the table; with ``certs`` that of its certificate. None: the host's.
        certs: directory with `regions/NAME/`; None: no TLS, both ends share a key.
        peer: region of the listening end; needed with ``certs``.
    """

    region: str | None
    certs: Path | None
    peer: str | None

    @property
    def name(self) -> str:
        """This end's in the table."""
        return self.region or socket.gethostname()

    def endpoint(self, node: ProbeNode, anonymous: str, key_text: str) -> Endpoint:
        """An endpoint whose peer is whoever has a certificate of the CA, or the key.

        Raises:
            CertificateError: the certificate cannot be used.
        """
        if self.certs is None:
            identity = EndpointIdentity(_RUN, anonymous, 1, _key(key_text))
            return Endpoint(identity, node.on_message, TransportConfig(tls="off"))
        identity = EndpointIdentity(_RUN, self.name, time.time_ns(), _key("known by certificate"))
        return Endpoint(
            identity,
            node.on_message,
            TransportConfig(tls="required"),
            certificate=files_of(self.certs, self.name),
        )


def serve(bind: str, side: ProbeSide, *, once: bool) -> None:
    """Answer probes until Ctrl-C, or one.

    Raises:
        GeoRayError: the port cannot be had, or the certificate not be used.
    """
    host, port = _address(bind)
    key_text = os.environ.get(_VARIABLE) or secrets.token_hex(16)
    node = ProbeNode(side.name, (host, port))
    with ExitStack() as stack:
        endpoint = stack.enter_context(side.endpoint(node, _LISTENER, key_text))
        stack.callback(node.close)
        node.use(endpoint)
        _, bound = endpoint.listen(host, port)
        click.echo(f"listening on {host} port {bound} (TCP and UDP); on the other host run")
        names = f" --certs DIR --region NAME --peer {side.name}" if side.certs else ""
        click.echo(f"    geo-ray probe ADDRESS_OF_THIS_HOST:{bound}{names}")
        if side.certs is None and _VARIABLE not in os.environ:
            click.echo(f"and give it the key {key_text}")
        served = 0
        while not (once and served):
            if node.wait_served(served + 1, _WAIT_S):
                served += 1
                click.echo(f"served {served}")


def measure(target: str, side: ProbeSide, plan: ProbePlan) -> list[LinkRecord]:
    """Probe both directions between this host and a listening one.

    Raises:
        GeoRayError: it cannot be reached, refuses key or certificate, or does not answer.
    """
    address = _address(target)
    peer = _LISTENER if side.certs is None else side.peer
    if peer is None:
        raise click.UsageError("--certs needs --peer, the region of the listening end")
    key_text = os.environ.get(_VARIABLE, "")
    if side.certs is None and not key_text:
        key_text = click.prompt("key", hide_input=True, err=True)
    node = ProbeNode(side.name, (_wildcard(address), 0))
    console = Console(stderr=True)
    with ExitStack() as stack:
        anonymous = f"dialer-{secrets.token_hex(4)}"
        endpoint = stack.enter_context(side.endpoint(node, anonymous, key_text))
        stack.callback(node.close)
        node.use(endpoint)
        node.dialed(peer, address[0])
        endpoint.connect(peer, address)
        with console.status(f"connecting to {target}"):
            endpoint.wait_connected([peer], plan.timeout_s)
        with console.status("") as status:

            def show(src: str, dst: str) -> None:
                status.update(describe(src, dst, node.progress()))

            there = _while_showing(
                lambda: node.measure(peer, plan), lambda: show(side.name, target)
            )
            # Last: a listener that serves one probe ends when it has sent this.
            back = _while_showing(
                lambda: node.measure_back(peer, plan), lambda: show(target, side.name)
            )
    return [there.model_copy(update={"dst": back.src}), back]


def _while_showing(work: Callable[[], Result], show: Callable[[], None]) -> Result:
    """Do ``work`` in a thread, so that progress is shown and Ctrl-C is heard."""
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
        show()
    if errors:
        raise errors[0]
    return results[0]


def _key(text: str) -> bytes:
    if len(text) < _SHORTEST_KEY:
        raise ConfigError(
            f"the probe's key has fewer than {_SHORTEST_KEY} characters",
            fix=f"Take the key that the listening end shows, or set {_VARIABLE} on both hosts.",
        )
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"geo-ray-probe").digest()


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is neither HOST:PORT nor a .yaml file")
    return host, int(port)


def _wildcard(address: Address) -> str:
    """What to bind UDP to, so that it can reach ``address``."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    except OSError:
        return "0.0.0.0"  # noqa: S104  (the dial will say what is wrong with the name)
    return "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104
