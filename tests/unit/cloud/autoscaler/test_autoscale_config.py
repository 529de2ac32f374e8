"""Values that would disable a documented rule of the autoscaler are rejected, with their keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_text
from geo_ray.experiment.autoscale import AutoscaleConfig


def read(**keys: Any) -> AutoscaleConfig:
    return AutoscaleConfig.model_validate_json(json.dumps(keys, allow_nan=False))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"start_s": 10.0}, "`every_s` .* longer than `start_s`"),
        ({"drain_s": 0.0}, "`every_s` .* longer than `drain_s`"),
        ({"calm": {"idle_s": 0.0}}, r"`every_s` .* longer than `calm\.idle_s`"),
        ({"calm": {"dwell_s": 0.0}}, r"`every_s` .* longer than `calm\.dwell_s`"),
        ({"calm": {"horizon_s": 180.0}}, r"`start_s` .* not shorter than `calm\.horizon_s`"),
        ({"retry": {"first_s": 5.0}}, r"`every_s` .* longer than `retry\.first_s`"),
        ({"retry": {"longest_s": 30.0}}, r"`retry\.first_s` .* longer than `retry\.longest_s`"),
        ({"retry": {"resend_s": 5.0}}, r"`every_s` .* longer than `retry\.resend_s`"),
        ({"retry": {"resend_s": 300.0}}, r"not shorter than `retry\.give_up_s`"),
        ({"retry": {"missing_s": 15.0}}, r"`every_s` .* not shorter than `retry\.missing_s`"),
        ({"retry": {"missing_s": 301.0}}, r"`retry\.missing_s` .* longer than `retry\.give_up_s`"),
        ({"retry": {"join_s": 180.0}}, r"`start_s` .* not shorter than `retry\.join_s`"),
        ({"life_h": 630 / 3600}, r"`life_h` .* not longer than .* above 0\.175"),
        ({"every_s": 0.0}, "every_s"),
        ({"most_speed": 0.9}, "most_speed"),
        ({"preemption_weight_h": 0.0}, "preemption_weight_h"),
        ({"life_h": -1.0}, "life_h"),
        ({"calm": {"horizon_s": 0.0}}, "horizon_s"),
        ({"calm": {"least_gain": 1.0}}, "least_gain"),
        ({"calm": {"least_gain": -0.1}}, "least_gain"),
        ({"zones": {"us": []}}, "lists no zone"),
        ({"zones": {"us": [""]}}, "lists no zone"),
        ({"zones": {"us": ["a", "b", "a"]}}, "a is listed more than once"),
        ({"machine_resources": {"small": {}}}, "machine_resources.small"),
        ({"machine_resources": {"small": {"CPU": 0.0}}}, "machine_resources.small.CPU"),
        ({"machine_resources": {"small": {"CPU": -8.0}}}, "machine_resources.small.CPU"),
    ],
)
def test_a_value_that_makes_a_rule_empty_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){says}"):
        read(**keys)


def test_the_least_that_is_allowed_is_allowed() -> None:
    """Each bound from the other side: the smallest allowed values are accepted."""
    found = read(
        every_s=15.0,
        start_s=15.0,
        drain_s=15.0,
        life_h=(15 + 15 + 30 + 30 + 1) / 3600,
        calm={"dwell_s": 15.0, "idle_s": 15.0, "horizon_s": 16.0, "least_gain": 0.0},
        retry={
            "first_s": 15.0,
            "longest_s": 15.0,
            "resend_s": 15.0,
            "give_up_s": 30.0,
            "join_s": 16.0,
            "missing_s": 16.0,
        },
    )
    assert found.lead_s == 60.0


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", ["every_s", "life_h", "preemption_weight_h", "most_speed"])
def test_what_is_no_number_is_refused(key: str, value: str) -> None:
    with pytest.raises(ValidationError, match="finite"):
        AutoscaleConfig.model_validate({key: float(value)})


def test_all_that_is_wrong_is_said_at_once_with_what_to_set() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("{every_s: 100, drain_s: 50}", (), AutoscaleConfig, "it.yaml")
    told = str(caught.value)
    assert "set `every_s` to at most 50, or `drain_s` to at least 100" in told
    assert "set `every_s` to at most 60, or `retry.first_s` to at least 100" in told
    assert "it.yaml" in told
