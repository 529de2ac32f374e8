"""Where a run is served: a list of addresses that the run's authority has signed.

The run loop signs a new list whenever the server or its standby changes, and the server sends it to
all ranks. A rank keeps the newest one, in memory and next to its credentials, and tries the
addresses in order when it has lost the server. The *term* is that of the server at the first
address: ranks refuse servers of earlier terms.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from geo_ray.base.errors import EndpointListError
from geo_ray.base.files import write_atomic
from geo_ray.base.model import StrictModel
from geo_ray.transport.security.certs import Authority, is_signed_by
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

ENDPOINTS: Final = "endpoints"
"""Kind of the message that has a list."""
SCHEME: Final = "geo-ray://"
_PURPOSE: Final = b"geo-ray endpoints\n"  # what the authority signs for other uses is no list


def address_text(address: Address) -> str:
    """Return an address in the form that `geo_ray.join` takes: ``geo-ray://HOST:PORT``."""
    host, port = address
    return f"{SCHEME}{host}:{port}"


class EndpointList(StrictModel):
    """Where a run is served."""

    run_id: str = Field(description="the run")
    version: int = Field(ge=1, description="number of the list; grows with every list of the run")
    term: int = Field(ge=1, description="term of the server at the first address")
    addresses: tuple[tuple[str, int], ...] = Field(
        min_length=1, description="host and port of the server, then of its standby"
    )


@dataclass(frozen=True, slots=True)
class SignedEndpoints:
    """An endpoint list with the signature of the run's authority.

    Attributes:
        list: the list.
        text: what was signed.
        signature: the signature.
    """

    list: EndpointList
    text: str
    signature: bytes

    @classmethod
    def sign(cls, endpoints: EndpointList, authority: Authority) -> SignedEndpoints:
        """Sign a list."""
        text = endpoints.model_dump_json()
        return cls(endpoints, text, authority.signature(_PURPOSE + text.encode()))

    def dump(self) -> bytes:
        """Return the list as bytes."""
        return json.dumps({"list": self.text, "signature": self.signature.hex()}).encode()

    @classmethod
    def load(cls, data: bytes, run_id: str, ca_pem: bytes) -> SignedEndpoints:
        """Read the result of `dump`.

        Args:
            data: the bytes.
            run_id: the run.
            ca_pem: certificates of the run's authority.

        Raises:
            EndpointListError: it cannot be read, is of another run, or is not signed.
        """
        try:
            body = json.loads(data)
            text, signature = str(body["list"]), bytes.fromhex(body["signature"])
            found = EndpointList.model_validate_json(text)
        except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
            raise EndpointListError(f"an endpoint list cannot be read: {error!r}") from None
        if found.run_id != run_id:
            raise EndpointListError(f"an endpoint list is of run '{found.run_id}', not '{run_id}'")
        if not is_signed_by(_PURPOSE + text.encode(), signature, ca_pem):
            raise EndpointListError("an endpoint list is not signed by the run's authority")
        return cls(found, text, signature)

    def message(self) -> Message:
        """Return the message that contains it."""
        return Message(ENDPOINTS, {}, self.dump(), "control", CONTROL)


class EndpointBook:
    """The newest endpoint list that a rank knows.

    Attributes:
        newest: the list; None: none was received yet.

    Args:
        run_id: the run.
        ca_pem: certificates of the run's authority.
        given: address that the user gave.
        path: file for the list; None: it is kept in memory only.
    """

    def __init__(
        self, run_id: str, ca_pem: bytes, given: Address, path: Path | None = None
    ) -> None:
        self._run_id, self._ca_pem, self._given, self._path = run_id, ca_pem, given, path
        self.newest: EndpointList | None = None
        if path is not None and path.exists():
            try:
                self.newest = SignedEndpoints.load(path.read_bytes(), run_id, ca_pem).list
            except (OSError, EndpointListError) as error:
                log.warning("%s is ignored: %s", path, error)

    def take(self, data: bytes) -> bool:
        """Keep a list that the server has sent; return whether it is new.

        Raises:
            EndpointListError: it is not signed, of another run, or older than the known one.
        """
        signed = SignedEndpoints.load(data, self._run_id, self._ca_pem)
        newest = self.newest
        if newest == signed.list:
            return False
        if newest is not None and signed.list.version <= newest.version:
            raise EndpointListError(
                f"endpoint list {signed.list.version} is not newer than list {newest.version}"
            )
        self.newest = signed.list
        if self._path is not None:
            try:
                write_atomic(self._path, data)
            except OSError as error:  # the list in memory is enough while this process lives
                log.warning("the endpoint list is not saved: %s", error)
        return True

    @property
    def term(self) -> int:
        """The newest term; servers of earlier ones are refused."""
        return 0 if self.newest is None else self.newest.term

    def addresses(self, now: Sequence[Address] = ()) -> tuple[Address, ...]:
        """Return the addresses to try, in order; ``now``: addresses that come first."""
        listed = () if self.newest is None else self.newest.addresses
        return tuple(dict.fromkeys((*now, *listed, self._given)))

    @property
    def shown(self) -> str:
        """The addresses for messages."""
        return " or ".join(map(address_text, self.addresses()))
