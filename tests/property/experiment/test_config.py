"""Properties of configuration reading that must hold for any input."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from geo_ray.base.canonical import JSONValue, canonical_json
from geo_ray.base.errors import ConfigError
from geo_ray.base.load import diff, digest, dump_yaml, load_text, load_tree
from geo_ray.base.model import StrictModel
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.yaml import YamlTree, parse_yaml, write_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
TRICKY = st.sampled_from(
    ["no", "null", "~", "1e3", "0x1", "1_0", ".nan", "- a", "a: b", "#", "", " ", "%", "@", "<<"]
)


def json_values() -> st.SearchStrategy[JSONValue]:
    scalars: st.SearchStrategy[Any] = st.none() | st.booleans() | NUMBERS | TEXT | TRICKY
    keys = TEXT | TRICKY
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


class Leaf(StrictModel):
    kind: Literal["leaf"] = "leaf"
    size: int = 0


class Node(StrictModel):
    kind: Literal["node"] = "node"
    rate: float = 0.5
    name: str | None = None


class Root(StrictModel):
    steps: int = 1
    extra: dict[str, Annotated[Leaf | Node, Field(discriminator="kind")]] = Field(
        default_factory=dict
    )
    many: tuple[Leaf, ...] = ()
    pair: tuple[float, str] = (0.0, "")
    flag: bool = False


NODES = st.builds(Node, rate=st.floats(-1e300, 1e300), name=st.none() | TEXT | TRICKY)
LEAVES = st.builds(Leaf, size=st.integers(-(2**60), 2**60))
ROOTS = st.builds(
    Root,
    steps=st.integers(-(2**60), 2**60),
    extra=st.dictionaries(TEXT | TRICKY, LEAVES | NODES, max_size=4),
    many=st.lists(LEAVES, max_size=3).map(tuple),
    pair=st.tuples(st.floats(-1e10, 1e10), TEXT),
    flag=st.booleans(),
)


@given(json_values())
def test_written_yaml_reads_back_the_same(value: JSONValue) -> None:
    again = parse_yaml(write_yaml(value), "t").value
    assert canonical_json(again) == canonical_json(value)


@given(ROOTS)
def test_dump_then_load_is_the_identity(tree: Root) -> None:
    again = load_text(dump_yaml(tree), [], Root, "t")
    assert again == tree
    assert digest(again) == digest(tree)
    assert diff(again, tree) == []


@given(ROOTS, ROOTS)
def test_digest_and_diff_agree_on_equality(a: Root, b: Root) -> None:
    assert (digest(a) == digest(b)) == (diff(a, b) == [])


@given(ROOTS, st.randoms(use_true_random=False))
def test_digest_does_not_depend_on_key_order(tree: Root, random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(shuffled(tree.model_dump(mode="json")))
    assert digest(Root.model_validate_json(text)) == digest(tree)


@given(json_values())
def test_any_tree_loads_or_is_a_config_error(value: JSONValue) -> None:
    only_config_errors(lambda: load_text(write_yaml(value), [], Root, "t"))


@given(st.dictionaries(st.sampled_from(sorted(Root.model_fields)), json_values()))
def test_any_values_at_known_keys_load_or_are_a_config_error(value: JSONValue) -> None:
    only_config_errors(lambda: load_text(write_yaml(value), [], Root, "t"))


@given(st.binary(max_size=200))
def test_any_bytes_load_or_are_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "garbage.yaml"
    file.write_bytes(data)
    only_config_errors(lambda: load_tree(file, [], Root))


@settings(max_examples=300)
@given(st.text("{}[]:,-&*!|>'\"%@`#?\\ \n\tabx01.=~<", max_size=40))
def test_any_yaml_like_text_loads_or_is_a_config_error(text: str) -> None:
    only_config_errors(lambda: load_text(text, [], Root, "t"))


@given(st.text(st.characters(), max_size=30))
def test_any_override_applies_or_is_a_config_error(text: str) -> None:
    only_config_errors(lambda: load_text("{}", [text], Root, "t"))
    only_config_errors(lambda: load_text("{}", [f"extra.{text}"], Root, "t"))


@given(json_values(), st.lists(st.text(string.ascii_letters, min_size=1), min_size=1, max_size=3))
def test_an_override_puts_exactly_its_value(value: JSONValue, path: list[str]) -> None:
    tree = apply_overrides(YamlTree({}), [f"{'.'.join(path)}={json.dumps(value)}"]).value
    for key in path:
        assert isinstance(tree, dict)
        tree = tree[key]
    assert canonical_json(tree) == canonical_json(value)


def only_config_errors(action: Callable[[], object]) -> None:
    try:
        action()
    except ConfigError as error:
        assert error.message
