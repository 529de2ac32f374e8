"""Headless Chromium through its own driver, spoken to by the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = next(
    (
        f"there is no {name} here: apt-get install chromium chromium-driver"
        for name in ("chromium", "chromedriver")
        if shutil.which(name) is None
    ),
    None,
)


@dataclass
class Browser:
    """One window."""

    port: int
    session: str = ""

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the driver."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        value = answer["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def open(self, url: str) -> None:
        """Go to a page."""
        self.ask("POST", f"/session/{self.session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script gives back."""
        body = {"script": script, "args": []}
        return self.ask("POST", f"/session/{self.session}/execute/sync", body)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.run(f"return document.querySelector({selector!r})?.innerText ?? ''"))

    def wait_for(self, script: str, most_s: float = 20.0) -> Any:
        """Until a script gives something."""
        ends_s = time.monotonic() + most_s
        while not (found := self.run(script)):
            assert time.monotonic() < ends_s, f"not within {most_s} s: {script}"
            time.sleep(0.02)
        return found

    def told(self) -> list[str]:
        """What the browser complains of, such as refused scripts."""
        path = f"/session/{self.session}/se/log"
        rows = self.ask("POST", path, {"type": "browser"})
        return [row["message"] for row in rows if row["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        """Keep what is seen as a PNG file."""
        data = self.ask("GET", f"/session/{self.session}/screenshot")
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(root: Path, *, dark: bool = False, height: int = 2400) -> Iterator[Browser]:
    """A browser with a new profile; it and its driver end with the block."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert driver.stdout is not None
        port = 0
        for line in driver.stdout:
            if "started successfully on port" in line:
                port = int(line.rsplit(" ", 1)[1].strip(" .\n"))
                break
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += [f"--user-data-dir={root / 'profile'}", f"--window-size=1300,{height}"]
        arguments += ["--hide-scrollbars", "--no-first-run", "--disable-extensions"]
        options: dict[str, Any] = {"args": arguments, "binary": shutil.which("chromium")}
        options["prefs"] = {"browser": {"theme": {"color_scheme": 2 if dark else 1}}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        opened = Browser(port)
        made = opened.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        opened.session = made["sessionId"]
        if dark:
            feature = {"name": "prefers-color-scheme", "value": "dark"}
            command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
            opened.ask("POST", f"/session/{opened.session}/goog/cdp/execute", command)
        try:
            yield opened
        finally:
            opened.ask("DELETE", f"/session/{opened.session}")
    finally:
        driver.terminate()
        driver.wait(20)
        if driver.stdout is not None:
            driver.stdout.close()
