"""Plans with a measured loss: its effect, where it is found, and when it is rejected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import ConfigError, OtherModelError, PlanInfeasibleError, ProfileError
from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import LossPoint, LossProfile
from geo_ray.planner.profile import save_profile
from geo_ray.runs.build import parameter_count
from geo_ray.runs.follow_plan import model_id
from geo_ray.runs.planning import PlannedJob, Sources, make_plan, subject_of
from geo_ray.runs.replanning import State, replanned

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
SMALL = ("task.options={size: 0.1M}",)
FOUND = Path("runs/profiles/loss/planned.json")


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def experiment(*overrides: str) -> Experiment:
    return load_tree(CONFIG, [*SMALL, *overrides], Experiment)


def planned(*overrides: str, loss: Path | None = None, policy: str = "optimal") -> PlannedJob:
    return make_plan(experiment(*overrides), CONFIG.parent, policy, Sources(loss=loss))


def measured(
    points: dict[tuple[int, str | None], float | None],
    *overrides: str,
    at: int = 16,
    path: Path = FOUND,
) -> Path:
    """Write losses without noise, relative to plain training; None: diverged."""
    config = experiment(*overrides)
    num_params = parameter_count(load_task(config.task, CONFIG.parent), config.seed)
    model = model_id(config, CONFIG.parent, num_params)
    found = LossProfile(
        subject=subject_of(config, CONFIG.parent, model),
        steps=200,
        seeds=(0, 1),
        plain=(2.0, 3.0),
        codecs_at=at,
    )
    for (interval, codec), share in points.items():
        losses = (None, None) if share is None else (2 * (1 + share), 3 * (1 + share))
        point = LossPoint(interval=interval, codec=codec, losses=losses)
        found = found.with_point(point, 0.0)
    save_profile(found, path)
    return path


STEEP: dict[tuple[int, str | None], float | None] = {
    (1, None): 0.0,
    (4, None): 0.02,
    (16, None): 0.08,
    (64, None): 0.3,
}


def run(*words: str):
    return CliRunner().invoke(root, ["plan", str(CONFIG), "--set", SMALL[0], *words])


# ------------------------------------------------------------------ what it changes


def test_a_measured_loss_shortens_the_interval() -> None:
    assumed = planned().plan
    assert assumed.interval >= 256 and not assumed.loss.measured
    by_hand = measured({**STEEP, (16, "int8"): 0.08, (16, "int4"): 0.2}, path=Path("x.json"))
    plan = planned(loss=by_hand).plan
    assert plan.interval <= 8 and plan.loss.measured and plan.codec != "int4"
    assert 0 < plan.loss.expected <= 0.05
    assert plan.total_usd > assumed.total_usd


def test_a_codec_that_is_dear_is_left() -> None:
    flat: dict[tuple[int, str | None], float | None] = {(h, None): 0.0 for h in (1, 16, 512)}
    assert planned(loss=measured(flat)).plan.codec == "int4"
    dear = {**flat, (16, "int4"): 0.2}
    assert planned(loss=measured(dear)).plan.codec == "int8"
    diverged = {**dear, (16, "int8"): None}
    assert planned(loss=measured(diverged)).plan.codec not in ("int4", "int8")


def test_a_codec_for_updates_alone_is_chosen_by_its_measured_loss_too() -> None:
    only = "plan.codecs=[null, chunked_topk]"
    flat: dict[tuple[int, str | None], float | None] = {(h, None): 0.0 for h in (1, 16, 512)}
    assert planned(only, loss=measured({**flat, (16, "chunked_topk"): 0.01})).plan.codec is not None
    assert planned(only, loss=measured({**flat, (16, "chunked_topk"): 0.2})).plan.codec is None


def test_the_budget_holds_against_what_was_measured() -> None:
    path = measured({(h, None): 0.2 for h in (1, 16, 512)} | {(16, "int8"): 0.2})
    with pytest.raises(PlanInfeasibleError, match=r"expected to lose 20\.0%, as measured") as told:
        planned(loss=path)
    assert "--seeds" in told.value.fix
    enough = re.search(r"loss_budget to ([\d.]+)", told.value.fix)
    assert enough is not None
    assert planned(f"plan.loss_budget={enough[1]}", loss=path).plan.loss.expected <= 0.201


def test_where_all_diverged_there_is_no_number_to_set() -> None:
    path = measured({(16, None): None})
    with pytest.raises(PlanInfeasibleError, match="training diverged"):
        planned("plan.loss_budget=1000000", loss=path)


def test_with_an_interval_beyond_what_was_measured_a_note_says_so() -> None:
    short = measured({(1, None): 0.0, (4, None): 0.0})
    notes = planned(loss=short).plan.notes
    assert any("partly assumed: the longest measured is 4" in note for note in notes)
    near = planned("plan.intervals=[2]", loss=short).plan
    assert not any("partly assumed" in note for note in near.notes)
    assert any("200 steps with 2 seeds, where the job has 20000" in note for note in near.notes)


def test_with_a_codec_that_was_not_measured_a_note_says_so() -> None:
    flat: dict[tuple[int, str | None], float | None] = {(h, None): 0.0 for h in (1, 16, 512)}
    told = "the loss of int4 is assumed: it was not measured"
    plan = planned(loss=measured(flat)).plan
    assert plan.codec == "int4" and told in plan.notes
    known = planned(loss=measured({**flat, (16, "int4"): 0.0})).plan
    assert known.codec == "int4" and told not in known.notes
    bare = planned("plan.codecs=[null]", loss=measured(flat)).plan
    assert not any("was not measured" in note for note in bare.notes)


def test_replanning_notes_missing_measurements() -> None:
    plan = planned("plan.deadline_h=100", "plan.intervals=[256]", "plan.codecs=[int4]").plan
    measured({(1, None): 0.0, (4, None): 0.0})
    config = experiment("plan.deadline_h=1000", "plan.intervals=[256]", "plan.codecs=[int4]")
    state = State(100, {r.region: r.step_s for r in plan.regions})
    again = replanned(config, CONFIG.parent, plan, state, Path("none.json"), Sources()).plan
    assert "the loss of int4 is assumed: it was not measured" in again.notes
    assert any("partly assumed: the longest measured is 4" in note for note in again.notes)


@pytest.mark.parametrize("policy", ["cloudless", "everything"])
def test_other_policies_keep_the_configured_interval_if_it_keeps_the_budget(policy: str) -> None:
    path = measured({(32, None): 0.01})
    plan = planned(loss=path, policy=policy).plan
    assert (plan.interval, plan.codec) == (32, None) and plan.loss.measured
    assert plan.loss.expected == pytest.approx(0.01)


# ------------------------------------------------------------------ where it is found


def test_the_own_file_is_found_and_another_of_the_same_task_too() -> None:
    own = measured(STEEP)
    assert planned().plan.loss.measured
    own.rename(own.with_name("another.json"))
    assert planned().plan.loss.measured
    assert not planned("strategy={kind: sma, interval: 16}").plan.loss.measured
    own.write_text("{}")
    beside = planned().plan
    assert beside.loss.measured
    own.with_name("another.json").write_text("{}")
    rough = planned().plan
    assert not rough.loss.measured
    for plan in (beside, rough):
        (note,) = (each for each in plan.notes if each.startswith("ignored: "))
        assert f"measured loss {own} is not valid" in note
    own.unlink()
    assert not any("ignored: " in note for note in planned().plan.notes)


def test_a_smaller_model_stands_for_a_large_one_only_if_it_is_named() -> None:
    smaller = measured(STEEP, "task.options.context=16")
    assert not planned().plan.loss.measured
    plan = planned(loss=smaller).plan
    assert plan.loss.measured
    assert "the loss was measured with other task.options" in plan.notes


def test_changed_settings_are_reported() -> None:
    measured(STEEP, "optimizer.lr=0.5", "data.batch_size=64")
    notes = planned().plan.notes
    assert any("with other data.batch_size, optimizer" in note for note in notes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (("strategy={kind: sma, interval: 16}",), "the strategy is sma"),
        (
            ("data.generate={rows_per_shard: 512, split: {kind: dirichlet, alpha: 1}}",),
            "the data differ",
        ),
        (("task={use: digits}",), "the task is"),
    ],
)
def test_the_loss_of_another_task_is_refused(changes: tuple[str, ...], words: str) -> None:
    path = measured(STEEP)
    sources = Sources(loss=path)
    other = load_tree(CONFIG, [*(() if "task" in changes[0] else SMALL), *changes], Experiment)
    with pytest.raises(OtherModelError, match=words):
        make_plan(other, CONFIG.parent, "optimal", sources)


def test_a_file_that_is_named_must_be_one() -> None:
    Path("x.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"measured loss x\.json is not valid"):
        planned(loss=Path("x.json"))


def test_a_strategy_that_cannot_be_planned_still_cannot() -> None:
    measured(STEEP)
    with pytest.raises(ConfigError, match="strategy fedavg cannot be planned"):
        planned("strategy={kind: fedavg}")


# ------------------------------------------------------------------ planning anew, command line


def test_replanning_uses_the_measured_loss() -> None:
    plan = planned("plan.deadline_h=100", "plan.intervals=[4, 256]").plan
    assert plan.interval == 256
    measured({**STEEP, (16, plan.codec): 0.08} if plan.codec else STEEP)
    seconds = {r.region: r.fixed_s + 8 * (r.step_s - r.fixed_s) for r in plan.regions}
    config = experiment("plan.deadline_h=1000", "plan.intervals=[4, 256]")
    state, none = State(100, seconds), Path("none.json")
    decision = replanned(config, CONFIG.parent, plan, state, none, Sources())
    assert decision.changed and decision.plan.interval == 4
    assert decision.plan.loss.measured and decision.plan.loss.expected <= 0.05
    # The plan that the run follows exceeds the budget now, and may still go on.
    near = State(19990, {r.region: r.step_s for r in plan.regions})
    stays = replanned(config, CONFIG.parent, plan, near, none, Sources()).plan
    assert stays.interval == 256 and stays.loss.expected > 0.05


def test_the_output_says_whether_the_loss_is_measured() -> None:
    words = ("--set", "plan.intervals=[4]")
    rough = run(*words)
    assert rough.exit_code == 0 and "assumed: a rough table" in rough.output, rough.output
    path = measured(STEEP, path=Path("x.json"))
    for more in ((), ("--dry-run",)):
        result = run(*words, "--loss", str(path), *more)
        assert result.exit_code == 0, result.output
        assert "more than plain training (measured for this task)" in result.output
        assert "loss as measured in x.json" in re.sub(r"\s+", " ", result.output)
    result = run(*words, "--loss", str(path), "--dry-run")
    assert "loss" not in result.stdout and "USD" in result.stdout


def test_a_missing_file_is_reported() -> None:
    result = run("--loss", "nowhere.json")
    assert result.exit_code != 0 and "no measured loss nowhere.json" in str(result.exception)
