"""HTTP server of a live page on the loopback interface: one stream of changes per client.

All files of the page are part of geo_ray, its content policy allows nothing else, and the server
only accepts reads. Clients need the page's token and must address this machine by its own name
(`PageGuard`). One thread answers all requests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import resource
import secrets
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from geo_ray.base.errors import PortInUseError
from geo_ray.telemetry.html_page import STYLE
from geo_ray.telemetry.live.page import PageState


@dataclass(frozen=True)
class PageGuard:
    """Authorizes requests.

    Attributes:
        token: required token, new for every page.
    """

    token: str = field(default_factory=partial(secrets.token_urlsafe, 24), repr=False)

    def is_token(self, given: str | None) -> bool:
        """Return whether the token is right, in constant time."""
        if given is None:
            return False
        sent = given.encode(errors="replace")  # invalid bytes arrive as lone surrogates
        return hmac.compare_digest(sent, self.token.encode())

    def is_here(self, host: str | None) -> bool:
        """Return whether a ``Host`` header names this machine.

        After DNS rebinding, the header has the name of the foreign page.
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


MOST_WATCHERS: Final = 2000
_ADDRESS: Final = "127.0.0.1"
_ALIVE_S: Final = 15.0  # keep-alive period, so that disconnected clients are noticed
_TAKE_S: Final = 20.0  # timeout of a send, after which a client counts as gone
_FILES: Final = 8192  # limit of open files, if the system allows it
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",  # heights of drawings; it allows no style sheets
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_REFUSED: Final = (
    "This page requires its token: open the complete address that `geo-ray watch` printed. "
    "Each start creates a new one.\n"
)
_ON: Final = '<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>geo_ray</title>'
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """Serves one page in a separate thread until `close`.

    Args:
        page_state: state of the page.
        port: port of the server; 0 for any free port.
        on_watcher: called when a client connects.

    Raises:
        PortInUseError: another process uses the port.
    """

    def __init__(
        self, page_state: PageState, port: int = 0, on_watcher: Callable[[], None] = lambda: None
    ) -> None:
        self._page_state = page_state
        self._on_watcher = on_watcher
        self._guard = PageGuard()
        self._watchers = 0
        self._changed: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._ends = False
        _allow_files()
        self._runner = web.AppRunner(
            self._app(),
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,  # a disconnected client stops counting at once
        )
        try:
            self.port = self._loop.run_until_complete(self._begin(port))
        except OSError as error:
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()
            raise PortInUseError(
                f"port {port} of this machine cannot be used: {error.strerror}",
                fix="Choose another `--port`, or omit it.",
            ) from error
        self._thread = threading.Thread(target=self._loop.run_forever, name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{_ADDRESS}:{self.port}/?token={self._guard.token}"

    @property
    def watchers(self) -> int:
        """Number of connected clients."""
        return self._watchers

    def changed(self) -> None:
        """Notify all clients that the page state has changed; from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30.0)
        self._loop.close()

    async def _begin(self, port: int) -> int:
        self._changed = asyncio.Event()
        await self._runner.setup()
        site = web.TCPSite(self._runner, _ADDRESS, port, backlog=1024)
        await site.start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def _end(self) -> None:
        self._ends = True
        self._wake()
        await self._runner.cleanup()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/events", self._events)
        texts = {"style.css": STYLE, "live.css": _file("live.css"), "live.js": _file("live.js")}
        for name, text in texts.items():
            kind = "text/javascript" if name.endswith(".js") else "text/css"
            app.router.add_get(f"/{name}", _constant(text, kind))
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        guard = self._guard
        if not guard.is_here(request.headers.get("Host")):
            return _answer(421, "This page has another address.\n")
        has_token = request.path == "/" and guard.is_token(request.query.get("token"))
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # The request comes from a foreign page, or from a link there, as in a notebook.
            return self._let_in(over_a_page=True) if has_token else _answer(403, _REFUSED)
        given = request.cookies.get(self._cookie)
        if has_token:
            return self._let_in()
        if not guard.is_token(given):
            return _answer(403, _REFUSED)
        try:
            return await handler(request)
        except web.HTTPException as refused:
            return _answer(refused.status, f"{refused.reason}.\n")

    @property
    def _cookie(self) -> str:
        return f"geo_ray_{self.port}"  # cookies are not separated by port

    def _let_in(self, *, over_a_page: bool = False) -> web.Response:
        """Move the token from the address to a cookie, because histories would show the address.

        After a redirect from another site a browser would not send the cookie; from a page it does.
        """
        answer = web.Response(status=303, headers={**_HEADERS, "Location": "/"})
        if over_a_page:
            answer = web.Response(text=_ON, content_type="text/html", headers=_HEADERS)
        answer.set_cookie(
            self._cookie, self._guard.token, httponly=True, samesite="Strict", path="/"
        )
        return answer

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=_file("page.html"), content_type="text/html", headers=_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._watchers >= MOST_WATCHERS:
            return _answer(
                503, f"{MOST_WATCHERS} clients are connected already.\n", {"Retry-After": "10"}
            )
        answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        self._watchers += 1
        self._on_watcher()
        try:
            await answer.prepare(request)
            await self._stream(answer)
        except (ConnectionError, TimeoutError):
            pass  # the client has disconnected
        finally:
            self._watchers -= 1
        return answer

    async def _stream(self, answer: web.StreamResponse) -> None:
        version = 0
        while not self._ends:
            changed = self._changed
            newest, data = self._page_state.since(version)
            if newest > version:
                await asyncio.wait_for(answer.write(b"data: " + data + b"\n\n"), _TAKE_S)
                version = newest
                continue
            if changed is None:
                return
            try:
                await asyncio.wait_for(changed.wait(), _ALIVE_S)
            except TimeoutError:
                await asyncio.wait_for(answer.write(b": still here\n\n"), _TAKE_S)


def _answer(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=text, headers={**_HEADERS, **(headers or {})})


def _constant(text: str, kind: str) -> _Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind, headers=_HEADERS)

    return answer


def _file(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def _allow_files() -> None:
    """Raise the limit of open files, one per client; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
