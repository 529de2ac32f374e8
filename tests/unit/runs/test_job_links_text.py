"""Which links a run has is said in the header of every run, simulation and comparison."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import geo_ray
from geo_ray.runs.recorder import Recorder, links_text
from geo_ray.telemetry.event_log import EventLog, read_events
from geo_ray.telemetry.progress import Progress
from geo_ray.telemetry.report import render_report
from tests.support.job_support import experiment

LINK = "emulate={link: {rate_mbps: 100, delay_s: 0.03}, step_s: 0.08}"
ONE = "emulate={links: [{src: eu, dst: us, delay_s: 0.02, loss: 0.01}]}"
TWO = (
    "emulate={links: [{src: eu, dst: us, rate_mbps: 50, delay_s: 0.02},"
    " {src: us, dst: eu, rate_mbps: 200, delay_s: 0.05}], step_s_by_region: {eu: 0.5}}"
)


@pytest.mark.parametrize(
    ("changes", "real", "simulated"),
    [
        (
            (),
            "real links: nothing is emulated",
            "links without delay and limit: no `emulate` is configured; "
            "steps as measured on this machine",
        ),
        (
            (LINK,),
            "links emulated: 100 Mbit/s, 30 ms one way; steps padded to 0.08 s",
            "links assumed: 100 Mbit/s, 30 ms one way; steps take 0.08 s",
        ),
        (
            (LINK, "cluster={kind: existing}"),
            "links emulated: 100 Mbit/s, 30 ms one way, which slows down the cluster's links; "
            "steps padded to 0.08 s",
            "links assumed: 100 Mbit/s, 30 ms one way; steps take 0.08 s",
        ),
        (
            (ONE,),
            "links emulated in 1 of 2 directions: no limit, 20 ms one way, 1 % loss; the others "
            "are "
            "real",
            "links assumed in 1 of 2 directions: no limit, 20 ms one way, 1 % loss; the others "
            "without delay and limit; steps as measured on this machine",
        ),
        (
            (TWO,),
            "links emulated: 50 to 200 Mbit/s, 20 to 50 ms one way; steps padded to 0.5 s in 1 of "
            "2 regions",
            "links assumed: 50 to 200 Mbit/s, 20 to 50 ms one way; steps take 0.5 s in 1 of 2 "
            "regions",
        ),
        (
            ("regions=[{name: eu}]",),
            "no links: one region",
            "no links: one region; steps as measured on this machine",
        ),
    ],
)
def test_links_and_steps_in_words(changes, real: str, simulated: str) -> None:
    found = experiment(*changes)
    assert links_text(found, simulated=False) == real
    assert links_text(found, simulated=True) == simulated


def test_a_runs_log_terminal_and_page_have_it(tmp_path: Path) -> None:
    found, console = experiment(LINK), Console(file=StringIO(), width=200)
    with EventLog(tmp_path / "events.jsonl") as log, Progress(10, ["eu"], console, True) as shown:
        Recorder(log, [shown.feed]).started(found, "trial", 0.0, simulated=False)
    text = "links emulated: 100 Mbit/s, 30 ms one way; steps padded to 0.08 s"
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["links"] == text
    assert text in console.file.getvalue()
    assert text in render_report(tmp_path)


def test_a_comparison_has_it(tmp_path: Path) -> None:
    shared = {"train.steps": 2, "run.dir": str(tmp_path)}
    result = geo_ray.compare(
        experiment(LINK), "bsp", shared, seeds=1, rates=(1.0,), out=tmp_path / "out"
    )
    text = "links assumed: 100 Mbit/s, 30 ms one way; steps take 0.08 s"
    assert result.comparison.links == text
    assert text in result.page_path.read_text() and text in result._repr_html_()
    assert '"links": "links assumed' in (tmp_path / "out" / "compare.json").read_text()
