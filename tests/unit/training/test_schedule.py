"""Warm-up and decay of the learning rate: against torch, over a resume, in a worker's own steps."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from geo_ray.base.types import Span
from geo_ray.data.tasks.digits import Digits
from geo_ray.strategies.sma import Sma
from geo_ray.training.optimizers import AdamW, InnerOptimizer, Momentum, RateSchedule, Sgd, lasting
from geo_ray.training.parameters import read_parameters
from geo_ray.training.shard import Contribution, Shard
from geo_ray.training.worker import LocalStepsWorker, Worker

WARM = RateSchedule(warmup_steps=4, steps=14, last=0.2)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_rates_are_those_of_torch(kind):
    param = torch.nn.Parameter(torch.zeros(3))
    plain = torch.optim.SGD([param], lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of its own call of step(epoch)
        decay = {
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(plain, 10, eta_min=0.1),
            "linear": lambda: torch.optim.lr_scheduler.LinearLR(plain, 1.0, 0.2, 10),
            "constant": lambda: torch.optim.lr_scheduler.ConstantLR(plain, 1.0),
        }[kind]()
        warm = torch.optim.lr_scheduler.LinearLR(plain, 0.25, total_iters=3)
        both = torch.optim.lr_scheduler.SequentialLR(plain, [warm, decay], [4])
        rates = []
        for _ in range(14):
            rates.append(plain.param_groups[0]["lr"])
            plain.step()
            both.step()
    ours = WARM.model_copy(update={"kind": kind})
    assert [0.5 * ours.factor(t) for t in range(14)] == pytest.approx(rates)


def test_after_its_end_the_last_share_stays():
    assert WARM.factor(14) == WARM.factor(1000) == pytest.approx(0.2)
    assert RateSchedule(steps=1, last=0.0).factor(0) == 1.0


def test_a_schedule_without_a_length_gets_that_of_the_run():
    assert lasting(Sgd(), 5).schedule is None
    assert lasting(Sgd(schedule=RateSchedule()), 5).schedule == RateSchedule(steps=5)
    assert lasting(Sgd(schedule=WARM), 5).schedule == WARM
    with pytest.raises(ValueError, match="without steps"):
        RateSchedule().factor(0)


@pytest.mark.parametrize("kind", [Sgd, Momentum, AdamW])
def test_a_resumed_optimizer_goes_on_where_it_was(kind):
    config, grads = kind(schedule=WARM), [torch.randn(4) for _ in range(10)]
    whole_S, first_S = torch.ones(4), torch.ones(4)
    whole, first = InnerOptimizer(config, whole_S), InnerOptimizer(config, first_S)
    for grad_S in grads:
        whole.apply(grad_S)
    for grad_S in grads[:6]:
        first.apply(grad_S)
    second_S = first_S.clone()
    second = InnerOptimizer(config, second_S)
    second.restore(first.export())
    for grad_S in grads[6:]:
        second.apply(grad_S)
    assert torch.equal(whole_S, second_S)


def test_a_shard_saves_where_its_schedule_is():
    shard = Shard(torch.ones(4), Sgd(lr=1.0, schedule=WARM), Sma(interval=100))
    for _ in range(3):
        shard.put(0, torch.ones(4))
        shard.apply([Contribution(0, 8)])
    assert torch.allclose(shard.params_S, torch.tensor(1 - 0.25 - 0.5 - 0.75))
    assert int(shard.export()[0]["optimizer/schedule_steps"]) == 3


def local_change(span: Span, version: int, region_rows: int | None) -> torch.Tensor:
    """What a new worker pushes after ``version`` steps of its region: two batches of 4 rows."""
    task = Digits(Digits.Options(width=2))
    train, start_P = task.dataset(0).train, read_parameters(task.model(0))
    worker = Worker(task, start_P.clone(), torch.zeros_like(start_P), region="a", seed=0)
    optimizer = Sgd(lr=1e-3, schedule=WARM)
    local = LocalStepsWorker(worker, optimizer, 2, region_rows=region_rows)
    columns = {n: np.concatenate([column[:4], column[:4]]) for n, column in train.items()}
    local.on_work(version)
    local.step(columns, span)
    return local.grad_P.clone()


def test_the_schedule_of_a_worker_counts_the_steps_of_its_region():
    """A replaced worker has no memory, and its pushes must not start the warm-up again."""
    norms = [float(local_change(Span(0, 8), version, None).norm()) for version in (0, 1, 2)]
    assert norms[0] < norms[1] < norms[2]
    assert norms[0] / norms[2] == pytest.approx((0.25 + 0.5) / 2, rel=0.03)
    # Its rows do not matter: there may have been more workers before, or fewer.
    assert torch.equal(local_change(Span(48, 8), 1, None), local_change(Span(16, 8), 1, None))


def test_without_steps_of_the_region_the_schedule_of_a_worker_counts_rows():
    """In mode async a region's version counts the pushes of each worker."""
    # Pushes of 2 batches of 4 rows from each of two workers: rows 32 to 40 are batches 4 and 5.
    spans = [Span(start, 8) for start in (0, 16, 32)]
    norms = [float(local_change(span, 7, 8).norm()) for span in spans]
    assert norms[0] < norms[1] < norms[2]
    # The second worker of a push is as far as the first.
    assert torch.equal(local_change(Span(24, 8), 3, 8), local_change(Span(16, 8), 2, 8))
