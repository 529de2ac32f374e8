"""The benchmarks start, and what they leave behind has its shape. Nothing is timed here."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = sorted(
    f"{path.parent.name}.{path.stem}"
    for path in BENCHMARKS.rglob("*.py")
    if "def main()" in path.read_text("utf-8") and "support.finish(" in path.read_text("utf-8")
)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def support() -> ModuleType:
    return load("common.support")


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--quick" in text and "--out" in text
    assert str(module.__doc__).splitlines()[0] in text


def test_benchmarks_lie_in_folders_by_topic() -> None:
    assert [path.name for path in BENCHMARKS.glob("*.py")] == ["plots.py"]
    assert len(NAMES) >= 29


def test_out_is_required(support: ModuleType) -> None:
    with pytest.raises(SystemExit):
        support.parse("Measures.", ["--quick"])


def test_result_file_has_the_shape_that_readers_expect(
    support: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "result.json"
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "topic" / "thing.py"), "--out", str(out)])
    figures = [
        support.median("speed", [3.0, 1.0, 2.0], "GB/s"),
        support.ratio("speed_over_other", [3.0, 1.0], [2.0, 2.0], ">= 0.9"),
        support.Figure("never", float("inf"), "s"),
    ]
    support.finish("thing", support.hardware(), figures, out)
    result = json.loads(out.read_text("utf-8"))
    assert list(result) == ["benchmark", "command", "hardware", "date", "figures"]
    assert result["command"] == "python -m benchmarks.topic.thing --out result.json"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["figures"][0] == {
        "name": "speed",
        "value": 2.0,
        "unit": "GB/s",
        "target": None,
        "baseline": None,
        "runs": [3.0, 1.0, 2.0],
    }
    assert result["figures"][1]["value"] == 1.0
    assert result["figures"][1]["baseline"] == 2.0
    assert result["figures"][2]["value"] is None


def test_hardware_names_no_host_and_no_path(support: ModuleType) -> None:
    text = json.dumps(support.hardware())
    assert "/" not in text
    assert set(support.hardware()) >= {"cpu", "cores", "memory_gib", "load_1min"}


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [
        (0.95, ">= 0.9", True),
        (0.85, ">= 0.9", False),
        (0.4, "<= 0.5", True),
        (0.6, "<= 0.5", False),
        (None, ">= 1", False),
        (1.0, None, None),
    ],
)
def test_a_figure_knows_whether_it_meets_its_target(
    support: ModuleType, value: float | None, target: str | None, met: bool | None
) -> None:
    assert support.Figure("figure", value, "1", target).met is met


def test_time_to_target_waits_for_every_region() -> None:
    module = load("strategies.sync_cloudless")

    def evaluated(t_s: float, region: str, loss: float) -> dict[str, object]:
        metrics = {"loss": loss, "accuracy": 0.99}
        return {"t_s": t_s, "region": region, "metrics": metrics, "samples": 10}

    events = [evaluated(float(t), "east", 0.1) for t in range(5)]
    assert module.reached_s(events) == float("inf")
    events += [evaluated(10.0 + t, "west", loss) for t, loss in enumerate([0.9, 0.2, 0.1, 0.1])]
    assert module.reached_s(events) == 13.0


def test_a_round_over_a_slow_link_counts_what_it_waited() -> None:
    slow_links = load("strategies.slow_links")
    starts_s = [0.0, 5.0, 6.0, 7.0, 11.0, 12.0, 13.0, 14.0]  # the first is slow; 3 s for 4 steps
    steps = [{"start_s": start_s, "t_s": start_s + 1.0} for start_s in starts_s]
    site = slow_links.site_of(steps, ended_s=18.0, interval=4, first_exchange_s=8.0)
    assert site.alone_s == 1.0
    assert site.rounds_s == [11.0, 7.0]
    assert (site.began_s, site.ended_s) == (0.0, 18.0)


def test_the_time_to_a_loss_lies_between_evaluations() -> None:
    curve = load("strategies.four_continents").Curve(
        [(0.0, 5.0), (10.0, 4.0), (20.0, 2.0)], 30.0, 1
    )
    assert curve.to_target_s(3.0) == 15.0
    assert curve.to_target_s(4.5) == 5.0
    assert curve.to_target_s(1.0) == 30.0  # never


def test_time_to_a_loss_lies_between_evaluations() -> None:
    module = load("peers.peers_run")
    curve = [(10, 2.0, 3.0), (20, 4.0, 2.5), (30, 6.0, 2.7), (40, 8.0, 2.0)]
    outcome = module.Outcome(curve, 0.0, 4, 0.0, 0.0)
    assert outcome.best_by(0.8) == 2.5
    assert outcome.reached_s(3.0) == 2.0
    assert outcome.reached_s(2.75) == 3.0
    assert outcome.reached_s(1.0) == float("inf")
    assert module.Outcome(curve[:1], 0.0, 1, 0.0, 0.0).best_by(0.5) == float("inf")


def test_evaluations_of_regions_are_matched_by_round() -> None:
    module = load("peers.peers_run")
    # One region has missed round 4, and ended in another round.
    told = [[[2, 20], [4, 40], [6, 60], [7, 70]], [[2, 21], [6, 63], [6, 70]]]
    assert module._by_round(told) == [
        [[2, 20], [2, 21]],
        [[6, 60], [6, 63]],
        [[7, 70], [6, 70]],
    ]


def test_a_benchmark_that_is_interrupted_leaves_no_command_behind(
    support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on to write into a directory that is being removed."""
    command = load("common.command")
    started: list[subprocess.Popen[str]] = []
    endless = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    endless += "import sys\nwhile True: print('step', file=sys.stderr, flush=True)"

    def popen(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", endless], **options))
        return started[0]

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(command, "_END_S", 0.2)
    monkeypatch.setattr(support, "say", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.geo_ray("train", tmp_path / "c.yaml", {}, tmp_path / "runs", popen=popen)
    assert started[0].poll() is not None
