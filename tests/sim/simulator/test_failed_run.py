"""A simulation that an error ends leaves a page that says so."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from geo_ray.base.errors import NonFiniteError
from geo_ray.cli.main import root

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_a_simulation_that_diverges_is_shown_as_failed(tmp_path: Path) -> None:
    changes = [f"run.dir={tmp_path}", "optimizer.lr=1e6", "train.steps=20", "name=trial"]
    options = [word for change in changes for word in ("--set", change)]
    done = CliRunner().invoke(root, ["simulate", str(CONFIG), *options, "--plain"])
    assert isinstance(done.exception, NonFiniteError)
    assert "report.html" in done.output
    page = (tmp_path / "trial" / "report.html").read_text()
    assert '<span class="tag cut">failed</span>' in page and ">finished<" not in page
    assert "<code>NON_FINITE</code>" in page and "in simulated time" in page
    assert re.search(r"us-east: step \d of 20 at ", page)
