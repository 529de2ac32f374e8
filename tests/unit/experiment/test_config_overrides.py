"""``--set key.key=value``."""

from __future__ import annotations

import pickle

import pytest

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError
from geo_ray.base.overrides import CALLED, OptionText, applied_keys, apply_overrides
from geo_ray.base.yaml import YamlTree, parse_yaml

TREE = "{a: {b: 1, c: [{d: 1}, {d: 2}]}, e: null, f: text, r: [{name: us}, {name: eu}]}"


def changed(*overrides: str) -> JSONValue:
    return apply_overrides(parse_yaml(TREE, "t"), overrides).value


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a.b=2", ["a", "b"], 2),
        ("a.b= 2 ", ["a", "b"], 2),
        ("a.b=1e-3", ["a", "b"], 0.001),
        ("a.b=x=y", ["a", "b"], "x=y"),
        ("a.b=", ["a", "b"], None),
        ("a.b='2'", ["a", "b"], "2"),
        ("a.b=[1, {x: 2}]", ["a", "b"], [1, {"x": 2}]),
        ("a.c.1.d=9", ["a", "c", 1, "d"], 9),
        ("a.c=[]", ["a", "c"], []),
        ("e.x.y=1", ["e", "x", "y"], 1),
        ("new.x=1", ["new", "x"], 1),
        ('a."m5.large"=1', ["a", "m5.large"], 1),
        ('"x=y".z=1', ["x=y", "z"], 1),
    ],
)
def test_a_value_is_put_at_its_key(override: str, path: list[str | int], value: object) -> None:
    node = changed(override)
    for key in path:
        node = node[key]  # type: ignore[index, call-overload]
    assert node == value


def test_later_overrides_win_and_the_original_stays() -> None:
    tree = parse_yaml(TREE, "t")
    before = parse_yaml(TREE, "t").value
    assert apply_overrides(tree, ["a.b=2", "a.b=3"]).value != before
    assert tree.value == before


def test_origins_name_the_command_line() -> None:
    tree = apply_overrides(parse_yaml(TREE, "t"), ["a.c=[{d: 1}]"])
    assert tree.origins["a", "c", 0, "d"] == "overrides"
    assert ("a", "c", 1) not in tree.origins
    assert tree.origins["a", "b"] == "line 1"
    tree = apply_overrides(parse_yaml(TREE, "t"), ["a.c.1.d=3"])
    assert tree.origins["a", "c", 1, "d"] == "overrides"


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("a", "key.key=value"),
        ("=1", "key.key=value"),
        ("a..b=1", "key.key=value"),
        (".a=1", "key.key=value"),
        ("a.=1", "key.key=value"),
        ('"a=1', "key.key=value"),
        ('"a"b=1', "key.key=value"),
        ("", "key.key=value"),
        ("a.c.2.d=1", "not an item of a list of 2"),
        ("a.c.x=1", "not an item of a list of 2"),
        ("a.c.-1=1", "not an item of a list of 2"),
        ("r.eu.n=1", "eu is not an item of a list of 2; eu is item 1"),
        (f"a.c.{'9' * 5000}=1", "not an item of a list of 2"),
        ("f.x=1", "has no keys"),
        ("a.b=x: y", "a block"),
        ("a.b=- 1", "a block"),
        ("a.b=[1", "not valid YAML"),
        ("a.b=.inf", "finite"),
        ("a.b=*x", "anchors"),
    ],
)
def test_wrong_overrides_are_refused_by_name(override: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(override)
    assert word in str(caught.value)
    assert f"overrides: {override}" in str(caught.value)


def test_an_empty_file_takes_overrides() -> None:
    assert apply_overrides(YamlTree({}), ["a.b=1"]).value == {"a": {"b": 1}}


def test_messages_call_them_as_their_giver_does() -> None:
    tree = parse_yaml("a: 1", "x.yaml")
    with pytest.raises(ConfigError) as library:
        apply_overrides(tree, ["a"])
    called = CALLED.set("--set")
    try:
        with pytest.raises(ConfigError) as command_line:
            apply_overrides(tree, ["a"])
        origins = apply_overrides(tree, ["a=2"]).origins
    finally:
        CALLED.reset(called)
    assert "--set" not in str(library.value) and "overrides: a: not of" in str(library.value)
    assert "--set a: not of" in str(command_line.value) and origins["a",] == "--set"
    assert apply_overrides(tree, ["a=2"]).origins["a",] == "overrides"


def test_what_was_written_for_another_kind_is_told() -> None:
    text = "strategy: {kind: sma,\n interval: 4, weights: uniform}\noptimizer: {kind: sgd}\n"
    tree = parse_yaml(text, "x.yaml")
    (note,) = applied_keys(tree, ["strategy.kind=diloco", "strategy.weights=samples"])
    assert note == ("strategy is diloco now, and keeps the keys of sma: interval: 4 (line 2)")
    own = ["strategy.kind=null", "strategy.use=own.py:Mine"]
    assert applied_keys(tree, ["strategy={kind: diloco}"]) == []  # a section of its own
    assert applied_keys(tree, ["strategy.interval=8"]) == []
    assert applied_keys(tree, ["strategy.kind=sma"]) == []
    assert applied_keys(tree, ["optimizer.kind=adamw"]) == []  # there is nothing to keep
    assert "keeps the keys of sma" in applied_keys(tree, own)[0]


def test_an_override_keeps_the_option_that_it_stands_for_in_another_process() -> None:
    given = OptionText("strategy.interval=[", ("strategies", "sma:interval=["))
    again = pickle.loads(pickle.dumps(given))
    assert again == given and again.option == given.option
    with pytest.raises(ConfigError, match=r"strategies: sma:interval=\[, line 1: not valid YAML"):
        apply_overrides(parse_yaml("{}", "x"), [again])


def test_an_empty_value_has_come_from_its_override() -> None:
    changed = apply_overrides(parse_yaml("strategy: {kind: sma}", "x"), ["strategy.kind="])
    assert changed.value == {"strategy": {"kind": None}}
    assert changed.origins["strategy", "kind"] == "overrides"
