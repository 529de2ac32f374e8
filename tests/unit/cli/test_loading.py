"""Commands say every few seconds that they import packages."""

from __future__ import annotations

import sys

from geo_ray.cli import paths


def test_an_import_that_takes_long_is_told_with_its_seconds(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_package.py").write_text(
        "import sys, time\nsys.released = False\nwhile not sys.released:\n    time.sleep(0.001)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(paths, "_PACKAGES", {"slow_package": "a package"})
    monkeypatch.setattr(paths, "_TELL_EVERY_S", 0.01)
    told: list[str] = []

    def tell(text: str, err: bool) -> None:
        told.append(text)
        sys.released = len(told) >= 3  # type: ignore[attr-defined]

    monkeypatch.setattr(paths.click, "echo", tell)
    paths.loading("slow_package")
    assert told[:3] == ["loading a package", *["loading a package (0 s)"] * 2]
    count = len(told)
    paths.loading("slow_package")
    assert len(told) == count, "an imported package is not told"
