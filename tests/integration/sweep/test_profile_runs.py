"""Profile, plan, train, plan again: on real actors of the shared cluster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.api.plan import ProfileGrid
from geo_ray.base.errors import ConfigError, InterruptedRunError
from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import load_plan
from geo_ray.planner.profile import fit_steps, load_profile
from geo_ray.runs import directory as rundir
from geo_ray.runs.follow_plan import following
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import load_cost
from tests.support.train_support import eventually, experiment_of, train, write_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

NAMES = ("us-east", "eu-west")
SPEED = 400.0


def config(directory: Path, **changes: object) -> Path:
    offer = {"cloud": "own", "machines": [{"type": "box", "cap": 2}], "rows": 100.0}
    tree = {
        "regions": [{"name": NAMES[0], "workers": 2}, {"name": NAMES[1]}],
        "train": {"steps": 40, "eval_every": 0, "step_timeout_s": 60},
        "emulate": {
            "link": {"rate_mbps": 20, "delay_s": 0.01},
            "rows_per_s_by_region": {NAMES[0]: [SPEED], NAMES[1]: [SPEED]},
        },
        "plan": {
            "regions": {name: {**offer, "at": name} for name in NAMES},
            "codecs": [None],
            "intervals": [2, 4],
            "startup_s": 5.0,
        },
    }
    return write_config(directory, experiment_of(directory, **(tree | changes)))


def prices(directory: Path, usd: float = 1.0) -> None:
    source = {"source": "test", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e9}
    records: list[dict[str, object]] = []
    for name in NAMES:
        common = {"cloud": "own", "region": name, "currency": "USD", **source}
        records.append({**common, "type": "box", "amount": usd, "unit": "hour"})
        records.append({**common, "item": "egress", "to": "*", "amount": 0.1, "unit": "GB"})
    (directory / "prices.json").write_text(json.dumps({"records": records}))


def run(*words: str) -> str:
    result = CliRunner().invoke(root, [*words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.slow
def test_the_library_measures_a_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path)
    grid = ProfileGrid(workers=[2], batch_sizes=[8], steps=5)
    seen: list[Event] = []
    found = geo_ray.profile(path, grid=grid, out="p.json", on_event=seen.append)
    assert found.path == Path("p.json") and load_profile(found.path) == found.profile
    rows = {(row["region"], row["workers"], row["rows"]) for row in found.table().to_pylist()}
    assert rows == {(NAMES[0], 2, 8), (NAMES[1], 1, 8)}
    assert found.exchanges()["codec"] == [None]
    assert {"run_started", "step", "run_finished"} <= {event.kind for event in seen}
    assert "2 points" in repr(found) and "<table>" in found._repr_html_()
    seen.clear()
    again = geo_ray.profile(path, grid=grid, out="p.json", on_event=seen.append)
    assert again.profile == found.profile and seen == []
    with pytest.raises(ConfigError, match="batch_sizes"):
        geo_ray.profile(path, grid=ProfileGrid(batch_sizes=[0]))


@pytest.mark.slow
@pytest.mark.timeout(900)  # four whole runs, one after another
def test_a_job_is_profiled_planned_followed_and_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    prices(tmp_path)
    path = config(tmp_path)
    measured = ["--workers", "2", "--batch-sizes", "8,32", "--steps", "8"]
    said = run("profile", str(path), *measured)
    assert "line says" in said
    profile_path = tmp_path / "runs" / "profiles" / "tiny.json"
    profile = load_profile(profile_path)
    assert len(profile.steps) == 4 and profile.noise is not None and profile.starts[0].start_s > 0
    for name in NAMES:  # the speed of the emulated machines, which nobody told
        assert fit_steps(name, profile.steps).row_s["box"] == pytest.approx(1 / SPEED, rel=0.3)
    run("profile", str(path), *measured)  # all is known: nothing runs
    assert load_profile(profile_path) == profile

    run("plan", str(path), "--out", "p.json", "--extrapolate")  # one worker was not measured
    plan = load_plan(tmp_path / "p.json")
    assert plan.model == profile.model and plan.total_usd > 0

    # It is interrupted, and goes on with what a dearer market makes best.
    experiment = load_tree(path, [], Experiment)
    begun = rundir.create(experiment, tmp_path, followed=plan)
    followed = following(begun, experiment, plan)
    rundir.adopt(begun, followed, plan)

    at_12 = ("step", NAMES[0], 12)

    def interrupt(event: Event) -> None:
        if (event.kind, event.fields.get("region"), event.fields.get("step")) == at_12:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        train(followed, tmp_path, begun=begun, sink=interrupt)
    assert "stays" in run("plan", str(path), "--from", str(begun.path))
    other = load_plan(tmp_path / "p.json")
    regions = [
        region.model_copy(
            update={"machines": (region.machines[0].model_copy(update={"count": 1, "rows": rows}),)}
        )
        for region, rows in zip(other.regions, (32, 16), strict=True)
    ]
    other = other.model_copy(update={"regions": tuple(regions), "from_step": 12})
    (tmp_path / "q.json").write_text(other.model_dump_json())
    short = ["--resume", str(begun.path), "--plan", "q.json", "--plain"]
    run("train", *short)
    _, resumed = rundir.reopen(begun.path)
    assert [region.batch_sizes for region in resumed.regions] == [(32,), (16,)]
    cost = load_cost(begun.path)
    assert cost is not None and any("replanned at step 12" in note for note in cost.notes)
    eventually(lambda: (begun.path / "report.html").exists(), "the report")
