"""The examples of own training loops that need nothing but PyTorch; test_own_loop_trainers.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geo_ray
from examples.own_loop import distributed, plain, titan_style
from geo_ray.base.errors import LoopMisuseError
from tests.support.join_support import (
    Ranks,
    call_without_group,
    diloco_of_batches,
    serving,
    terms,
    train_all,
)
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS, INTERVAL, LR, MOMENTUM = 12, 4, 0.7, 0.9
OUTER = {"kind": "nesterov", "lr": LR, "momentum": MOMENTUM}
DILOCO = {"kind": "diloco", "interval": INTERVAL, "weights": "uniform", "outer": OUTER}
oracle = partial(diloco_of_batches, interval=INTERVAL, lr=LR, momentum=MOMENTUM)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def test_a_plain_loop_is_diloco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: plain.new_model() for name in REGIONS}
    copies = {name: plain.new_model() for name in REGIONS}
    waiting = list(models.values())
    monkeypatch.setattr(plain, "new_model", lambda: waiting.pop())
    seen: dict[int, list[Tensor]] = {id(model): [] for model in models.values()}
    for model in models.values():
        model.register_forward_pre_hook(lambda m, args: seen[id(m)].append(args[0].clone()))
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (server, address):
        found = train_all(
            {
                name: partial(plain.train, address, name, str(tmp_path / f"{name}.pem"))
                for name in REGIONS
            }
        )
        assert torch.equal(found["eu"], server.service.model_P)
        assert torch.equal(found["us"], server.service.model_P)
    losses = {
        name: [[partial(_loss, x)] for x in seen[id(model)]] for name, model in models.items()
    }
    torch.testing.assert_close(found["eu"], oracle(copies, losses), rtol=0, atol=1e-6)


def _loss(x: Tensor, model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_regions_with_torchrun(
    sharding: str, ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """Region eu has 2 or 4 processes, and region us one."""
    pool = four_ranks if sharding == "hsdp" else ranks
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (server, address):
        eu, us = (str(tmp_path / f"{name}.pem") for name in REGIONS)
        pool.start(call_without_group, distributed.train, address, "eu", eu, sharding)
        alone = train_all({"us": partial(plain.train, address, "us", us)}).get("us")
        check_equal([*pool.results(), alone], server.service.model_P)


def test_a_trainer_class(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks with FSDP2 equal one process that accumulates the batches of both."""
    with serving(terms(("eu",), STEPS, strategy=DILOCO), tmp_path) as (server, address):
        arguments = address, "eu", str(tmp_path / "eu.pem")
        ranks.start(call_without_group, titan_style.train, *arguments)
        found = ranks.results()
        check_equal(found, server.service.model_P)
        samples = [event["samples"] for event in server.news() if event["kind"] == "step"]
    assert samples == [2 * 4 * 3 * INTERVAL] * (STEPS // INTERVAL)  # of both ranks
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), titan_style.Block(16), titan_style.Block(16), nn.Linear(16, 2)
    )
    generators = [
        torch.Generator().manual_seed(100 * sum(map(ord, "eu")) + rank) for rank in range(2)
    ]
    batches = [
        [partial(_loss, torch.randn(4, 8, generator=each)) for _ in range(3) for each in generators]
        for _ in range(STEPS)
    ]
    expected = oracle(
        {"eu": model},
        {"eu": batches},
        clip=1.0,
        schedule=lambda step: min((step + 1) / 4, 1 - step / STEPS),
    )
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(None, "ended after 1 of 12 steps"), (ValueError("a bug"), "ValueError: a bug")],
)
def test_a_training_without_a_block(error: Exception | None, cause: str, tmp_path: Path) -> None:
    """If `finish` is never called, the region's block ends the training, and the server knows."""
    with serving(terms(("eu",), STEPS, strategy=DILOCO), tmp_path) as (server, address):
        with (
            pytest.raises(LoopMisuseError if error is None else ValueError),
            geo_ray.join(address, region="eu", credentials=tmp_path / "eu.pem") as site,
        ):
            sync = site.begin(plain.new_model())
            assert (sync.total_steps, sync.remaining_steps) == (STEPS, STEPS)
            sync.step(rows=1)
            assert (sync.total_steps, sync.remaining_steps) == (STEPS, STEPS - 1)
            if error is not None:
                raise error
        eventually(lambda: server.service.failure is not None, "the server knows")
        assert cause in str(server.service.failure)


def check_equal(found: list[Any], expected: Tensor) -> None:
    """Check that all ranks have the model of the server."""
    for each in found:
        assert isinstance(each, Tensor), each
        assert torch.equal(each, expected)
