"""The page of custom strategies has examples that run; its reference describes every field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from geo_ray.codecs.base import CodecTraits
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import (
    AveragerTraits,
    ExchangeTraits,
    RegionTraits,
    RoundMean,
    Traits,
)

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
        RoundMean,
        CodecTraits,
    ],
)
def test_every_field_is_described_where_the_page_shows_it(record: type) -> None:
    assert f"\n::: {record.__module__}.{record.__name__}\n" in PAGE
    text = (record.__doc__ or "").partition("Attributes:\n")[2]
    described = re.findall(r"^        (\w+): \S", text, re.M)
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(record))


@pytest.mark.parametrize("value", ["always", "when_late", "never", "rest", "change", "model"])
def test_values_of_traits_are_explained(value: str) -> None:
    assert f'`"{value}"`' in PAGE
