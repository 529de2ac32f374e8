"""The live page in a real browser: what a person sees, and that nothing else runs or is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import geo_ray
from benchmarks.common.browser import MISSING, browser
from benchmarks.observe.made_run import eventful, made_run

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
WIDE = "return document.documentElement.scrollWidth - window.innerWidth"


def test_a_run_as_it_goes_in_the_browser(tmp_path: Path) -> None:
    made = made_run(tmp_path, 5)
    eventful(made, 12)
    with geo_ray.watch(made.path, every_s=0.1) as page, browser(tmp_path) as window:
        window.open(page.url)
        window.wait_for("return document.querySelectorAll('#map .node').length === 5")
        assert window.run("return location.search") == "", "the token has left the address"
        assert window.run("return document.title") == "trial still going - geo_ray"
        assert "12" in window.text("#facts")
        assert "us-east" in window.text("#map")
        assert "g6.xlarge" in window.text("#machines")
        assert "region lost: sa-east" in window.text("#notes")
        assert window.run(WIDE) <= 0, "nothing is cut off at the side"
        light = window.run(BACKGROUND)
        made.go_on(1)
        window.wait_for("return document.querySelector('#facts').innerText.includes('13')")
        for script in (
            "fetch('https://example.com/x')",
            "new Image().src = 'http://127.0.0.1:1/x'",
        ):
            window.run(f"{script}; return null")
        window.run("const s = document.createElement('script'); s.textContent = 'window.evil = 1';"
                   "document.body.append(s); return null")  # fmt: skip
        window.wait_for("return true")
        assert window.run("return window.evil ?? null") is None
        told = window.told()
        assert len([line for line in told if "Content Security Policy" in line]) >= 3, told
        assert not [line for line in told if "style" in line and "applied" in line], told
        page.close()
        banner = window.wait_for("return document.querySelector('#link').innerText")
        assert "This page is not being served" in banner
        (tmp_path / "dark").mkdir()
    made.close()
    with geo_ray.watch(made.path) as page, browser(tmp_path / "dark", dark=True) as window:
        window.open(page.url)
        window.wait_for("return document.querySelector('#map svg') !== null")
        assert window.run(BACKGROUND) != light
        assert window.told() == []


def test_a_hundred_regions_in_the_browser(tmp_path: Path) -> None:
    made = made_run(tmp_path, 100)
    eventful(made, 6)
    made.close()
    with geo_ray.watch(made.path) as page, browser(tmp_path) as window:
        window.open(page.url)
        window.wait_for("return document.querySelectorAll('#map .node').length === 100")
        assert window.run("return document.querySelectorAll('#map path').length") >= 198
        assert window.run("return document.querySelectorAll('#regions tbody tr').length") == 100
        assert window.run(WIDE) <= 0
        box = window.run(
            "const b = document.querySelector('#map svg.map').getBoundingClientRect();"
            "return [...document.querySelectorAll('#map .node')].every((n) => {"
            "const r = n.getBoundingClientRect();"
            "return r.left >= b.left && r.right <= b.right"
            " && r.top >= b.top && r.bottom <= b.bottom})"
        )
        assert box is True, "every region is on the map"
        assert window.told() == []
