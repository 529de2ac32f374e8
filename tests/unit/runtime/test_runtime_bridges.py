"""Which bridges hold nothing that another one would lack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.process_watch import is_replaceable
from geo_ray.training.membership import AveragerLeader

HOME, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
WITH_STANDBY = {"averager": {"standby": STANDBY}}
LAGGING = {
    "averager": {"standby": STANDBY, "max_divergence": 0.5},
    "strategy": {"kind": "asgd_ga"},
}
MOVED = AveragerLeader(STANDBY, 2)


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
    ("sections", "leader", "standby", "replaceable"),
    [
        ({}, AveragerLeader(HOME), None, {STANDBY, THIRD}),
        (WITH_STANDBY, AveragerLeader(HOME), STANDBY, {HOME, STANDBY, THIRD}),
        (WITH_STANDBY, AveragerLeader(HOME), None, {STANDBY, THIRD}),
        (LAGGING, AveragerLeader(HOME), STANDBY, {STANDBY, THIRD}),
        (WITH_STANDBY, MOVED, THIRD, {HOME, STANDBY, THIRD}),
        (WITH_STANDBY, MOVED, None, {HOME, THIRD}),
        ({"overlay": {"kind": "ring"}}, AveragerLeader(HOME), None, set()),
        ({"transfers": {}}, AveragerLeader(HOME), None, set()),
        ({"codec": {"up": {"kind": "dgt"}}}, AveragerLeader(HOME), None, set()),
        ({"codec": {"up": {"kind": "topk"}}}, AveragerLeader(HOME), None, {STANDBY, THIRD}),
    ],
)
def test_a_bridge_with_state_is_not_replaceable(
    sections: dict[str, Any], leader: AveragerLeader, standby: str | None, replaceable: set[str]
) -> None:
    if "transfers" in sections or "codec" in sections:
        sections = {"strategy": {"kind": "asgd_ga"}} | sections
    asked = experiment(**sections)
    names = (HOME, STANDBY, THIRD)
    assert {n for n in names if is_replaceable(asked, n, leader, standby)} == replaceable
