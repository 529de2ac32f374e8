"""Decides whether a connection between regions is encrypted, and wraps its socket in TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from typing import Final, Literal, TypeAlias

from geo_ray.errors import PeerRefusedError
from geo_ray.transport.security.credentials import Credentials
from geo_ray.transport.security.tls import TlsSource, expect_region, peer_serial
from geo_ray.transport.security.tls_reasons import refusal

TlsMode: TypeAlias = Literal["auto", "required", "off"]

_LAST_READ_S: Final = 0.5
_LAST_READS: Final = 16
_TLS_RECORD: Final = b"\x16"  # how every TLS handshake begins


class Encryption:
    """Turns sockets into TLS sockets where the mode wants TLS.

    Args:
        mode: ``auto`` wants TLS unless the other end has a loopback address; ``required`` always;
            ``off`` never.
        source: this region's certificate, if there is one.
    """

    def __init__(self, mode: TlsMode, source: TlsSource | None) -> None:
        self._mode = mode
        self._credentials: Credentials | None = None
        if source is not None:
            self.use(source)

    def use(self, source: TlsSource) -> None:
        """Use another certificate from the next handshake on.

        Raises:
            CertificateError: it cannot be used; the earlier one stays.
        """
        if self._mode == "off":
            return
        if self._credentials is None:
            self._credentials = Credentials(source)
        else:
            self._credentials.use(source)

    def refresh(self) -> None:
        """Read the certificate's files again if they have changed."""
        if self._credentials is not None:
            self._credentials.refresh()

    def is_revoked(self, serial: int) -> bool:
        """Whether a certificate counts no more."""
        return self._credentials is not None and serial in self._credentials.revoked

    def dialed(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use after `connect`, with the same timeout.

        `shake_hands` comes next.

        Raises:
            PeerRefusedError: TLS is wanted and there is no certificate here.
            OSError: the connection was lost.
        """
        if not self._is_wanted(sock):
            return sock
        if self._credentials is None:
            raise PeerRefusedError(
                f"this region has no certificate, but {self._why()}",
                fix="Make one with `geo-ray certs`, or set `transport.tls: off` in a private "
                "network.",
            )
        return self._credentials.client.wrap_socket(sock, do_handshake_on_connect=False)

    def accepted(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use after `accept`, depending on whether the other end begins TLS.

        `shake_hands` comes next.

        Raises:
            PeerRefusedError: the other end does not do what this one wants.
            OSError: the connection was lost.
        """
        if self._mode == "off":
            return sock
        begins_tls = sock.recv(1, socket.MSG_PEEK) == _TLS_RECORD
        if not begins_tls:
            if self._is_wanted(sock):
                raise PeerRefusedError(
                    f"the peer connects without TLS, but {self._why()}",
                    fix="Set `transport.tls` to the same in every region.",
                )
            return sock
        if self._credentials is None:
            raise PeerRefusedError(
                "the peer wants TLS, but this region has no certificate",
                fix="Make one with `geo-ray certs`, or set `transport.tls` to the same in every "
                "region.",
            )
        return self._credentials.server.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )

    @staticmethod
    def shake_hands(sock: socket.socket) -> None:
        """TLS's own handshake; plain sockets have none.

        Raises:
            PeerRefusedError: it failed.
            OSError: the connection was lost.
        """
        if isinstance(sock, ssl.SSLSocket):
            peer = str(sock.getpeername()[0])
            try:
                sock.do_handshake()
            except ssl.SSLError as error:
                _let_read(sock)
                raise refusal(error, peer) from None

    def expect(self, sock: socket.socket, region: str) -> None:
        """Refuse a TLS peer whose certificate is not that of ``region``, or counts no more.

        Plain peers pass.

        Raises:
            PeerRefusedError: with both names, or that it was revoked.
        """
        if isinstance(sock, ssl.SSLSocket):
            expect_region(sock, region)
            if self.is_revoked(peer_serial(sock)):
                raise revoked(region)

    def _is_wanted(self, sock: socket.socket) -> bool:
        if self._mode == "auto":
            return not _is_loopback(str(sock.getpeername()[0]))
        return self._mode == "required"

    def _why(self) -> str:
        required = self._mode == "required"
        return "`transport.tls` is required" if required else "its address is not loopback"


def revoked(region: str) -> PeerRefusedError:
    """The error for a region whose certificate counts no more."""
    return PeerRefusedError(
        f"the certificate of region {region} was revoked",
        fix="Issue another one, if the region is to come back: `geo-ray certs issue REGION "
        "--dir DIR --force`.",
    )


def _let_read(sock: socket.socket) -> None:
    """Let the other end read the refusal, which closing with unread bytes would destroy."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.settimeout(_LAST_READ_S)
        for _ in range(_LAST_READS):  # a limit, however much the peer sends
            if not socket.socket.recv(sock, 4096):
                return


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.split("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
