"""How exact the last exchange is, by the strategy and the key; and what the planner makes of it."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.planner.loss import last_bits
from geo_ray.runs.build import last_errors, wire_plan
from tests.support.job_support import experiment


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bsp", (0.03, 0.03)),
        ("sma", (0.03, 0.03)),
        ("one_step_delay", (0.03, 0.03)),
        ("asgd_ga", (1e-4, 1e-4)),
        ("async_local_sgd", (1e-4, 1e-4)),
        ("ama", (1e-4, 0.0)),  # each region's answer is about one model: equal to the bit
    ],
)
def test_by_how_regions_are_answered(kind: str, expected: tuple[float, float]) -> None:
    assert last_errors(experiment(f"strategy={{kind: {kind}}}")) == expected
    full = experiment(f"strategy={{kind: {kind}}}", "codec.last_error=0")
    assert last_errors(full) == (0.0, 0.0)


def test_the_key_is_a_share() -> None:
    assert last_errors(experiment("codec.last_error=0.2")) == (0.2, 0.2)
    for wrong in ("1", "-0.1"):
        with pytest.raises(ConfigError, match="last_error"):
            experiment(f"codec.last_error={wrong}")


@pytest.mark.parametrize(
    ("codec", "owes"),
    [("{}", False), ("{up: {kind: identity}}", False), ("{up: {kind: int8}}", True)],
)
def test_who_owes_ends_with_the_last_round(codec: str, owes: bool) -> None:
    assert wire_plan(experiment(f"codec={codec}")).owes is owes
    own_books = experiment("strategy={kind: bsp}", "codec={up: {kind: bisparse}}")
    assert not wire_plan(own_books).owes


def test_the_planner_has_the_bits_of_the_page() -> None:
    """The table of docs/design/planner-model.md."""
    rows = {
        None: ((32, 32), (32, 32)),
        "fp16": ((16, 16), (16.25, 16.25)),
        "int8": ((8.125, 8.125), (16.25, 16.25)),
        "int4": ((8.125, 8.125), (16.25, 16.25)),
        "chunked_topk": ((8.125, 32), (16.25, 32)),
    }
    for codec, (in_rounds, one_by_one) in rows.items():
        assert last_bits(codec, (0.03, 0.03)) == in_rounds
        assert last_bits(codec, (1e-4, 1e-4)) == one_by_one
        assert last_bits(codec, (0.0, 0.0)) == (32, 32)
