"""The page of custom strategies has examples that run; its reference names every field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from geo_ray.codecs.base import CodecTraits
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "custom-strategies.md").read_text()
PAGE = (ROOT / "docs" / "reference" / "strategy-interface.md").read_text()


@pytest.mark.parametrize("name", ["own_strategy.py", "own_codec.py"])
def test_the_page_has_the_examples_which_tests_run(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert (ROOT / "examples" / name).read_text() in blocks


@pytest.mark.parametrize(
    "record",
    [
        RegionState,
        AveragerState,
        Update,
        Reply,
        Outgoing,
        Traits,
        ExchangeTraits,
        RegionTraits,
        AveragerTraits,
        CodecTraits,
    ],
)
def test_every_field_is_named(record: type) -> None:
    assert f"`{record.__name__}" in PAGE
    fields = [field.name for field in dataclasses.fields(record)]
    known = re.findall(r"`[^`\n]+`", PAGE)
    words = {word for each in known for word in re.findall(r"\w+", each)}
    assert [name for name in fields if name not in words] == []


@pytest.mark.parametrize("value", ["always", "when_late", "never", "rest", "change", "model"])
def test_values_of_traits_are_explained(value: str) -> None:
    assert f'`"{value}"`' in PAGE
