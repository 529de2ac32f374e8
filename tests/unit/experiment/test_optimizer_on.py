"""Where `train.optimizer_on: worker` has an effect, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geo_ray.base.errors import ConfigError
from geo_ray.training.worker import Worker
from tests.support.world_support import experiment


def configured(
    *, workers: tuple[int, ...] = (1, 1), strategy: str | dict[str, Any] = "diloco", **train: Any
) -> Any:
    regions = [{"name": name, "workers": n} for name, n in zip("abcd", workers, strict=False)]
    return experiment(
        regions=regions,
        strategy={"kind": strategy} if isinstance(strategy, str) else strategy,
        train={"steps": 4, "optimizer_on": "worker"} | train,
    )


def test_it_has_an_effect_in_all_regions() -> None:
    found = configured(workers=(1, 2), state_every=7)
    assert [found.state_every(region) for region in found.regions] == [7, 7]
    assert [found.elastic(region) is None for region in found.regions] == [True, False]
    servers = configured(optimizer_on="server")
    assert [servers.state_every(region) for region in servers.regions] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strategy": "bsp"}, "does more with a gradient"),
        ({"workers": (2,)}, "the workers of one region exchange gradients"),
        ({"workers": (1, 2), "clip_mean_norm": 1.0}, "no mean gradient"),
        ({"mode": "async", "strategy": "asgd_ga"}, "mode async"),
        ({"elastic": {}}, "train.elastic"),
        (
            {"stragglers": {"kind": "backup_workers"}, "workers": (2, 2)},
            "train.stragglers",
        ),
    ],
)
def test_what_needs_gradients_at_the_server_is_refused(changes: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        configured(**changes)
    assert "train.optimizer_on" in caught.value.message


def test_all_that_needs_gradients_at_the_server_is_reported_at_once() -> None:
    stragglers = {"kind": "backup_workers"}
    with pytest.raises(ConfigError) as caught:
        configured(
            strategy="bsp",
            workers=(2, 2),
            elastic={"min_workers": 3},
            stragglers=stragglers,
            mode="async",
            clip_mean_norm=1.0,
        )
    for text in (
        "with train.elastic a step",
        "with train.stragglers a step",
        "train.mode async sends every gradient",
        "'bsp' does more with a gradient",
        "have no mean gradient",
        "requires train.mode sync",
        "no region has more than 2 workers",
    ):
        assert text in caught.value.message


@pytest.mark.parametrize("strategy", ["hfa", "halos"])
def test_strategies_with_local_steps_of_workers_have_the_optimizer_there(strategy: str) -> None:
    found = configured(strategy=strategy, workers=(2, 2))
    assert found.worker_steps > 0 and [found.state_every(each) for each in found.regions] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [100, 100]),
        ({"strategy": "sma"}, [100, 100]),
        ({"workers": (1, 2)}, [100, 0]),
        ({"workers": (1,), "strategy": "bsp"}, [100]),
        ({"workers": (2,)}, [0]),
        ({"strategy": "bsp"}, [0, 0]),
        ({"strategy": {"kind": "sma", "interval": 1}}, [0, 0]),
        ({"strategy": {"kind": "sma", "interval": 2}}, [100, 100]),
        ({"strategy": "ama"}, [0, 0]),
        ({"strategy": "diloco_streaming"}, [0, 0]),
        ({"strategy": "hfa"}, [0, 0]),
        ({"elastic": {}}, [0, 0]),
        ({"strategy": "asgd_ga", "mode": "async"}, [0, 0]),
        ({"stragglers": {"kind": "backup_workers"}, "workers": (2, 2)}, [0, 0]),
    ],
)
def test_auto_is_the_worker_where_results_are_the_same(changes: Any, expected: Any) -> None:
    found = configured(**{"optimizer_on": "auto"} | changes)
    assert [found.state_every(region) for region in found.regions] == expected


def test_one_region_needs_no_strategy() -> None:
    found = configured(workers=(1,), strategy="bsp")
    assert found.state_every(found.regions[0]) == 100


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 1)])
def test_a_gpu_seeds_its_own_generator(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    worker = object.__new__(Worker)
    worker._device = torch.device(device)
    assert worker.rng_devices() == [index]
