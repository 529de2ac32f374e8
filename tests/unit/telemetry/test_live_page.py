"""The live page over real sockets: who may see it, what it shows, and whom it waits for."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from click.testing import CliRunner

import geo_ray
from benchmarks.observe.made_run import MadeRun, eventful, made_run
from geo_ray.api.live import follow_view
from geo_ray.base.errors import GeoRayError, PortInUseError
from geo_ray.cli.main import root
from geo_ray.cli.say import say
from geo_ray.runs.report import LiveReader
from geo_ray.telemetry.live.page import SECTIONS, PagePoller, PageState, page_sections, view_lines
from geo_ray.telemetry.live.server import PageGuard
from geo_ray.telemetry.view import RunView
from tests.support.live_support import until


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    made = made_run(tmp_path, 4)
    yield made
    made.close()


def get(url: str, path: str = "/", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """What a request is answered with, its headers in lower case; not of the endless stream."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    connection.request(headers.pop("method", "GET"), path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def cookie_of(url: str) -> str:
    parts = urlsplit(url)
    status, headers, _ = get(url, f"/?{parts.query}")
    assert (status, headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
    return headers["set-cookie"].split(";")[0]


@contextmanager
def stream(url: str) -> Iterator[Stream]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    connection.request("GET", "/events", headers={"Cookie": cookie_of(url)})
    answer = connection.getresponse()
    assert answer.headers["content-type"] == "text/event-stream"
    try:
        yield Stream(answer)
    finally:
        answer.close()
        connection.close()


class Stream:
    """What one who watches has been sent."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.shown: dict[str, str] = {}

    def next(self) -> dict[str, str]:
        while not (line := self._answer.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        new: dict[str, str] = json.loads(line[6:])
        self.shown |= new
        return new

    def until(self, name: str, text: str) -> str:
        for _ in range(50):
            if text in self.shown.get(name, ""):
                return self.shown[name]
            self.next()
        raise AssertionError(f"{text!r} is not in {self.shown.get(name)!r}")


# ------------------------------------------------------------------ who may see it


def test_without_the_token_there_is_nothing_to_see(made: MadeRun) -> None:
    with geo_ray.watch(made.path) as page:
        wrong = f"/?token={'x' * 32}"
        for path in ("/", wrong, "/events", "/live.js", "/style.css", "/nothing"):
            status, headers, body = get(page.url, path)
            assert status == 403
            assert b"geo-ray watch" in body
            assert str(made.path).encode() not in body
            assert headers["cache-control"] == "no-store"


def test_the_token_leaves_the_address_and_the_page_lets_nothing_else_in(made: MadeRun) -> None:
    with geo_ray.watch(made.path) as page:
        cookie = cookie_of(page.url)
        status, headers, body = get(page.url, "/", Cookie=cookie)
        assert status == 200
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        token = urlsplit(page.url).query.partition("=")[2].encode()
        assert token not in body
        links = re.findall(rb'(?:src|href)="([^"]+)"', body)
        assert links and all(b":" not in link for link in links), "nothing from elsewhere"
        for link in links:
            status, _, text = get(page.url, f"/{link.decode()}", Cookie=cookie)
            assert status == 200
            assert b"http" not in text.replace(b"http://www.w3.org", b"")
        ids = re.findall(rb'id="(\w+)"', body)
        assert [name.encode() for name in SECTIONS] == [each for each in ids if each != b"link"]


def test_it_is_served_here_and_under_no_other_name(made: MadeRun) -> None:
    with geo_ray.watch(made.path) as page:
        cookie, port = cookie_of(page.url), urlsplit(page.url).port
        for host in (f"127.0.0.1:{port}", "localhost:9", f"[::1]:{port}"):
            assert get(page.url, "/", Cookie=cookie, Host=host)[0] == 200
        for host in ("evil.example", f"127.0.0.1.evil.example:{port}", "10.0.0.1", "[", ""):
            assert get(page.url, "/", Cookie=cookie, Host=host)[0] == 421
        elsewhere = {"Sec-Fetch-Site": "cross-site"}
        assert get(page.url, "/", Cookie=cookie, **elsewhere)[0] == 403
        assert get(page.url, "/events?token=x", Cookie=cookie, **elsewhere)[0] == 403
        status, headers, body = get(page.url, f"/?{urlsplit(page.url).query}", **elsewhere)
        assert status == 200 and b'content="0;url=/"' in body and "set-cookie" in headers
        others = [a[4][0] for a in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)]
        for address in set(others) - {"127.0.0.1"}:
            with pytest.raises(OSError):
                socket.create_connection((address, port), 2).close()


def test_there_is_nothing_to_do_but_to_look(made: MadeRun) -> None:
    with geo_ray.watch(made.path) as page:
        cookie = cookie_of(page.url)
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert get(page.url, "/", Cookie=cookie, method=method)[0] == 405
        for path in ("/../../etc/passwd", "/static/", "/%2e%2e/x", "/page.html"):
            assert get(page.url, path, Cookie=cookie)[0] == 404


def test_a_guard_compares_tokens_and_hosts() -> None:
    guard = PageGuard("secret")
    assert guard.is_token("secret")
    assert not any(
        map(guard.is_token, (None, "", "secre", "secrets", "s\u00e9cret", "s\udce9cret"))
    )
    assert "secret" not in repr(guard)
    assert PageGuard().token != PageGuard().token


def test_a_port_that_is_taken_is_told(made: MadeRun) -> None:
    with geo_ray.watch(made.path) as page:
        port = int(urlsplit(page.url).port or 0)
        with pytest.raises(PortInUseError, match=str(port)):
            geo_ray.watch(made.path, port=port)
    geo_ray.watch(made.path, port=port).close()  # it is free again


# ------------------------------------------------------------------ what it shows


def test_a_run_is_shown_as_it_goes(made: MadeRun) -> None:
    eventful(made, 12)
    with geo_ray.watch(made.path, every_s=0.1) as page, stream(page.url) as seen:
        facts = seen.until("facts", "<dt>round</dt><dd>12</dd>")
        assert "planned" in facts
        assert "us-east to eu-west" in seen.shown["map"]
        assert "region lost: us-west" in seen.shown["notes"]
        assert "m-lost" in seen.shown["members"]
        assert "g6.xlarge" in seen.shown["machines"]
        assert "USD against plan" in seen.shown["money"]
        made.go_on(1)
        seen.until("facts", "<dt>round</dt><dd>13</dd>")
        made.finish()
        made.close()
        seen.until("head", "finished")


def test_a_run_that_is_not_there_yet_is_awaited(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "trial"
    with geo_ray.watch(path, every_s=0.05) as page, stream(page.url) as seen:
        head = seen.until("head", "waiting")
        assert "RUN_DIRECTORY: no run" in head
        made = made_run(tmp_path, 2)
        assert made.path == path
        seen.until("head", "not begun")
        made.begin()
        made.go_on(2)
        seen.until("facts", "<dt>round</dt><dd>2</dd>")
        made.close()


def test_a_run_that_has_ended_is_shown_whole(made: MadeRun) -> None:
    eventful(made, 6)
    made.finish()
    made.close()
    with geo_ray.watch(made.path) as page, stream(page.url) as seen:
        seen.until("head", "finished")
        seen.until("facts", "<dt>round</dt><dd>6</dd>")
        assert set(seen.shown) == set(SECTIONS)


def test_a_torn_log_is_shown_up_to_there(made: MadeRun) -> None:
    eventful(made, 6)
    log = made.path / "events.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    with geo_ray.watch(made.path, every_s=0.05) as page, stream(page.url) as seen:
        seen.until("facts", "<dt>round</dt><dd>6</dd>")
        log.write_bytes(whole)  # the rest of the line
        made.write(("stop_requested", 20.0, {"cause": "enough"}))
        seen.until("notes", "enough")


def test_lines_that_are_no_events_are_told_and_passed_over(made: MadeRun) -> None:
    eventful(made, 3)
    with (made.path / "events.jsonl").open("ab") as file:
        file.write(b'{"t_s": 1, "kind": "step"}\nno json <b>\n')
    made.go_on(1)
    with geo_ray.watch(made.path, every_s=0.05) as page, stream(page.url) as seen:
        seen.until("facts", "<dt>round</dt><dd>4</dd>")
        seen.until("head", "is not an event")
        assert seen.shown["head"].count("is not an event") == 2


def test_another_run_of_that_name_is_shown_from_its_beginning(tmp_path: Path) -> None:
    made = made_run(tmp_path, 2)
    eventful(made, 9)
    with geo_ray.watch(made.path, every_s=0.05) as page, stream(page.url) as seen:
        seen.until("facts", "<dt>round</dt><dd>9</dd>")
        made.close()
        shutil.rmtree(made.path)
        seen.until("head", "waiting")
        again = made_run(tmp_path, 2)
        again.begin()
        again.go_on(2)
        seen.until("facts", "<dt>round</dt><dd>2</dd>")
        again.close()


def test_texts_of_a_run_are_text_on_the_page(made: MadeRun) -> None:
    evil = "<img src=x onerror=alert(1)>"
    made.begin(run=evil, strategy=evil, regions=[evil, "b"])
    made.write(("worker_lost", 1.0, {"region": evil, "worker": evil, "cause": evil}))
    made.write(("eval", 2.0, {"step": 1, "region": None, "metrics": {evil: 1.0}, "samples": 1}))
    made.write(("run_failed", 3.0, {"code": "X", "message": evil, "fix": evil}))
    made.close()
    with geo_ray.watch(made.path) as page, stream(page.url) as seen:
        seen.until("head", "&lt;img")
        assert not [name for name, html in seen.shown.items() if "<img" in html]


def test_the_terminal_shows_the_same(made: MadeRun, tmp_path: Path) -> None:
    eventful(made, 12)
    made.finish()
    made.close()
    (view,) = follow_view(made.path)
    assert isinstance(view, RunView)
    text = "\n".join(view_lines(view))
    for part in ("finished", "us-east to us-west", "region lost: us-west", "According to the plan"):
        assert part in text
    first = next(follow_view(tmp_path / "nothing"))
    assert isinstance(first, GeoRayError)
    assert view_lines(first)[0].startswith("waiting: RUN_DIRECTORY")


def test_the_terminal_tells_once_that_a_run_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_awaited = threading.Event()

    def say_and_note(text: str) -> None:
        say(text)
        if "waiting: " in text:
            is_awaited.set()

    monkeypatch.setattr("geo_ray.cli.watch.say", say_and_note)

    def begin_later() -> None:
        assert is_awaited.wait(60.0)
        time.sleep(0.5)  # it is looked for a few more times
        made = made_run(tmp_path, 2)
        eventful(made, 12)
        made.finish()
        made.close()

    writer = threading.Thread(target=begin_later)
    writer.start()
    words = ["watch", str(tmp_path / "runs" / "trial"), "--terminal", "--every", "0.2", "--wait"]
    shown = CliRunner().invoke(root, words, catch_exceptions=False)
    writer.join()
    assert "to start" in shown.stderr
    assert shown.stdout.count("waiting: ") == 1
    assert "finished" in shown.stdout
    saved = [line for line in shown.stdout.splitlines() if line.startswith("  saved")]
    assert saved
    assert "ago" not in saved[-1]  # counted from the end it says nothing


def test_a_run_that_is_not_there_is_not_waited_for_unasked(tmp_path: Path) -> None:
    shown = CliRunner().invoke(root, ["watch", str(tmp_path / "runs" / "tiral"), "--terminal"])
    assert shown.exit_code != 0 and not shown.stdout


def test_a_long_log_is_shown_as_far_as_it_was_read(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful(made, 12)
    made.close()
    monkeypatch.setattr("geo_ray.telemetry.live.page._SLICE_EVENTS", 40)
    page_state, heads = PageState(), []
    changed = threading.Event()

    def on_change() -> None:
        heads.append(json.loads(page_state.since(0)[1])["head"])
        if "still going" in heads[-1] or "cut off" in heads[-1]:
            changed.set()

    reader = LiveReader(lambda: made.path)
    looking = PagePoller("trial", reader, page_state, lambda: 0, on_change, draw=page_sections)
    assert changed.wait(20)
    looking.close()
    shares = [int(n) for head in heads for n in re.findall(r"Reading the log: (\d+)%", head)]
    assert len(shares) > 3 and shares == sorted(shares)


# ------------------------------------------------------------------ many who watch


def test_who_looks_again_is_sent_what_has_changed_since() -> None:
    page_state = PageState()
    assert page_state.put({"a": "1", "b": "1"})
    assert not page_state.put({"a": "1"})
    first, data = page_state.since(0)
    assert json.loads(data) == {"a": "1", "b": "1"}
    assert page_state.put({"a": "2"}) and page_state.put({"a": "3"})
    assert json.loads(page_state.since(first)[1]) == {"a": "3"}, "nothing is queued"
    assert page_state.since(0) is not None
    assert page_state.since(first)[1] is page_state.since(first)[1], "made once for all"


def test_a_thousand_watch(made: MadeRun) -> None:
    eventful(made, 3)

    async def watched(url: str) -> int:
        jar = aiohttp.CookieJar(unsafe=True)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(cookie_jar=jar, connector=connector) as session:
            await (await session.get(url)).read()
            base = url.partition("?")[0]
            gate = asyncio.Semaphore(100)

            async def one() -> aiohttp.ClientResponse:
                async with gate:
                    answer = await session.get(f"{base}events")
                    assert answer.status == 200
                    await answer.content.readuntil(b"\n\n")
                    return answer

            answers = await asyncio.gather(*(one() for _ in range(1000)))
            assert page.watchers == 1000
            await asyncio.to_thread(made.go_on, 1)
            seen = 0
            for answer in answers:
                html = ""
                while "<dt>round</dt><dd>4</dd>" not in html:
                    html += (await answer.content.readuntil(b"\n\n")).decode().replace('\\"', '"')
                seen += 1
            for answer in answers:
                answer.close()
            return seen

    threads = threading.active_count()
    with geo_ray.watch(made.path, every_s=0.2) as page:
        assert asyncio.run(watched(page.url)) == 1000
        assert threading.active_count() <= threads + 3, "no thread for each"
        until(lambda: page.watchers == 0)
