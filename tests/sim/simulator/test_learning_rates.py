"""Steps report the learning rate that torch's own schedulers give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import geo_ray

STEPS, WARMUP, LR, LAST = 12, 4, 0.2, 0.25
LOCAL = 3  # steps of a worker between two pushes


def rates_of_torch(count: int) -> list[float]:
    """The rates of a linear warm-up and a cosine decay, by torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    warmup = LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
    decay = CosineAnnealingLR(optimizer, count - WARMUP, eta_min=LAST * LR)
    schedule = SequentialLR(optimizer, [warmup, decay], milestones=[WARMUP])
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("strategy", "local"),
    [
        ({"kind": "diloco", "interval": 4}, 1),
        ({"kind": "asgd_ga", "interval": 4}, 1),
        ({"kind": "hfa", "k1": LOCAL}, LOCAL),  # whose workers have the optimizer
    ],
)
def test_the_learning_rate_of_a_step_is_in_its_event(
    strategy: dict[str, object], local: int, tmp_path: Path
) -> None:
    schedule = {"kind": "cosine", "warmup_steps": WARMUP, "last": LAST}
    run = geo_ray.simulate(
        {
            "name": "rates",
            "task": {"use": "digits", "options": {"width": 2}},
            "data": {"generate": {}, "batch_size": 4},
            "regions": [{"name": "us"}, {"name": "eu", "workers": 2, "ps_shards": 2}],
            "strategy": strategy,
            "optimizer": {"kind": "sgd", "lr": LR, "schedule": schedule},
            "train": {"steps": STEPS},
            "run": {"dir": str(tmp_path)},
        }
    )
    rates = rates_of_torch(STEPS * local)[local - 1 :: local]
    for region, rows in (("us", 4 * local), ("eu", 8 * local)):
        # The largest rate of its workers: with a rise of the rate, none may be ahead of others.
        steps = [event for event in run.events("step") if event["region"] == region]
        assert [event["learning_rate"] for event in steps] == pytest.approx(rates)
        assert [event["samples"] for event in steps] == [rows] * STEPS
