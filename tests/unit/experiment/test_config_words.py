"""Every message about a configuration is in plain words: no patterns, none of the validator's own.

The tests walk the whole schema: each place of it is reached by a tree that is right but for one
value there, so that no key can be added whose message nobody has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from geo_ray.base.errors import ConfigError, PriceBookError
from geo_ray.base.explain import accepts, limits_of
from geo_ray.base.load import checked, load_text
from geo_ray.base.model import (
    MessageWords,
    Place,
    alternatives,
    is_optional,
    is_own,
    item_places,
    kinds_of,
    opened,
)
from geo_ray.base.yaml import parse_yaml
from geo_ray.experiment.experiment import AutoConfig, Experiment
from geo_ray.lab.topology import Topology
from geo_ray.prices.price_book import PriceBook, load_book

NOT_PLAIN = re.compile(
    r"Input should|String should|Value error|Field required|Extra inputs|should match|value_error"
    r"|union_tag|type=|input_value|pydantic|[\^$]|\\d|\[A-Z|\{0,"
)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True)
class Spot:
    """A place in a schema, and a tree in which a value can be put there."""

    keys: tuple[str | int, ...]
    place: Place
    tree: dict[str, Any]

    def holding(self, value: Any) -> str:
        """The tree with a value at the place, one key on each line."""
        tree = json.loads(json.dumps(self.tree))
        node: Any = tree
        for key in self.keys[:-1]:
            node = node[key]
        if isinstance(node, list):
            node[int(self.keys[-1])] = value
        else:
            node[self.keys[-1]] = value
        tree = json.loads(json.dumps(tree))  # nothing twice: YAML would write an alias
        return yaml.dump(tree, Dumper=DUMPER, sort_keys=False, width=10_000)

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.keys))


# ------------------------------------------------------------------ trees that reach every place


def example(place: Place) -> Any:
    """A value of the right type there; rules between keys do not matter, they are asked later."""
    place = opened(place)
    option = alternatives(place)[0] if alternatives(place) else None
    if option is None:
        return None
    if option.words:
        return option.words[0]
    if option.model is not None:
        key, kinds = kinds_of(place)
        return minimal(option.model) | ({key: kinds[0]} if key else {})
    kind, items = item_places(option)
    if kind == "mapping":
        return {"us": example(items[0])}
    if kind == "items":
        return [example(item) for item in items]
    if kind == "list":
        return [example(items[0])] * max(1, limits_of(option).get("min_length", 1))
    limits = limits_of(option)
    low = limits.get("ge", limits.get("gt", 0))
    if option.type is bool:
        return True
    if option.type is int:
        return max(low, limits.get("multiple_of", 0)) + ("gt" in limits)
    if option.type is float:
        return min(low + 0.5, limits.get("le", 9e9), limits.get("lt", 9e9) - 0.1)
    return "us" if option.type is str else "2026-01-31T12:00:00Z"


def minimal(model: type[BaseModel]) -> dict[str, Any]:
    """The keys of a section that must be there."""
    return {
        name: "EUR" if name == "currency" else example(Place.of(info))
        for name, info in model.model_fields.items()
        if info.is_required()
    }


def spots(
    model: type[BaseModel], tree: dict[str, Any], keys: tuple[str | int, ...], at: dict[str, Any]
) -> Iterator[Spot]:
    """Every place below a section; ``at`` is the section inside of ``tree``."""
    for name, info in model.model_fields.items():
        yield from spots_at(Place.of(info), tree, (*keys, name), at)


def spots_at(
    place: Place, tree: dict[str, Any], keys: tuple[str | int, ...], holder: Any
) -> Iterator[Spot]:
    before = holder.get(keys[-1], PydanticUndefined) if isinstance(holder, dict) else None
    is_given = isinstance(holder, list) or before is not PydanticUndefined
    holder[keys[-1]] = example(place)
    yield Spot(keys, place, json.loads(json.dumps(tree)))
    key, kinds = kinds_of(place)
    options = [option for option in alternatives(place) if not is_own(option)]
    for number, option in enumerate(options):
        if option.model is not None and option.model is not AutoConfig:
            holder[keys[-1]] = minimal(option.model) | ({key: kinds[number]} if key else {})
            yield from spots(option.model, tree, keys, holder[keys[-1]])
        kind, items = item_places(option)
        if kind:
            names: list[str | int] = ["us"] if kind == "mapping" else list(range(len(items)))
            for inner, item in zip(names, items, strict=True):
                holder[keys[-1]] = example(option)
                yield from spots_at(item, tree, (*keys, inner), holder[keys[-1]])
    if not is_given:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = example(place) if before in (None, PydanticUndefined) else before


def every_spot(root: type[BaseModel]) -> list[Spot]:
    tree = minimal(root)
    return list(spots(root, tree, (), tree))


# ------------------------------------------------------------------ values that are wrong there


def wrong_values(spot: Spot) -> list[Any]:
    """A value of each wrong type, and one beyond each limit."""
    options = alternatives(spot.place)
    types = {option.type for option in options}
    held = {item_places(option)[0] for option in options}
    is_section = any(option.model is not None for option in options)
    found: list[Any] = [] if is_optional(spot.place) else [None]
    if not types & {int, float}:
        found.append(17.25)
    if str not in types:
        found.append("no such thing")
    if bool not in types and not any(1 in option.words for option in options):
        found.append(True)  # which equals 1
    if not held & {"list", "items"}:
        found.append([["x"]])
    if not is_section and "mapping" not in held:
        found.append({"no_such_key": 1})
    for option in options:
        for name, limit in limits_of(option).items():
            found += beyond(name, limit, is_list=bool(item_places(option)[0]))
        if any(isinstance(rule, MessageWords) for rule in option.rules):
            found += ["a b", "", "(x)*"]
        if option.type is int and float not in types:
            found.append(2.5)
    return found


def beyond(name: str, limit: Any, *, is_list: bool) -> list[Any]:
    match name:
        case "gt" | "lt":
            return [limit]
        case "ge":
            return [limit - 1]
        case "le" | "multiple_of":
            return [limit + 1]
        case "min_length":
            return [[]] if is_list else [""]
        case _:
            return [] if is_list else ["x" * (limit + 1)]


def check(message: str, spot: Spot, value: Any, text: str) -> None:
    said = f"{spot.dotted}: {value!r}\n{message}"
    # what the user wrote is repeated as it is; the rest is ours
    assert not NOT_PLAIN.search(message.replace(json.dumps(value, ensure_ascii=False), "")), said
    found = re.search(rf"(?:    |[:;] ){re.escape(spot.dotted)}[\w.]* \(line (\d+)\): .", message)
    assert found, said
    begins = rf"[\s-]*'?{spot.keys[-1]}'?:" if isinstance(spot.keys[-1], str) else r"[\s-]*- "
    assert re.match(begins, text.splitlines()[int(found[1]) - 1]), f"{said}\n{text}"


ROOTS: dict[str, type[BaseModel]] = {"experiment": Experiment, "lab": Topology}
PLACES = {name: every_spot(root) for name, root in ROOTS.items()} | {
    "prices": every_spot(PriceBook)
}


def complaint(root: type[BaseModel], text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(text, [], root, "job.yaml")
    return caught.value.message


@pytest.mark.parametrize("name", ROOTS)
def test_every_wrong_value_anywhere_is_told_in_plain_words(name: str) -> None:
    count = 0
    for spot in PLACES[name]:
        for value in wrong_values(spot):
            text = spot.holding(value)
            check(complaint(ROOTS[name], text), spot, value, text)
            count += 1
    assert count > 3 * len(PLACES[name]) > 300


def test_files_of_prices_are_told_of_in_the_same_words(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    for spot in PLACES["prices"]:
        for value in wrong_values(spot):
            file.write_text(spot.holding(value))
            with pytest.raises(PriceBookError) as caught:
                load_book(file)
            if "more" not in caught.value.message:  # only the first complaints are given
                check(caught.value.message, spot, value, file.read_text())


@pytest.mark.parametrize("name", ROOTS)
def test_unknown_kinds_list_all_kinds_and_the_nearest(name: str) -> None:
    unions = [spot for spot in PLACES[name] if kinds_of(spot.place)[0]]
    assert len(unions) >= 2
    for spot in unions:
        key, kinds = kinds_of(spot.place)
        message = complaint(ROOTS[name], spot.holding({key: kinds[-1] + "x"}))
        assert not NOT_PLAIN.search(message)
        assert f"{spot.dotted}.{key} (line " in message
        assert f"expected one of {', '.join(kinds)}; did you mean {kinds[-1]}?" in message
        nothing = complaint(ROOTS[name], spot.holding({}))
        assert f"the key {key} is missing; it is one of {', '.join(kinds)}" in nothing


@pytest.mark.parametrize("name", ROOTS)
def test_unknown_and_missing_keys_of_every_section(name: str) -> None:
    sections = [
        (spot, option.model)
        for spot in PLACES[name]
        for option in alternatives(spot.place)
        if option.model not in (None, AutoConfig) and not is_own(option)
    ]
    assert len(sections) > 10
    for spot, model in sections:
        assert model is not None
        key, kinds = kinds_of(spot.place)
        whole = minimal(model)
        if key:
            models = [option.model for option in alternatives(spot.place)]
            whole |= {key: kinds[models.index(model)]}
        near = max(model.model_fields, key=len)
        message = complaint(ROOTS[name], spot.holding({**whole, f"{near}z": 1}))
        assert not NOT_PLAIN.search(message)
        assert re.search(
            rf"{re.escape(spot.dotted)}\.{near}z \(line \d+\): unknown key; did you mean", message
        )
        for absent in [k for k in minimal(model) if k != key]:
            left = {k: v for k, v in whole.items() if k != absent}
            message = complaint(ROOTS[name], spot.holding(left))
            assert not NOT_PLAIN.search(message)
            where = rf"{re.escape(spot.dotted)}\.{absent} \(line \d+\)"
            assert re.search(rf"{where}: missing; a value is required: .", message)


def test_every_pattern_has_words() -> None:
    places = [option for each in PLACES.values() for s in each for option in alternatives(s.place)]
    with_pattern = [p for p in places if "pattern=" in repr(p.rules)]
    assert len(with_pattern) > 5
    for place in with_pattern:
        assert not NOT_PLAIN.search(accepts(place)) and "text" not in accepts(place)


# ------------------------------------------------------------------ single messages

TEXT = """
name: trial
task: {use: digits}
data: {generate: {}}
regions:
  - {name: eu, workers: 2}
  - {name: us}
strategy: {kind: sma}
optimizer: {kind: sgd}
train: {steps: 10}
"""


def said_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(TEXT, overrides, Experiment, "t")
    return caught.value.message


def test_an_unknown_strategy_lists_auto_among_the_kinds() -> None:
    message = said_of("strategy.kind=outo")
    assert "demo, auto; did you mean auto?" in message
    tree = parse_yaml("strategy:\n  kind: auto\n  loss_budget: 3\n", "job.yaml")
    with pytest.raises(ConfigError) as caught:
        checked(tree, AutoConfig, "job.yaml", "strategy")
    assert (
        "strategy.loss_budget (line 3): got 3, expected a number greater than 0 and less than 1"
        in caught.value.message
    )


def test_auto_is_refused_with_the_reason_where_nobody_replaces_it() -> None:
    message = said_of("strategy={kind: auto}")
    assert 'strategy.kind (overrides): got "auto", which only `geo-ray train`' in message
    assert message.endswith("sparseloco, demo")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ('train.steps="100"', "100"),
        ("train.steps=100.0", "100"),
        ("train.steps=1e3", "1000"),
        ("optimizer.lr='.5'", "0.5"),
        ("cluster={kind: local, dashboard: yes}", "true"),
        ("cluster={kind: local, dashboard: off}", "false"),
        ("name=17", '"17"'),
        ("regions.0.batch_sizes=16", "[16]"),
        ("train.mode=Async", "async"),
        ("transport.tls=of", "off"),
    ],
)
def test_the_value_that_was_meant_is_named(override: str, meant: str) -> None:
    assert f"did you mean {meant}?" in said_of(override)


def test_a_section_that_an_override_began_says_what_it_lacks_and_where() -> None:
    message = said_of("cluster.dashboard=true")
    assert "cluster (overrides): the key kind is missing; it is one of local, existing" in message


def test_a_section_without_kind_is_told_of_use_where_a_class_of_ones_own_is_possible() -> None:
    use = "or use a custom class with `use: path/to/file.py:Class`"
    assert use in said_of("strategy={interval: 4}")
    assert use in said_of("codec.up={ratio: 0.1}")
    assert use not in said_of("optimizer={lr: 0.1}")


def test_no_value_is_proposed_that_would_be_refused_too() -> None:
    assert "did you mean" not in said_of('train.steps="0"')
    assert "did you mean" not in said_of("train.steps=2.5")
    assert "did you mean" not in said_of("optimizer.lr='fast'")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["averager.region=us-east"],
            r'averager.region \(overrides\): got "us-east", no region',
        ),
        (["averager.region=uss"], r"regions are eu, us; did you mean us\?"),
        (["train.mode=async"], r'train.mode \(overrides\): got "async", async gives regions'),
        (
            ["strategy={kind: sparseloco}"],
            r"    codec.up: strategy 'sparseloco' requires a codec",
        ),
        (
            ["regions.0.batch_sizes=[8]"],
            r"regions.0.batch_sizes \(overrides\): 1 entries for 2 workers",
        ),
        (
            ["emulate.step_s_by_region.moon=1"],
            r"step_s_by_region.moon \(overrides\): got 1, no region 'moon'",
        ),
        (
            ["averager.max_divergence=1.5"],
            r"averager.max_divergence \(overrides\): got 1.5, requires a standby",
        ),
        (["regions.1.name=eu"], r"    regions \(line 5\): eu is listed more than once"),
        (
            ["strategy={kind: diloco_streaming, tau: 9}"],
            r"strategy.tau \(overrides\): got 9, it must be below interval / 4 exchanges = 8",
        ),
        (
            ["emulate={link: {outages: [[2, 1]]}}"],
            r"emulate.link.outages \(overrides\): 2 to 1 s ends",
        ),
    ],
)
def test_rules_between_keys_name_the_key_and_where_it_is(overrides: list[str], line: str) -> None:
    message = said_of(*overrides)
    assert re.search(line, message), message
    assert not NOT_PLAIN.search(message)


def test_names_of_copies_that_would_be_too_long_are_told_in_words() -> None:
    message = said_of(f"regions.0.name={'x' * 62}", "regions.0.copies=10")
    assert "choose a name of at most 61 characters" in message
    assert not NOT_PLAIN.search(message)


def test_a_space_that_is_missing_after_a_colon_is_asked_for() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("name: t\nregions: [{name:us-east}, {name: eu}]\n", (), Experiment, "t")
    assert "unknown key; write a space after the colon of name" in caught.value.message
