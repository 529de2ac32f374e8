"""What of transfers and standby a configuration may ask for, and what it is told if it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.exchange.build import averager_lives_in, dials

NAMES = ("us-east", "eu-west", "ap-south")
GA = {"kind": "asgd_ga"}


def experiment(**changes: Any) -> Experiment:
    tree: dict[str, Any] = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": [{"name": name} for name in NAMES],
        "strategy": GA,
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "train": {"steps": 2},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))


def test_neither_is_there_unless_asked_for() -> None:
    plain = experiment()
    assert plain.transfers is None and plain.averager.standby is None
    assert dials(plain) == []
    assert [name for name in NAMES if averager_lives_in(plain, name)] == ["us-east"]


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga", "ama"])
def test_turns_are_for_asynchronous_strategies(kind: str) -> None:
    assert experiment(strategy={"kind": kind}, transfers={}).transfers is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": {"kind": "sma"}, "transfers": {}}, "overlay"),
        ({"strategy": {"kind": "bsp"}, "transfers": {}}, "rounds"),
        ({"transfers": {"max_staleness": 0}}, "greater than or equal to 1"),
        ({"strategy": {"kind": "ama"}, "transfers": {"max_staleness": 4}}, "max_staleness"),
        ({"strategy": {"kind": "ama"}, "transfers": {"aggregate": True}}, "do not add up"),
        ({"codec": {"up": {"kind": "fp16"}}, "transfers": {"aggregate": True}}, "coded"),
        ({"codec": {"down": {"kind": "fp16"}}, "transfers": {"aggregate": True}}, "coded"),
        ({"codec": {"up": {"kind": "dgt"}}, "transfers": {}}, "dgt"),
        ({"transfers": {"order": "longest_first"}}, "order"),
        ({"transfers": {"aggregate": True}, "averager": {"standby": "eu-west"}}, "sums"),
        ({"averager": {"standby": "mars"}}, "averager.standby: no region 'mars'"),
        ({"averager": {"standby": "us-east"}}, "hosts the averager itself"),
        ({"averager": {"max_divergence": 1.0}}, "requires a standby"),
        ({"averager": {"standby": "eu-west", "max_divergence": -1.0}}, "greater than"),
        (
            {
                "strategy": {"kind": "sma"},
                "averager": {"standby": "eu-west", "max_divergence": 1.0},
            },
            "leave it at 0",
        ),
        ({"codec": {"up": {"kind": "dgt"}}, "averager": {"standby": "eu-west"}}, "dgt"),
        (
            {
                "strategy": {"kind": "sma"},
                "overlay": {"kind": "ring"},
                "averager": {"standby": "eu-west"},
            },
            "star",
        ),
    ],
)
def test_impossible_values_are_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        experiment(**changes)


def test_the_pairs_of_dialing_bridges() -> None:
    """Everybody dials the averager's region anyway; here is what comes on top, each pair once."""
    kept = experiment(averager={"standby": "eu-west"})
    assert dials(kept) == [("eu-west", "ap-south")]  # the averager may move anywhere
    assert [name for name in NAMES if averager_lives_in(kept, name)] == ["us-east", "eu-west"]
    summed = experiment(transfers={"aggregate": True})
    assert dials(summed) == [("eu-west", "ap-south")]
    assert dials(experiment(transfers={})) == []
