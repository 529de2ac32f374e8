"""A small table of losses that is really measured: the digits, by short simulated runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.api.compare import LossGrid, profile_loss
from geo_ray.base.errors import ConfigError, ProfileError
from geo_ray.cli.main import root
from geo_ray.planner.loss import LossProfile, load_loss_profile
from geo_ray.sweep.loss import LossFile

OFFER = {
    "cloud": "aws",
    "at": "us-east-1",
    "rows": 500,
    "machines": [{"type": "g5.xlarge", "cap": 2, "rows_per_s": 100}],
}
CONFIG: dict[str, Any] = {
    "name": "small",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {"rows_per_shard": 512}, "batch_size": 8},
    "regions": [{"name": "a"}, {"name": "b"}],
    "strategy": {"kind": "diloco", "interval": 8},
    "optimizer": {"kind": "momentum", "lr": 0.05},
    "train": {"steps": 1000},
    "emulate": {"link": {"rate_mbps": 10, "delay_s": 0.03}},
    "plan": {"regions": {"a": OFFER, "b": {**OFFER, "at": "eu-central-1"}}, "loss_budget": 1.0},
}
GRID = LossGrid(intervals=(1, 8), codecs=(None, "chunked_topk"), steps=24, seeds=2, jobs=2)


@pytest.fixture(autouse=True)
def _below(monkeypatch, tmp_path):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def losses(profile: LossProfile) -> dict[Any, Any]:
    return {point.key: point.losses for point in profile.points}


@pytest.mark.slow
def test_a_table_is_measured_kept_gone_on_with_and_planned_by(capsys) -> None:
    made = profile_loss(CONFIG, grid=GRID, progress="plain")
    profile = made.profile
    assert made.path == Path("runs/profiles/loss/small.json")
    assert load_loss_profile(made.path) == profile
    assert (profile.steps, profile.seeds, profile.codecs_at) == (24, (0, 1), 8)
    found = losses(profile)
    assert found.keys() == {(1, None), (8, None), (8, "chunked_topk")}
    assert all(0 < loss < 10 for point in found.values() for loss in point)
    # Each is a training of its own: other seeds, rounds and codecs end elsewhere.
    assert len({*profile.plain, *(loss for point in found.values() for loss in point)}) == 8
    assert made.table().num_rows == 3 and "small.json" in repr(made)
    assert "<table" in made._repr_html_()

    # What is known is not measured again; what is new is, and is compared with what is there.
    more = LossGrid((1, 8), (None, "chunked_topk", "int8"), 24, 2, 1)
    grown = profile_loss(CONFIG, grid=more, progress="plain")
    assert "4 of 5 are known" in capsys.readouterr().err
    again = losses(grown.profile)
    assert again.keys() == found.keys() | {(8, "int8")}
    assert {key: again[key] for key in found} == found

    # And a plan goes by it.
    planned = geo_ray.plan(CONFIG, {"plan.intervals": [8], "plan.codecs": ["int8"]})
    assert planned.plan.loss.measured
    assert planned.plan.loss.expected == pytest.approx(grown.loss(8, "int8"))

    # Another length is another measurement.
    other = LossGrid((1,), (None,), 16, 2, 1)
    fresh = profile_loss(CONFIG, grid=other, out="other.json")
    assert losses(fresh.profile).keys() == {(1, None)} and fresh.profile.steps == 16


@pytest.mark.slow
def test_rounds_that_diverge_are_seen_where_plain_training_does_not() -> None:
    """Outer steps that overshoot."""
    changes = {"strategy.outer": {"kind": "nesterov", "lr": 1e6, "momentum": 0.9}}
    grid = LossGrid(intervals=(16,), codecs=(None,), steps=64, seeds=2, jobs=2)
    made = profile_loss(CONFIG, changes, grid=grid)
    assert None in losses(made.profile)[16, None] and None not in made.profile.plain
    with pytest.raises(geo_ray.GeoRayError, match="training diverged"):
        geo_ray.plan(CONFIG, changes)


def test_the_command_measures_and_shows_a_table(tmp_path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(json.dumps(CONFIG))
    words = ["profile", str(config), "--loss", "--intervals", "1", "--codecs", "none"]
    result = CliRunner().invoke(root, [*words, "--steps", "6", "--seeds", "2", "--jobs", "2"])
    assert result.exit_code == 0, result.output
    assert "1 steps" in result.output and "else assumed" in result.output
    assert "small.json" in result.output
    refused = CliRunner().invoke(root, [*words, "--workers", "1"])
    assert refused.exit_code != 0 and "--workers does not apply to --loss" in refused.output
    refused = CliRunner().invoke(root, ["profile", str(config), "--seeds", "3"])
    assert "--seeds does not apply to a profile without --loss" in refused.output


@pytest.mark.slow
def test_plain_training_that_diverges_is_nothing_to_compare_with() -> None:
    grid = LossGrid((1,), (None,), steps=12, seeds=2, jobs=2)
    explodes = {"kind": "adamw", "lr": 1e6, "weight_decay": 1.0}
    with pytest.raises(ProfileError, match="plain training"):
        profile_loss(CONFIG, {"optimizer": explodes}, grid=grid)


@pytest.mark.parametrize("grid", [LossGrid(seeds=1), LossGrid(steps=0), LossGrid(intervals=())])
def test_arguments_that_make_no_sense_are_refused(grid: LossGrid) -> None:
    with pytest.raises(ConfigError):
        profile_loss(CONFIG, grid=grid)


@pytest.mark.slow
def test_other_intervals_keep_what_is_there_and_codecs_stay_where_they_are(capsys) -> None:
    def grid(*intervals: int) -> LossGrid:
        return LossGrid(intervals, (None, "int8"), 16, 2, 2)

    before = losses(profile_loss(CONFIG, grid=grid(8)).profile)
    assert before.keys() == {(8, None), (8, "int8")}
    capsys.readouterr()
    grown = profile_loss(CONFIG, grid=grid(1), progress="plain").profile
    assert "2 of 3 are known" in capsys.readouterr().err
    assert losses(grown) == before | {(1, None): grown.by_key[1, None].losses}
    assert grown.codecs_at == 8


@pytest.mark.slow
def test_another_length_replaces_what_is_there_when_it_is_whole(monkeypatch) -> None:
    def grid(steps: int) -> LossGrid:
        return LossGrid((4,), (None,), steps, 2, 2)

    made = profile_loss(CONFIG, grid=grid(8))
    beside = made.path.with_name("small.json.partial")
    kept = LossFile.keep

    def interrupted(file: LossFile, found: LossProfile) -> None:
        kept(file, found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LossFile, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            profile_loss(CONFIG, grid=grid(12))
    assert load_loss_profile(made.path) == made.profile and beside.exists()
    whole = profile_loss(CONFIG, grid=grid(12))
    assert load_loss_profile(made.path) == whole.profile and whole.profile.steps == 12
    assert not beside.exists()
