"""Steps report the learning rate that torch's own schedulers give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import geo_ray

STEPS, WARMUP, LR, LAST = 12, 4, 0.2, 0.25


def rates_of_torch() -> list[float]:
    """The rates of a linear warm-up and a cosine decay, by torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    warmup = LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
    decay = CosineAnnealingLR(optimizer, STEPS - WARMUP, eta_min=LAST * LR)
    schedule = SequentialLR(optimizer, [warmup, decay], milestones=[WARMUP])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("strategy", ["diloco", "asgd_ga"])
def test_the_learning_rate_of_a_step_is_in_its_event(strategy: str, tmp_path: Path) -> None:
    schedule = {"kind": "cosine", "warmup_steps": WARMUP, "last": LAST}
    run = geo_ray.simulate(
        {
            "name": "rates",
            "task": {"use": "digits", "options": {"width": 2}},
            "data": {"generate": {}, "batch_size": 4},
            "regions": [{"name": "us"}, {"name": "eu", "workers": 2, "ps_shards": 2}],
            "strategy": {"kind": strategy, "interval": 4},
            "optimizer": {"kind": "sgd", "lr": LR, "schedule": schedule},
            "train": {"steps": STEPS},
            "run": {"dir": str(tmp_path)},
        }
    )
    for region, rows in (("us", 4), ("eu", 8)):
        steps = [event for event in run.events("step") if event["region"] == region]
        assert [event["learning_rate"] for event in steps] == pytest.approx(rates_of_torch())
        assert [event["samples"] for event in steps] == [rows] * STEPS
