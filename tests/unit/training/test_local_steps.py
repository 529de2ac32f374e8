"""A worker that trains by itself between two pushes, and one that pushes a combination."""

from __future__ import annotations

import pytest
import torch

from geo_ray.base.types import CodedPartition, Span
from geo_ray.data.tasks.digits import Digits
from geo_ray.strategies.decoupled import combined
from geo_ray.training.optimizers import Momentum, Sgd
from geo_ray.training.parameters import read_parameters
from geo_ray.training.worker import LocalStepsWorker, StepResult, Worker, coded_step

TASK = Digits(Digits.Options(width=2))
TRAIN = TASK.dataset(0).train
START_P = read_parameters(TASK.model(0))


def rows(span: Span) -> dict:
    return {name: column[span.start : span.stop] for name, column in TRAIN.items()}


def worker() -> Worker:
    return Worker(TASK, START_P.clone(), torch.zeros_like(START_P), region="a", seed=0)


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1), Momentum(lr=0.05)], ids=lambda o: o.kind)
def test_a_push_is_what_the_steps_changed_and_the_parameters_are_as_before(optimizer):
    local = LocalStepsWorker(worker(), optimizer, 3)
    plain = torch.nn.Parameter(START_P.clone())
    momentum = getattr(optimizer, "momentum", 0.0)
    torch_optimizer = torch.optim.SGD([plain], lr=optimizer.lr, momentum=momentum)
    for first in (0, 12):
        held_P = local.params_P.clone()
        result = local.step(rows(Span(first, 12)), Span(first, 12))
        assert torch.equal(local.params_P, held_P)
        before_P = plain.detach().clone()
        losses = []
        for i in range(3):
            one, span = worker(), Span(first + 4 * i, 4)
            one.params_P.copy_(plain.detach())
            losses.append(one.step(rows(span), span).loss)
            plain.grad = one.grad_P.clone()
            torch_optimizer.step()
        torch.testing.assert_close(local.grad_P, before_P - plain.detach(), rtol=0, atol=1e-6)
        assert result.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
        local.params_P.sub_(local.grad_P)  # as the parameter server would


def test_a_step_that_must_not_be_used_spoils_the_push_and_changes_nothing():
    class Sometimes(Worker):
        def step(self, columns, span):
            good = span.start < 8
            return super().step(columns, span) if good else StepResult(None, "loss_not_finite")

    inner = Sometimes(TASK, START_P.clone(), torch.zeros_like(START_P), region="a", seed=0)
    result = LocalStepsWorker(inner, Sgd(lr=0.1), 3).step(rows(Span(0, 12)), Span(0, 12))
    assert result.loss is None and result.refused == "loss_not_finite"
    assert torch.equal(inner.params_P, START_P)


def test_a_coded_push_is_the_weighted_sum_of_its_parts_gradients():
    parts = (CodedPartition(Span(0, 4), 2.0), CodedPartition(Span(8, 4), -0.5))
    grads, losses = [], []
    for part in parts:
        one = worker()
        losses.append(one.step(rows(part.span), part.span).loss)
        grads.append(one.grad_P.clone())
    both = worker()
    result = coded_step(both, parts, Span(8, 4), rows)
    torch.testing.assert_close(both.grad_P, 2.0 * grads[0] - 0.5 * grads[1])
    assert result.loss == losses[1], "the loss of the worker's own rows"


def test_the_mean_by_direction_keeps_the_length_of_orthogonal_changes():
    a_P, b_P = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    plain_P = combined([a_P, b_P], [1, 1], by_direction=False)
    assert plain_P.tolist() == [1.5, 0.5]
    rda_P = combined([a_P, b_P], [1, 1], by_direction=True)
    assert float(rda_P.norm()) == pytest.approx(2.0)  # the mean of 3 and 1
    assert rda_P[0] == rda_P[1]  # both directions count alike
    assert combined([a_P, -a_P], [1, 1], by_direction=True).tolist() == [0.0, 0.0]
    zero_P = torch.zeros(2)
    assert combined([a_P, zero_P], [1, 1], by_direction=True).tolist() == [1.5, 0.0]
    assert combined([zero_P], [1], by_direction=True).tolist() == [0.0, 0.0]
