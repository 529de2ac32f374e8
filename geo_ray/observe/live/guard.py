"""Who may see the page: whoever has the token, and asks for it by the name of this machine."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class PageGuard:
    """Judges requests.

    Attributes:
        token: that a request must have, new for every page.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def is_token(self, given: str | None) -> bool:
        """Whether it is the token; takes the same time whatever is wrong with it."""
        if given is None:
            return False
        sent = given.encode(errors="replace")  # bytes that are no text come as lone surrogates
        return hmac.compare_digest(sent, self.token.encode())

    def is_here(self, host: str | None) -> bool:
        """Whether a ``Host`` header names this machine.

        A page of somebody else, whose name suddenly leads here, has that name in it.
        """
        if host is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name == "localhost":
            return True
        try:
            return name is not None and ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False
