"""What trials are worth, which of them none beats, and what is written down of them."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune

from geo_ray.api.tune import _finish as finished
from geo_ray.api.tune import plan_of
from geo_ray.base.errors import GeoRayError, SearchMissingError, from_code
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.sweep.ray_tune import AshaKeepingBase, PbtKeepingBase, check_installed
from geo_ray.sweep.score import (
    FAILED,
    UNREACHED,
    Goal,
    Standing,
    TrialWatch,
    report_of,
    score,
    usd_of,
)
from geo_ray.sweep.search_config import PricesConfig, SearchConfig
from geo_ray.sweep.space import base_of
from geo_ray.sweep.tune import (
    SearchResult,
    TrialPoint,
    TrialRow,
    Tuning,
    best_text,
    front,
    ordered,
    save_tuning,
    summary_text,
    tuning_table,
    write_best,
    write_tuning_page,
)
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Target

CONFIG = Path(__file__).parents[3] / "configs" / "four_continents.yaml"
LOSS = Goal.of(Target(metric="loss", value=0.2, direction="at_most"))
ACCURACY = Goal.of(Target(metric="accuracy", value=0.9, direction="at_least"))

# ------------------------------------------------------------------ the front


def beaten(mine: tuple[float, ...], others: list[tuple[float, ...]]) -> bool:
    """The definition, word by word: some other is nowhere worse and somewhere better."""
    for other in others:
        nowhere_worse = not any(theirs > ours for theirs, ours in zip(other, mine, strict=True))
        somewhere_better = any(theirs < ours for theirs, ours in zip(other, mine, strict=True))
        if nowhere_worse and somewhere_better:
            return True
    return False


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.lists(
            st.tuples(*[st.integers(0, 5).map(float)] * size), min_size=0, max_size=14
        )
    )
)
def test_the_front_has_those_that_none_beats(scores: list[tuple[float, ...]]) -> None:
    found = front(scores)
    wanted = {each for each in scores if not beaten(each, scores)}
    assert {scores[place] for place in found} == wanted
    assert len(found) == len(wanted), "of equal ones the first stays"
    assert all(place == scores.index(scores[place]) for place in found)
    assert [scores[place] for place in found] == sorted(wanted)


# ------------------------------------------------------------------ scores


def test_who_comes_short_stands_behind_all_that_did_not_the_nearest_first() -> None:
    runs = [
        Standing(9.0, 100, 3.0, 0.19, reached_s=9.0, reached_usd=3.0, ended=True),
        Standing(8e8, 100, 3e8, 0.19, reached_s=8e8, reached_usd=3e8, ended=True),
        Standing(20.0, 100, 5.0, 0.21, ended=True),
        Standing(1.0, 10, 0.1, 0.8),
        Standing(20.0, 100, 5.0, math.inf, ended=True),
        Standing(20.0, 100, 5.0, None, ended=True),
    ]
    for objective in ("time_to_target", "usd"):
        scores = [score(objective, run, LOSS) for run in runs]
        assert scores == sorted(scores) and all(map(math.isfinite, scores))
        assert scores[1] < UNREACHED <= scores[2] < scores[3] < scores[4] < FAILED
    assert [score("loss", run, LOSS) for run in runs] == [0.19, 0.19, 0.21, 0.8, FAILED, FAILED]


def test_more_is_better_where_the_target_says_so() -> None:
    low, high = (Standing(1.0, 1, 0.0, value) for value in (0.5, 0.8))
    for objective in ("loss", "time_to_target"):
        assert score(objective, high, ACCURACY) < score(objective, low, ACCURACY)
    assert score("time_to_target", high, ACCURACY) == pytest.approx(UNREACHED * (1 + 0.1 / 0.9))


def test_without_a_target_usd_are_those_of_the_whole_run() -> None:
    goal = Goal.of(None)
    assert goal.metric == "loss"
    assert score("usd", Standing(1.0, 1, 2.5, 0.1), goal) == UNREACHED
    assert score("usd", Standing(1.0, 1, 2.5, 0.1, ended=True), goal) == 2.5


def test_usd_are_workers_by_the_hour_and_bytes_by_where_they_leave() -> None:
    prices = PricesConfig(
        worker_usd_per_h={"us": 2.0, "eu": 3.0}, egress_usd_per_gb={"us": 0.1, "eu": 0.05}
    )
    sent = {("us", "eu"): 4e9, ("eu", "us"): 2e9}
    by_hand = 0.5 * (2 * 2.0 + 1 * 3.0) + 4 * 0.1 + 2 * 0.05
    assert usd_of(prices, {"us": 2, "eu": 1}, 1800.0, sent) == pytest.approx(by_hand)
    assert math.isnan(usd_of(None, {"us": 2}, 1800.0, sent))


def event(kind: str, t_s: float, **fields: Any) -> Event:
    return Event(kind, t_s, fields)


def evaluation(t_s: float, loss: float, region: str | None = None) -> Event:
    return event("eval", t_s, step=1, region=region, metrics={"loss": loss}, samples=9, final=False)


def test_a_run_is_followed_by_its_events() -> None:
    target = "train.target={metric: loss, value: 0.2, direction: at_most}"
    experiment = load_tree(CONFIG, [target], Experiment)
    prices = PricesConfig(worker_usd_per_h=dict.fromkeys(experiment.region_names, 0.9))
    watch = TrialWatch(experiment, prices)
    fed = [
        watch.feed(each)
        for each in (
            event("step", 1.0, region="us", samples=16, loss=1.0),
            evaluation(2.0, 0.1, region="us"),
            evaluation(2.5, 0.5),
            event("step", 3.0, region="us", samples=16, loss=0.9),
            evaluation(4.0, 0.15),
            evaluation(5.0, 0.3),
        )
    ]
    told = [standing for standing in fed if standing is not None]
    assert [standing.time_s for standing in told] == [2.5, 4.0, 5.0], "those of all regions"
    assert [standing.samples for standing in told] == [16, 32, 32]
    assert [standing.reached_s for standing in told] == [None, 4.0, 4.0], "the first time counts"
    assert told[-1].reached_usd == pytest.approx(4 * 0.9 * 4.0 / 3600)
    later = TrialWatch(experiment, prices, told[0]).feed(evaluation(1.0, 0.1))
    assert later is not None and later.time_s == later.reached_s == 3.5, "after what was before"


def test_ray_tune_is_told_finite_numbers_only() -> None:
    told = report_of(Standing(1.0, 2, math.nan, math.inf), LOSS, ("time_to_target", "loss"))
    assert all(math.isfinite(value) for value in told.values())
    assert "usd" not in told and "loss" not in told and told["behind"] == FAILED


# ------------------------------------------------------------------ results


def row(number: int, status: Any, *scores: float, **values: Any) -> TrialRow:
    points = tuple(TrialPoint(10.0 * n, 100 * n, 1.0 / n) for n in range(1, 4))
    why = "[NON_FINITE] region 'us' <refused>\n  fix: Lower it" if status == "failed" else ""
    return TrialRow(f"a_{number:05d}", values, status, scores, {"time_s": 30.0}, points, why)


def tuning(*rows: TrialRow, base: TrialRow | None = None, names: Any = None) -> Tuning:
    objectives = names or ("time_to_target", "usd")[: len(rows[0].scores)]
    return Tuning(objectives, LOSS, ordered(rows), base, len(rows))


def test_the_best_is_one_that_came_to_its_end() -> None:
    fast = row(1, "stopped", 3.0)
    rows = [row(0, "failed", FAILED), fast, row(2, "reached", 8.0), row(3, "ended", 2 * UNREACHED)]
    for order in itertools.permutations(rows):
        found = tuning(*order, base=row(4, "reached", 12.0))
        assert found.best is not None and found.best.id == "a_00002"
        assert [each.id[-1] for each in found.rows] == ["2", "3", "1", "0"]
        assert found.gain == pytest.approx(1.5)
    assert tuning(rows[0]).best is None and tuning(rows[0]).gain is None
    short = tuning(row(2, "reached", 8.0), base=row(4, "ended", 2 * UNREACHED))
    assert short.gain is None, "how far the base came short is no time"


def test_the_front_leaves_out_who_came_short() -> None:
    rows = [
        row(0, "reached", 5.0, 3.0),
        row(1, "reached", 9.0, 1.0),
        row(2, "reached", 9.0, 4.0),
        row(3, "ended", 2 * UNREACHED, 0.1),
        row(4, "stopped", 1.0, 1.0),
    ]
    assert [each.id for each in tuning(*rows).front] == ["a_00000", "a_00001"]


def test_a_base_that_nothing_beat_is_not_praised() -> None:
    base = row(7, "reached", 5.0)
    beaten, equal = row(1, "reached", 9.0), row(2, "reached", 5.0)
    for rows, best in (([base, beaten], base), ([equal, beaten], equal)):
        found = tuning(*rows, base=base)
        assert found.best is best
        assert summary_text(found).splitlines()[-1].startswith("no trial beat the base")
    lower = tuning(row(3, "ended", 0.3), base, base=base, names=("loss",))
    assert "base" not in summary_text(lower), "how much lower a loss is says little"
    same = tuning(base, beaten, base=base, names=("loss",))
    assert "no trial beat the base" in summary_text(same)
    ahead = tuning(row(1, "reached", 2.5), base, base=base)
    assert summary_text(ahead).endswith("the best is 2.00 times faster to the target than the base")


def test_the_page_has_all_trials_and_fetches_nothing(tmp_path: Path) -> None:
    base = row(7, "reached", 9.0, 1.0, **{"optimizer.lr": 0.05})
    rows = [
        row(1, "reached", 5.0, 3.0, **{"optimizer.lr": 0.1, "strategy.kind": "<sma>"}),
        base,
        row(2, "failed", FAILED, FAILED, codec=None),
        row(3, "stopped", 2 * UNREACHED, 2 * UNREACHED, codec="int8"),
    ]
    found = tuning(*rows, base=base)
    page = write_tuning_page(found, "Search <b>", tmp_path / "tune.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "&lt;sma&gt;" in page and "&lt;refused&gt;" in page and "<sma>" not in page
    trials = page[page.index("Trials") : page.index("Front")]
    assert len(re.findall("<tr>", trials)) == 1 + len(rows)
    headings = re.findall("<th[^>]*>([^<]*)", trials)
    assert "loss at the end" in headings and len(set(headings)) == len(headings)
    assert "1.80 times faster to the target than the base" in page
    table = tuning_table(found, "search")
    assert table.row_count == len(rows)
    assert "1 stopped early, 1 failed" in summary_text(found)


def test_the_file_for_programs_is_json_that_others_read(tmp_path: Path) -> None:
    found = tuning(row(1, "reached", 5.0), row(2, "failed", FAILED))
    told = json.loads(
        save_tuning(found, tmp_path / "tune.json").read_text(), parse_constant=pytest.fail
    )
    assert told["best"] == "a_00001" and len(told["trials"]) == 2
    assert np.isfinite(told["trials"][0]["scores"]).all()


# ------------------------------------------------------------------ the best as a file


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy.kind": "diloco", "strategy.outer.lr": 0.37, "codec": "int8"},
        {"regions.*.workers": 2, "optimizer.lr": 0.0123456789, "codec.up": "topk"},
    ],
)
def test_the_best_is_a_file_that_makes_the_very_configuration(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    base = base_of(CONFIG, ("train.steps=12",))
    path = write_best(base, values, "The best.\nOf two.", tmp_path / "best.yaml")
    assert path.read_text().startswith("# The best.\n# Of two.\n")
    assert load_tree(path, (), Experiment) == base.experiment(values)


def test_the_best_finds_its_files_from_where_it_lies(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    starters = CONFIG.parents[1] / "geo_ray" / "cli" / "starters"
    source = sorted(starters.rglob("*task*.py.in"))[0]
    (home / "mine.py").write_text(source.read_text())
    name = re.findall(r"class (\w+)", source.read_text())[-1]
    (home / "base.yaml").write_text(
        CONFIG.read_text().replace("use: digits", f"use: 'mine.py:{name}'")
    )
    path = write_best(base_of(home / "base.yaml", ()), {}, "", away / "best.yaml")
    assert load_tree(path, (), Experiment).task.use == f"{home / 'mine.py'}:{name}"


# ------------------------------------------------------------------ errors


def test_a_search_that_is_not_installed_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setattr("geo_ray.sweep.ray_tune.find_spec", lambda _: None)
    with pytest.raises(SearchMissingError, match="optuna is not installed") as caught:
        check_installed(SearchConfig(kind="optuna"))
    assert "pip install optuna" in caught.value.fix
    check_installed(SearchConfig(kind="random"))


@pytest.mark.parametrize("code", ["TUNING", "SEARCH_MISSING", "TRIALS_FAILED", "TUNING_DIRECTORY"])
def test_errors_have_a_code_and_the_chapters_exit_code(code: str) -> None:
    error = from_code(code, "x", None)
    assert type(error) is not GeoRayError and error.exit_code == 13


# ------------------------------------------------------------------ what is never the best


def test_a_trial_that_diverged_is_never_first_whatever_its_score() -> None:
    rows = ordered([row(1, "diverged", 0.1), row(2, "stopped", 5.0), row(3, "ended", 1.4)])
    assert [each.status for each in rows] == ["ended", "stopped", "diverged"]
    assert tuning(*rows).best == rows[0]
    only = tuning(*ordered([row(1, "diverged", 0.1)]))
    assert only.best is None and "1 diverged" in summary_text(only)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([2.3, 2.5, 2.4], False), ([2.3, 8.0, 9.3], True), ([2.3, 1.0, None], True), ([], False)],
)
def test_a_training_loss_that_exploded_is_divergence(
    losses: list[float | None], diverged: bool
) -> None:
    watch = TrialWatch(load_tree(CONFIG, (), Experiment), None)
    for number, loss in enumerate(losses, start=1):
        for region in ("us-east", "eu-west"):
            steps = {"region": region, "step": number, "samples": 8, "loss": loss}
            watch.feed(event("step", float(number), **steps))
    assert watch.diverged is diverged


def test_asha_stops_what_is_behind_but_never_the_base() -> None:
    def scheduler(base: dict[str, Any]) -> Any:
        options = {"time_attr": "samples", "metric": "behind", "mode": "min"}
        return AshaKeepingBase(base, **options, grace_period=1, max_t=100, reduction_factor=2)

    def last_decision(scheduler: Any) -> str:
        for number, behind in enumerate([0.1, 0.2, 0.3, 9.0]):
            trial = SimpleNamespace(trial_id=str(number), config={"lr": float(number)})
            scheduler.on_trial_add(None, trial)
            told = {"samples": 1, "behind": behind}
            decision = scheduler.on_trial_result(None, trial, told)
        return str(decision)

    assert last_decision(scheduler({"lr": 7.0})) == "STOP"
    assert last_decision(scheduler({"lr": 3.0})) == "CONTINUE"


@pytest.mark.parametrize(("score", "is_written"), [(9.3, False), (0.5, True)])
def test_only_a_trial_that_beat_the_base_becomes_best_yaml(
    score: float, is_written: bool, tmp_path: Path
) -> None:
    plan = plan_of(
        {
            "base": str(CONFIG),
            "space": {"optimizer.lr": {"choice": [0.05, 0.1]}},
            "objectives": ["loss"],
        },
        out=tmp_path / "out",
    )
    base = row(1, "ended", 1.4, **{"optimizer.lr": 0.05})
    other = row(2, "ended", score, **{"optimizer.lr": 0.1})
    found = Tuning(("loss",), Goal.of(None), ordered([base, other]), base, 2)
    (tmp_path / "out").mkdir()
    result = finished(plan, SearchResult(found, None, False), "geo-ray tune")
    assert (result.best_path is not None) == (tmp_path / "out" / "best.yaml").exists() == is_written
    assert ("no trial beat the base" in summary_text(found)) is not is_written
    best = "loss 0.3333 with optimizer.lr=" + ("0.1" if is_written else "0.05")
    assert repr(result) == f"<Tuning: 2 of 2 trials; best: {best}>"


def test_the_best_is_described_by_its_objectives_and_values() -> None:
    values = {"strategy.kind": "sma", "optimizer.lr": 0.1}
    best, other = row(1, "reached", 5.0, 3.0, **values), row(2, "reached", 9.0, 4.0)
    assert best_text(tuning(best, other)) == (
        "5.0 s to target, 3 USD, loss 0.3333 with strategy.kind=sma, optimizer.lr=0.1"
    )
    short = row(3, "ended", 2 * UNREACHED, 2 * UNREACHED)
    assert best_text(tuning(short)) == "target not reached, loss 0.3333 with no value changed"
    assert best_text(tuning(row(4, "failed", FAILED))) == ""


def test_population_based_training_never_makes_the_base_a_copy_of_another_trial(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "ray.tune.schedulers.PopulationBasedTraining._exploit",
        lambda self, controller, trial, other: copied.append(trial),
    )
    scheduler = PbtKeepingBase(
        {"lr": 0.1},
        metric="behind",
        mode="min",
        hyperparam_mutations={"lr": tune.uniform(0.01, 1.0)},
    )
    base, other = SimpleNamespace(config={"lr": 0.1}), SimpleNamespace(config={"lr": 0.2})
    for trial in (base, other):
        scheduler._exploit(None, trial, other)
    assert copied == [other]
