"""What the live page (`geo-ray watch`) takes: to appear, to follow the run, and of a core.

A run of 5 and of 100 regions whose events are written as a run would write them: four steps and an
exchange per region every 2 s. The page is served by `geo-ray watch` in a process of its own and
looked at in headless Chromium (chromium and chromedriver must be there).

  first_paint_N_s      from the request to the browser's first contentful paint, N regions
  whole_page_N_s       from the request until map, curves and tables stand there
  update_N_s           from the writing of a round's events until its number stands on the page
  idle_core_N          share of a core that the page's process takes while nobody looks
  watched_core_N       the same while one looks
  update_all_s         from the writing of a round until all 1,000 (quick: 100) who watch have it
  rss_mib              memory of the page's process then
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.common import support
from benchmarks.common.browser import browser
from benchmarks.observe.made_run import MadeRun, eventful, made_run

ROUND_S: Final = 2.0
SIZES: Final = (5, 100)
_TICK_HZ: Final = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure."""
    options = support.parse(__doc__)
    machine = support.hardware()
    figures = []
    for count in SIZES:
        with tempfile.TemporaryDirectory(prefix="live-page-") as name:
            figures += of_size(Path(name), count, quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="live-page-") as name:
        figures += of_many(Path(name), 100 if options.quick else 1000)
    support.finish("live_page", machine, figures, options.out)


def of_size(root: Path, count: int, *, quick: bool) -> list[support.Figure]:
    """The figures of a run of so many regions."""
    support.say(f"{count} regions")
    made = made_run(root, count)
    eventful(made, 30)
    repeats, quiet_s = (2, 12.0) if quick else (5, 42.0)  # idle: a look every 10 s
    paints_s, wholes_s = [], []
    with watching(made) as (process, url):
        for number in range(repeats):
            (root / str(number)).mkdir()
            with browser(root / str(number)) as window:
                window.open(url)
                window.wait_for("return document.querySelectorAll('#map .node').length")
                whole_s = window.run("return performance.now() / 1000")
                paint_ms = window.wait_for(
                    "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
                )
                paints_s.append(paint_ms / 1000)
                wholes_s.append(float(whole_s))
        updates_s = []
        with browser(root) as window:
            window.open(url)
            window.wait_for("return document.querySelectorAll('#map .node').length")
            for number in range(3 * repeats):
                time.sleep(0.137 * (number % 7))  # at any moment between two looks
                began_s = time.monotonic()
                made.go_on(1)
                shown = "document.querySelectorAll('#facts dd')[1]?.innerText"
                window.wait_for(f"return {shown} === '{made.round}'")
                updates_s.append(time.monotonic() - began_s)
            watched = core_fraction(process, made, 12.0)
        time.sleep(2)
        idle = core_fraction(process, made, quiet_s)
    made.close()
    return [
        support.median(f"first_paint_{count}_s", paints_s, "s", "<= 1"),
        support.median(f"whole_page_{count}_s", wholes_s, "s"),
        support.Figure(f"update_{count}_s", max(updates_s), "s", "<= 2", None, updates_s),
        support.Figure(f"idle_core_{count}", idle, "ratio", "<= 0.05"),
        support.Figure(f"watched_core_{count}", watched, "ratio"),
    ]


def of_many(root: Path, count: int) -> list[support.Figure]:
    """The figures of many who watch."""
    support.say(f"{count} who watch")
    made = made_run(root, 5)
    eventful(made, 30)
    with watching(made) as (process, url):
        took_s = asyncio.run(sent_to_all(made, url, count))
        rss_mib = rss_bytes(process) / 2**20
    made.close()
    return [
        support.Figure("update_all_s", statistics.median(took_s), "s", None, None, took_s),
        support.Figure("rss_mib", rss_mib, "MiB"),
    ]


async def sent_to_all(made: MadeRun, url: str, count: int) -> list[float]:
    """How long it takes until all have been sent a round, five times."""
    jar, connector = aiohttp.CookieJar(unsafe=True), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cookie_jar=jar, connector=connector) as session:
        await (await session.get(url)).read()
        events = f"{url.partition('?')[0]}events"
        gate = asyncio.Semaphore(50)

        async def come() -> aiohttp.ClientResponse:
            async with gate:
                answer = await session.get(events)
                answer.raise_for_status()
                await answer.content.readuntil(b"\n\n")
                return answer

        async def hears(answer: aiohttp.ClientResponse, text: bytes) -> None:
            while text not in await answer.content.readuntil(b"\n\n"):
                pass

        answers = await asyncio.gather(*(come() for _ in range(count)))
        took_s = []
        for _ in range(5):
            await asyncio.sleep(1.3)
            began_s = time.monotonic()
            made.go_on(1)
            text = f"<dt>round</dt><dd>{made.round}</dd>".encode()
            await asyncio.gather(*(hears(answer, text) for answer in answers))
            took_s.append(time.monotonic() - began_s)
        for answer in answers:
            answer.close()
    return took_s


@contextmanager
def watching(made: MadeRun) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`geo-ray watch` of a run in a process of its own, and the page's address."""
    words = [sys.executable, "-m", "geo_ray.cli.main", "watch", str(made.path)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=support.REPOSITORY
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(30)


def core_fraction(process: subprocess.Popen[str], made: MadeRun, seconds: float) -> float:
    """Which share of a core a process takes while a run goes on."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(ROUND_S):
            made.go_on(1)

    writer = threading.Thread(target=go_on)
    writer.start()
    before_s, began_s = cpu_s(process), time.monotonic()
    time.sleep(seconds)
    share = (cpu_s(process) - before_s) / (time.monotonic() - began_s)
    over.set()
    writer.join()
    return share


def cpu_s(process: subprocess.Popen[str]) -> float:
    """Seconds of a core that a process has taken."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_HZ


def rss_bytes(process: subprocess.Popen[str]) -> int:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
