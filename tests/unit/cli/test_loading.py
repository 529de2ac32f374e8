"""Commands report every few seconds what takes long."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

from geo_ray.base import output
from geo_ray.cli import paths


def test_an_import_that_takes_long_is_told_with_its_seconds(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_package.py").write_text(
        "import sys, time\nsys.released = False\nwhile not sys.released:\n    time.sleep(0.001)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(paths, "_PACKAGES", {"slow_package": "a package"})
    monkeypatch.setattr(output, "REPORT_EVERY_S", 0.01)
    told: list[str] = []

    def tell(text: str, err: bool) -> None:
        told.append(text)
        sys.released = len(told) >= 3  # type: ignore[attr-defined]

    monkeypatch.setattr(paths.click, "echo", tell)
    paths.loading("slow_package")
    assert told[0] == "loading a package"
    assert all(text.startswith("loading a package (") for text in told[1:3])
    count = len(told)
    paths.loading("slow_package")
    assert len(told) == count, "an imported package is not told"


def test_a_module_of_its_own_is_told_only_if_it_takes_long(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_slow.py").write_text(
        "import sys, time\nwhile not sys.own_released:\n    time.sleep(0.001)\n"
    )
    (tmp_path / "own_quick.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "own_released", False, raising=False)
    told: list[str] = []

    def tell(text: str, err: bool) -> None:
        told.append(text)
        sys.own_released = True  # type: ignore[attr-defined]

    monkeypatch.setattr(paths.click, "echo", tell)
    paths.loading("own_quick")
    assert not told
    monkeypatch.setattr(output, "REPORT_EVERY_S", 0.01)
    paths.loading("own_slow")
    assert told and all(text.startswith("loading geo_ray (") for text in told)


def test_reports_become_rarer(monkeypatch) -> None:
    """The waits between reports grow with the time that has passed."""
    now_s, waits = [0.0], []
    told: list[str] = []
    is_over = threading.Event()

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            now_s[0] += timeout
            if now_s[0] > 3600:
                is_over.set()
                return True
            return False

    threads = SimpleNamespace(Event=Ended, Thread=threading.Thread)
    monkeypatch.setattr(output, "threading", threads)
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with output.ticking("running", told.append):
        assert is_over.wait(60)
    assert told[:3] == ["running (4 s)", "running (8 s)", "running (12 s)"]
    assert waits == sorted(waits) and 20 < len(told) < 40
