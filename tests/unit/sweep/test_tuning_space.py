"""A search's file: what a draw sets, and that what cannot be is told before anything starts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray.tune import Experiment
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator

from geo_ray.api.tune import plan_of, tune
from geo_ray.base.errors import ClusterStartError, ConfigError, TuningDirectoryError
from geo_ray.base.load import load_tree, text_of
from geo_ray.cli.tune import tune as tune_command
from geo_ray.sweep.ray_tune import param_space, schedule_of, search_of, trial_count
from geo_ray.sweep.score import FAILED
from geo_ray.sweep.search_config import Domain, TuningConfig
from geo_ray.sweep.space import Base, Space, base_of

CONFIG = Path(__file__).parents[3] / "configs" / "four_continents.yaml"
SHIPPED = CONFIG.with_name("tune.yaml")
TARGET = "train.target={metric: loss, value: 0.2, direction: at_most}"


def file_of(space: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"base": str(CONFIG), "set": [TARGET], "space": space, **more}


def space_of(space: dict[str, Any]) -> Space:
    config = load_tree(text_of(file_of(space), Path.cwd()), (), TuningConfig)
    return Space.of(config, base_of(CONFIG, config.set))


def refused(space: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(file_of(space, **more), out="never")
    assert not Path("never").exists()
    return str(caught.value)


# ------------------------------------------------------------------ what a draw sets


def test_a_strategy_of_another_kind_loses_what_was_written_for_the_one_before() -> None:
    base = base_of(CONFIG, ())
    same = base.experiment({"strategy.kind": "asgd_ga"})
    assert same == base.experiment() and same.strategy.interval == 4
    other = base.experiment({"strategy.outer.lr": 0.4, "strategy.kind": "diloco"})
    fresh = load_tree(CONFIG, ["strategy={kind: diloco}"], type(other))
    assert other.strategy.interval == fresh.strategy.interval != 4
    assert other.strategy.outer.lr == 0.4
    assert other.strategy.outer.momentum == fresh.strategy.outer.momentum


def test_the_order_in_which_values_come_changes_nothing() -> None:
    base = base_of(CONFIG, ())
    values: dict[str, Any] = {
        "strategy.outer.lr": 0.4,
        "strategy.interval": 12,
        "strategy.kind": "diloco",
        "optimizer.lr": 0.02,
        "codec": "int8",
        "regions.eu.workers": 2,
    }
    first = base.experiment(values)
    for seed in range(10):
        items = list(values.items())
        random.Random(seed).shuffle(items)
        assert base.experiment(dict(items)) == first
    assert (first.strategy.interval, first.optimizer.lr) == (12, 0.02)


def test_regions_have_their_names_or_all_of_them() -> None:
    base = base_of(CONFIG, ())
    assert [r.workers for r in base.experiment({"regions.asia.workers": 3}).regions] == [1, 1, 3, 1]
    assert [r.workers for r in base.experiment({"regions.*.workers": 2}).regions] == [2, 2, 2, 2]
    assert [r.workers for r in base.experiment({"regions.0.workers": 2}).regions] == [2, 1, 1, 1]


def test_a_codec_is_a_word_for_both_ways_or_for_one() -> None:
    base = base_of(CONFIG, ())
    both = base.experiment({"codec": "int8"}).codec
    assert both.up is not None and both.down is not None
    assert both.up.kind == both.down.kind == "int8"
    one = base.experiment({"codec.up": "topk"}).codec
    assert one.up is not None and one.up.kind == "topk" and one.down is None
    assert base.experiment({"codec": None}).codec == base.experiment().codec


def test_conditions_keep_keys_to_the_strategies_that_have_them() -> None:
    space = space_of(
        {
            "strategy.kind": {"choice": ["sma", "diloco"]},
            "strategy.interval": [
                {"randint": [1, 4], "when": {"strategy.kind": "sma"}},
                {"randint": [8, 16], "when": {"strategy.kind": "diloco"}},
            ],
            "strategy.outer.lr": {"uniform": [0.2, 0.9], "when": {"strategy.kind": ["diloco"]}},
            "train.clip_norm": {"value": 1.0, "when": {"strategy.interval": [1, 2]}},
            "optimizer.momentum": {"value": 0.5, "when": {"data.batch_size": 16}},
        }
    )
    drawn = {"strategy.interval (1)": 2, "strategy.interval (2)": 9, "strategy.outer.lr": 0.3}
    assert space.values({"strategy.kind": "sma", **drawn}) == {
        "strategy.kind": "sma",
        "strategy.interval": 2,
        "train.clip_norm": 1.0,
        "optimizer.momentum": 0.5,
    }
    assert space.values({"strategy.kind": "diloco", **drawn}) == {
        "strategy.kind": "diloco",
        "strategy.interval": 9,
        "strategy.outer.lr": 0.3,
        "optimizer.momentum": 0.5,
    }
    assert space.check()


def test_choices_may_be_whole_sections() -> None:
    section = {"kind": "sma", "interval": 2}
    space = space_of({"strategy": {"choice": [section, {"kind": "nbsync"}]}})
    entry = space.entries[0]
    drawn = {"strategy": space.written(entry, section)}
    assert drawn == {"strategy": json.dumps(section)}
    assert space.values(drawn) == {"strategy": section}
    assert space.experiment(drawn).strategy.interval == 2


def test_the_base_is_a_draw_if_the_space_has_it() -> None:
    space = space_of(
        {
            "strategy.kind": {"choice": ["sma", "asgd_ga"]},
            "strategy.interval": {"randint": [1, 8]},
            "optimizer.lr": {"loguniform": [0.01, 0.2]},
            "codec": {"choice": [None, "int8"]},
            "regions.us.workers": {"choice": [1, 2]},
        }
    )
    drawn = space.base_draw()
    assert drawn is not None and drawn["strategy.interval"] == 4
    assert space.experiment(drawn) == space.base.experiment()
    assert space_of({"strategy.interval": {"randint": [5, 8]}}).base_draw() is None


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"strategy.intervl": {"randint": [1, 4]}}, "unknown key; did you mean interval?"),
        ({"optimiser.lr": {"uniform": [0.1, 0.2]}}, "unknown key; did you mean optimizer"),
        ({"optimizer.lr": {"uniform": [0.0, 1.0]}}, "got 0.0, expected a number greater than 0"),
        ({"strategy.kind": {"choice": ["sma", "dilocco"]}}, "did you mean diloco?"),
        ({"regions.mars.workers": {"choice": [1]}}, "regions.mars"),
        ({"strategy.interval": {"randint": [4, 1]}}, "4 is not below 1"),
        ({"optimizer.lr": {"loguniform": [0, 1]}}, "has no logarithm"),
        ({"optimizer.lr": {"unifrom": [0.1, 1]}}, "did you mean uniform?"),
        ({"optimizer.lr": {}}, "give exactly one of"),
        ({"optimizer.lr": {"choice": [0.1], "uniform": [0.1, 1.0]}}, "give exactly one of"),
        ({"optimizer.lr": {"choice": []}}, "no values to choose from"),
        ({"strategy.interval": {"randint": [1.5, 4]}}, "randint"),
        ({}, "empty"),
    ],
)
def test_wrong_keys_and_values_are_refused_with_what_was_meant(
    space: dict[str, Any], told: str
) -> None:
    assert told in refused(space)


def test_a_key_that_not_every_strategy_has_wants_a_condition() -> None:
    both = {"choice": ["sma", "nbsync"]}
    told = refused({"strategy.kind": both, "strategy.interval": {"randint": [1, 4]}})
    assert 'strategy.kind = "nbsync"' in told and "`when`" in told
    plan_of(
        file_of(
            {
                "strategy.kind": both,
                "strategy.interval": {"randint": [1, 4], "when": {"strategy.kind": "sma"}},
            }
        ),
        out="never",
    )


def test_conditions_must_lead_somewhere() -> None:
    ring = {
        "train.clip_norm": {"choice": [1.0], "when": {"optimizer.lr": 0.1}},
        "optimizer.lr": {"choice": [0.1], "when": {"train.clip_norm": 1.0}},
    }
    assert "form a cycle" in refused(ring)
    lost = {"optimizer.lr": {"choice": [0.1], "when": {"strategy.kind": "sma"}}}
    kinds = {"strategy.kind": {"choice": ["asgd_ga"]}}
    assert "'sma' is not in the space of strategy.kind" in refused({**kinds, **lost})
    none = {"optimizer.lr": {"choice": [0.1], "when": {"strategy.kin": "sma"}}}
    assert "neither the space nor the base has strategy.kin" in refused(none)


def test_two_domains_of_one_key_must_not_hold_together() -> None:
    twice = [{"choice": [0.1]}, {"choice": [0.2]}]
    assert "two of its domains apply" in refused({"optimizer.lr": twice})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"objectives": ["usd"]}, "required by the objective usd"),
        ({"objectives": []}, "at least one"),
        ({"objectives": ["loss", "loss"]}, "without duplicates"),
        ({"objectives": ["time_to_traget"]}, "did you mean time_to_target?"),
        ({"set": []}, "requires train.target in the base"),
        ({"set": [TARGET, "train.eval_every=0"]}, "trials are compared by evaluations"),
        ({"schedule": {"kind": "pbt"}}, "pbt requires real trials"),
        ({"trials": {"seeds": [1, 1]}}, "without duplicates"),
        ({"serach": {"trials": 3}}, "did you mean search?"),
        (
            {"objectives": ["usd"], "prices": {"worker_usd_per_h": {"us": 1.0}}},
            "region asia, australia, eu has no price",
        ),
        (
            {"search": {"kind": "hyperopt"}, "objectives": ["time_to_target", "loss"]},
            "hyperopt supports one objective",
        ),
    ],
)
def test_what_does_not_go_together_is_told(more: dict[str, Any], told: str) -> None:
    assert told in refused({"optimizer.lr": {"uniform": [0.1, 0.2]}}, **more)


def test_a_grid_is_for_random_searches() -> None:
    grid = {"optimizer.lr": {"grid": [0.1, 0.2]}}
    assert "takes no grid" in refused(grid, search={"kind": "optuna"})
    conditional = {"optimizer.lr": {"grid": [0.1], "when": {"strategy.kind": "sma"}}}
    assert "takes no `when`" in refused(conditional)


def test_a_base_that_chooses_by_itself_is_refused() -> None:
    told = refused(
        {"optimizer.lr": {"uniform": [0.1, 0.2]}}, base=str(CONFIG.with_name("auto.yaml"))
    )
    assert "auto" in told


def test_the_shipped_search_is_whole() -> None:
    plan = plan_of(SHIPPED, out="never")
    assert plan.config.search.trials == 12 and len(plan.tried) > 10
    assert plan.space.base_draw() is not None, "the base is its first trial"


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        ({"randint": [1, 4]}, [1, 4], [0, 5, 2.5, "1", True, None]),
        ({"uniform": [0.5, 1.0]}, [0.5, 1, 0.75], [0.4, "0.75"]),
        ({"choice": ["a", None, {"kind": "b"}]}, ["a", None, {"kind": "b"}], ["b", 0]),
        ({"value": None}, [None], [0, "x"]),
    ],
)
def test_a_domain_knows_its_values(domain: Any, inside: list[Any], outside: list[Any]) -> None:
    made = Domain.model_validate_json(json.dumps(domain))
    assert all(made.holds(each) for each in inside)
    assert not any(made.holds(each) for each in outside)


def test_a_base_travels_as_plain_text() -> None:
    base = base_of(CONFIG, (TARGET,))
    assert Base(base.text, base.parent, base.name, base.changes).experiment() == base.experiment()


# ------------------------------------------------------------------ searches, without a cluster


@pytest.mark.parametrize("kind", ["optuna", "hyperopt"])
def test_searches_begin_with_the_base_stay_in_the_space_and_learn_from_failures(kind: str) -> None:
    space = {
        "optimizer.lr": {"loguniform": [0.01, 0.2]},
        "strategy.interval": {"randint": [1, 8]},
        "codec": {"choice": [None, "int8", {"up": {"kind": "topk"}}]},
    }
    search = {"kind": kind, "trials": 12, "seed": 1}
    plan = plan_of(file_of(space, search=search), out="never")
    found = search_of(plan.config, plan.space, 1)
    assert isinstance(found, Searcher)
    found.set_search_properties(None, None, param_space(plan.space))
    drawn = []
    for number in range(12):
        draw = found.suggest(f"trial{number}")
        assert isinstance(draw, dict)
        drawn.append(draw)
        values = plan.space.values(draw)
        assert all(plan.config.space[key][0].holds(value) for key, value in values.items())
        score = FAILED if number % 3 == 2 else 1.0 + number
        found.on_trial_complete(f"trial{number}", {"score_time_to_target": score})
    assert plan.space.experiment(drawn[0]) == plan.space.base.experiment()
    assert len({json.dumps(draw, sort_keys=True) for draw in drawn}) > 6


def test_a_random_search_has_the_same_draws_for_the_same_seed() -> None:
    space = {"optimizer.lr": {"loguniform": [0.01, 0.2]}, "strategy.interval": {"grid": [1, 2, 3]}}
    plan = plan_of(file_of(space, search={"trials": 2, "base_first": False}), out="never")
    assert trial_count(plan.config, plan.space) == 6
    drawn = []
    for _ in range(2):
        variants = BasicVariantGenerator(random_state=plan.config.search.seed)
        variants.add_configurations(
            [Experiment("x", lambda config: None, config=param_space(plan.space), num_samples=2)]
        )
        drawn.append([variants.next_trial().config for _ in range(6)])
    assert drawn[0] == drawn[1]
    assert [draw["strategy.interval"] for draw in drawn[0]] == [1, 2, 3, 1, 2, 3]


def test_asha_looks_at_what_the_first_objective_is_counted_in() -> None:
    for objective, attribute in (("time_to_target", "time_s"), ("loss", "samples")):
        more = {"schedule": {"kind": "asha", "grace": 2.5}, "objectives": [objective]}
        plan = plan_of(file_of({"optimizer.lr": {"uniform": [0.1, 0.2]}}, **more), out="never")
        scheduler: Any = schedule_of(plan.config, plan.space)
        assert isinstance(scheduler, ASHAScheduler)
        assert scheduler._time_attr == attribute and scheduler.metric == "behind"


# ------------------------------------------------------------------ before Ray is started


def test_errors_of_the_cluster_name_the_keys_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix = "Wait longer: `--set cluster.kind=local --set cluster.start_timeout_s=300`."
    log = "raylet.log: cluster.start"

    def refuse(*_: object, **__: object) -> None:
        raise ClusterStartError(
            f"the local cluster was not up (cluster.start_timeout_s):\n{log}", fix=fix
        )

    monkeypatch.setattr("geo_ray.sweep.ray_tune.connect", refuse)
    with pytest.raises(ClusterStartError) as caught:
        tune(file_of({"strategy.interval": {"randint": [1, 8]}}), out=tmp_path / "out")
    assert caught.value.message == (
        f"the local cluster was not up (trials.cluster.start_timeout_s):\n{log}"
    )
    assert caught.value.fix == (
        "Wait longer: `--set trials.cluster.kind=local --set trials.cluster.start_timeout_s=300`."
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("--resume",), ("--resume", "--out", "there"), ()])
def test_a_wrong_directory_is_reported_before_ray_is_loaded(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search = file_of({"strategy.interval": {"randint": [1, 8]}}, name="mine")
    Path("search.json").write_text(json.dumps(search))
    if not words:
        Path("runs", "tune-mine").mkdir(parents=True)

    def loading(*modules: str) -> None:
        assert "ray" not in modules

    monkeypatch.setattr("geo_ray.cli.paths.loading", loading)
    done = CliRunner().invoke(tune_command, ["search.json", *words])
    assert isinstance(done.exception, TuningDirectoryError), done.exception
