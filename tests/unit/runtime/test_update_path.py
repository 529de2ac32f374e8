"""Which path updates take, for every configuration; and that no message has two handlers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.exchange.build import COMBINE, PathChoice, choose_path
from geo_ray.runtime.exchange.direct import UpdateStage, joined
from geo_ray.runtime.exchange.standby import KINDS

DGT = {"up": {"kind": "dgt"}}
STANDBY = {"standby": "eu-west"}


def experiment(**changes: Any) -> Experiment:
    tree: dict[str, Any] = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": [{"name": name} for name in ("us-east", "eu-west", "ap-south")],
        "strategy": {"kind": "asgd_ga"},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "train": {"steps": 2},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))


@pytest.mark.parametrize(
    ("changes", "path", "stage"),
    [
        ({}, "direct", "plain"),
        ({"codec": {"up": {"kind": "fp16"}}}, "direct", "plain"),
        ({"transfers": {}}, "direct", "transfers"),
        ({"codec": DGT}, "direct", "differential"),
        ({"averager": STANDBY}, "standby", "plain"),
        ({"averager": STANDBY, "transfers": {}}, "standby", "transfers"),
        ({"strategy": {"kind": "sma"}, "overlay": {"kind": "ring"}}, "overlay", "plain"),
    ],
)
def test_an_experiment_has_one_path(changes: dict[str, Any], path: Any, stage: Any) -> None:
    assert choose_path(experiment(**changes)) == PathChoice(path, stage)


@pytest.mark.parametrize(
    ("sections", "stages"),
    [
        (("averager", "codec"), "differential"),
        (("overlay", "codec"), "differential"),
        (("overlay", "transfers"), "transfers"),
        (("transfers", "codec"), "differential"),
    ],
)
def test_unsupported_combinations_have_no_path(sections: tuple[str, ...], stages: str) -> None:
    """The configuration refuses it before; here the parts are put together behind its back."""
    parts = {
        "averager": experiment(averager=STANDBY).averager,
        "codec": experiment(codec=DGT).codec,
        "transfers": experiment(transfers={}).transfers,
        "overlay": experiment(strategy={"kind": "sma"}, overlay={"kind": "ring"}).overlay,
    }
    asked = experiment().model_copy(update={name: parts[name] for name in sections})
    with pytest.raises(InvariantError, match=stages):
        choose_path(asked)


def test_the_table_has_every_path_with_the_plain_stage() -> None:
    assert set(COMBINE) == {"direct", "standby", "overlay"}
    assert all("plain" in stages for stages in COMBINE.values())


def test_messages_of_one_kind_have_one_handler() -> None:
    def route(peer: str, message: object) -> None:
        raise AssertionError(f"{peer} sent {message}")

    standby = dict.fromkeys(KINDS, route)
    assert joined(standby, UpdateStage().routes()) == standby
    with pytest.raises(InvariantError, match="reply"):
        joined({"reply": route, "ask": route}, standby)
