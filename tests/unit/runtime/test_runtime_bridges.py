"""Which bridges hold nothing that another one would lack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.process_watch import is_replaceable
from geo_ray.training.membership import AveragerHome

HOME, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
WITH_STANDBY = {"averager": {"standby": STANDBY}}
LAGGING = {
    "averager": {"standby": STANDBY, "max_divergence": 0.5},
    "strategy": {"kind": "asgd_ga"},
}
MOVED = AveragerHome(STANDBY, 2)


def experiment(**sections: Any) -> Experiment:
    tree: dict[str, Any] = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}, "batch_size": 8},
        "regions": [{"name": name} for name in (HOME, STANDBY, THIRD)],
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"steps": 6},
    }
    return Experiment.model_validate_json(json.dumps(tree | sections))


@pytest.mark.parametrize(
    ("sections", "home", "standby", "replaceable"),
    [
        ({}, AveragerHome(HOME), None, {STANDBY, THIRD}),
        (WITH_STANDBY, AveragerHome(HOME), STANDBY, {HOME, STANDBY, THIRD}),
        (WITH_STANDBY, AveragerHome(HOME), None, {STANDBY, THIRD}),
        (LAGGING, AveragerHome(HOME), STANDBY, {STANDBY, THIRD}),
        (WITH_STANDBY, MOVED, THIRD, {HOME, STANDBY, THIRD}),
        (WITH_STANDBY, MOVED, None, {HOME, THIRD}),
        ({"overlay": {"kind": "ring"}}, AveragerHome(HOME), None, set()),
        ({"transfers": {}}, AveragerHome(HOME), None, set()),
        ({"codec": {"up": {"kind": "dgt"}}}, AveragerHome(HOME), None, set()),
        ({"codec": {"up": {"kind": "topk"}}}, AveragerHome(HOME), None, {STANDBY, THIRD}),
    ],
)
def test_what_a_bridge_keeps_decides(
    sections: dict[str, Any], home: AveragerHome, standby: str | None, replaceable: set[str]
) -> None:
    if "transfers" in sections or "codec" in sections:
        sections = {"strategy": {"kind": "asgd_ga"}} | sections
    asked = experiment(**sections)
    names = (HOME, STANDBY, THIRD)
    assert {n for n in names if is_replaceable(asked, n, home, standby)} == replaceable
