"""Gradients of many workers at once are those of one after another, but for rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from geo_ray.base.types import Span
from geo_ray.data.tasks.classification import Labelled, classification_loss
from geo_ray.simulator import world
from geo_ray.simulator.region import MANY, Gradients, _stacked
from geo_ray.training.worker import Worker
from tests.support.world_support import of_kind

SITES = {
    "regions": [{"name": "hub"}, {"name": "s", "copies": MANY - 1}],
    "emulate": {
        "link": {"rate_mbps": 10, "delay_s": 0.01},
        "step_s": 0.1,
        "step_s_by_region": {"s-03": 0.31, "s-07": 0.02},
    },
    "train": {"steps": 6, "eval_every": 0},
}


@pytest.mark.parametrize("kind", ["bsp", "fedat", "halos", "asgd_ga"])
def test_a_run_of_many_sites_is_the_same_one_by_one(kind, simulated, monkeypatch):
    together = simulated(**of_kind(kind, **SITES))
    region = together.world.regions["hub"]
    assert (region._gradients is None) == (kind == "halos")  # whose workers take several steps
    monkeypatch.setattr(world, "MANY", 10**9)
    alone = simulated(**of_kind(kind, **SITES))
    assert together.result.seconds == pytest.approx(alone.result.seconds)
    for name, params_P in together.result.params_P.items():
        torch.testing.assert_close(params_P, alone.result.params_P[name], rtol=1e-4, atol=1e-5)
    losses = [[e["loss"] for e in run.of("step")] for run in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


class Toy:
    """A linear model; with ``noise`` one that cannot be batched."""

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def model(self, seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 4), nn.Dropout(0.5)] if self.noise else [nn.Linear(3, 4)]
        return nn.Sequential(*layers)

    def collate(self, columns, device):
        return Labelled(columns["x"], columns["y"])

    def loss(self, model, batch):
        return classification_loss(model, batch)


def _workers(task, clip_norm=None):
    params_P = torch.cat([p.detach().reshape(-1) for p in task.model(0).parameters()])
    return [
        Worker(
            task,
            params_P.clone(),
            torch.zeros_like(params_P),
            region=f"r{i}",
            seed=0,
            clip_norm=clip_norm,
        )
        for i in range(3)
    ]


def _rows(i, scale=1.0):
    chance = torch.Generator().manual_seed(i)
    x = scale * torch.randn(5, 3, generator=chance)
    return {"x": x, "y": torch.randint(0, 4, (5,), generator=chance)}


def _both(task, rows, clip_norm=None):
    """What three workers find together, and alone."""
    workers = _workers(task, clip_norm)
    pool = Gradients(task, task.model(1), clip_norm)
    spans = [Span(5 * i, 5) for i in range(3)]
    works = [
        pool.ask(w, w.params_P.clone(), r, s) for w, r, s in zip(workers, rows, spans, strict=True)
    ]
    found = []
    for work, worker, own, span in zip(works, workers, rows, spans, strict=True):
        result, grad_P = pool.finish(work, lambda w=worker, r=own, s=span: w.step(r, s))
        found.append((result, grad_P.clone()))
    alone = [
        (w.step(r, s), w.grad_P)
        for w, r, s in zip(_workers(task, clip_norm), rows, spans, strict=True)
    ]
    return pool, found, alone


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_loss_gradient_and_clipping(clip_norm):
    pool, found, alone = _both(Toy(), [_rows(i) for i in range(3)], clip_norm)
    assert pool.works
    for (mine, grad_P), (theirs, wanted_P) in zip(found, alone, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        torch.testing.assert_close(grad_P, wanted_P)


def test_what_is_not_finite_is_refused_for_its_own_worker_only():
    rows = [_rows(0), _rows(1, float("inf")), _rows(2)]
    _, found, alone = _both(Toy(), rows)
    assert [r.refused for r, _ in found] == [r.refused for r, _ in alone]
    assert [r.refused for r, _ in found] == [None, "loss_not_finite", None]


def test_a_model_with_dropout_is_computed_alone_to_the_bit():
    pool, found, alone = _both(Toy(noise=True), [_rows(i) for i in range(3)])
    assert not pool.works
    for (mine, grad_P), (theirs, wanted_P) in zip(found, alone, strict=True):
        assert mine == theirs and torch.equal(grad_P, wanted_P)


def test_batches_of_another_shape_are_computed_alone():
    rows = [_rows(0), {name: column[:2] for name, column in _rows(1).items()}, _rows(2)]
    pool, found, alone = _both(Toy(), rows)
    assert not pool.works
    assert all(torch.equal(a[1], b[1]) for a, b in zip(found, alone, strict=True))


def test_batches_may_be_nested():
    one, two = torch.ones(2), torch.zeros(2)
    found = _stacked([{"a": (one, Labelled(one, two))}, {"a": (two, Labelled(two, one))}])
    assert found["a"][0].shape == (2, 2) and isinstance(found["a"][1], Labelled)
    with pytest.raises(TypeError, match="SimpleNamespace"):
        _stacked([SimpleNamespace(), SimpleNamespace()])
