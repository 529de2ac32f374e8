"""``geo-ray config schema KEY``: one key and what lies under it."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.describe import describe_key
from geo_ray.base.errors import ConfigError
from geo_ray.base.model import every_field
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.strategies.registry import STRATEGIES


def schema(*words: str) -> Result:
    return CliRunner().invoke(root, ["config", "schema", *words])


def shown(key: str) -> list[str]:
    return describe_key(Experiment, key).splitlines()


def paths(key: str) -> list[str]:
    """The keys that are printed, without what is said of them."""
    return [re.split(r": ", line)[0] for line in shown(key) if not line.startswith(" ")]


def test_a_key_has_its_type_limits_default_and_meaning() -> None:
    assert shown("train.steps") == [
        "train.steps: int (>= 1, <= 1000000000000), required",
        "    steps of every region; with mode async, pushes per worker",
    ]
    assert shown("train.clip_norm")[0] == "train.clip_norm: float | null (> 0), default: null"
    assert shown("plan.batch_sizes")[0].startswith("plan.batch_sizes: list of int (>= 1) | null (")
    assert "1 to 63 letters" in shown("name")[0]


def test_a_section_comes_with_all_its_keys_and_no_others() -> None:
    found = paths("train")
    assert found[0] == "train" and "train.target.metric" in found
    assert all(path == "train" or path.startswith("train.") for path in found)
    every = {re.sub(r"\(.*?\)", "", path) for path, _ in every_field(Experiment)}
    assert {re.sub(r"\(.*?\)", "", path) for path in found} >= {
        path for path in every if path.startswith("train.")
    }


def test_a_kind_has_its_own_keys() -> None:
    found = paths("strategy.diloco")
    assert found[0] == "strategy(kind=diloco)"
    assert "strategy(kind=diloco).interval" in found
    assert not [path for path in found if "diloco_" in path or "bsp" in path]
    assert shown("strategy.diloco")[1].startswith("    DiLoCo: many local steps")


def test_a_key_of_several_kinds_is_shared_by_those_that_say_the_same() -> None:
    lines = shown("strategy.interval")
    said = [line for line in lines if not line.startswith(" ")]
    kinds = re.findall(r"\w+", " ".join(re.findall(r"kind=([\w, ]+)\)", " ".join(said))))
    assert sorted(kinds) == sorted(
        kind for kind, model in STRATEGIES.items() if "interval" in model.model_fields
    )
    assert len(said) < len(kinds)
    assert "strategy(kind=fedavg, fedat, fedgsync).interval: int (>= 1), default: 8" in said


def test_the_kinds_are_listed_with_what_they_are() -> None:
    lines = shown("strategy.kind")
    assert lines[0].startswith('strategy.kind: "bsp" | "asgd" | ')
    assert '| "auto", required' in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == [*STRATEGIES, "auto"]
    assert shown("strategy.auto.loss_budget")[0].endswith("float (> 0, < 1), default: 0.02")


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("strategy(kind=diloco).outer(kind=adam).lr", "strategy(kind=diloco).outer(kind=adam).lr"),
        ("strategy.diloco.outer.adam.lr", "strategy(kind=diloco).outer(kind=adam).lr"),
        ("regions.workers", "regions.<n>.workers"),
        ("regions.0.workers", "regions.<n>.workers"),
        ("regions.<n>.workers", "regions.<n>.workers"),
        ("plan.regions.us.cloud", "plan.regions.<name>.cloud"),
        ("plan.regions.cloud", "plan.regions.<name>.cloud"),
        ("plan.regions.us.machines.0.cap", "plan.regions.<name>.machines.<n>.cap"),
        ("emulate.links.1.src", "emulate.links.<n>.src"),
        ("emulate.step_s_by_region.us", "emulate.step_s_by_region"),
        ('emulate.step_s_by_region."us.east"', "emulate.step_s_by_region"),
        ("task.options.width", "task.options"),
        ("cluster.existing.address", "cluster(kind=existing).address"),
    ],
)
def test_ways_to_write_a_key(key: str, found: str) -> None:
    assert paths(key) == [found]


def test_every_key_that_the_whole_list_has_is_found_as_it_is_printed() -> None:
    for path, _ in every_field(Experiment):
        assert paths(path)[0] == path


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("steps", "train.steps"),
        ("train.stpes", "train.steps"),
        ("trian.steps", "train.steps"),
        ("strategy.dilco", "strategy.diloco"),
        ("strategy.diloco.intervall", "strategy.diloco.interval"),
        ("regions.0.wrokers", "regions.workers"),
        ("train.steps.more", "train.steps"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_key(Experiment, key)
    assert f"no key '{key}'" in caught.value.message
    assert caught.value.fix == f"Did you mean `geo-ray config schema {near}`?"
    assert describe_key(Experiment, near)


@pytest.mark.parametrize("key", ["", ".", "zzzz", "=", '"'])
def test_what_is_like_no_key_is_sent_to_the_list(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_key(Experiment, key)
    assert caught.value.fix == "`geo-ray config schema` lists every key."


def test_the_command_line() -> None:
    assert schema("train.steps").output == "\n".join(shown("train.steps")) + "\n"
    whole, one = schema(), schema("codec")
    assert one.output.count("\n") < whole.output.count("\n") / 3
    assert "strategy(kind=auto).loss_budget" in whole.output
    assert isinstance(schema("trian").exception, ConfigError)
    both = schema("train", "--json")
    assert both.exit_code == 2 and "omit KEY" in both.output


def test_editors_know_auto_too() -> None:
    written = json.loads(schema("--json").output)["properties"]["strategy"]
    kinds, auto = written["anyOf"]
    built_in, own = kinds["oneOf"]
    assert set(built_in["discriminator"]["mapping"]) == set(STRATEGIES)
    assert "$ref" in own or own["required"] == ["use"]
    assert auto["properties"]["kind"]["const"] == "auto"
