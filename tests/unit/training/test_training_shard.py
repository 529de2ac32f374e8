"""One shard: what it takes in, keeps and takes back."""

from __future__ import annotations

import pytest
import torch

from geo_ray.base.errors import CheckpointCorruptError, InvariantError
from geo_ray.strategies.ama import Ama
from geo_ray.strategies.diloco import DiLoCo
from geo_ray.strategies.sma import Sma
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.shard import Contribution, Shard


def make(size: int = 4, optimizer=None, strategy=None) -> Shard:
    return Shard(torch.ones(size), optimizer or Sgd(lr=1.0), strategy or Sma(interval=100))


def stepped(shard: Shard) -> Shard:
    shard.put(0, torch.full_like(shard.params_S, 0.5))
    shard.apply([Contribution(0, 8)])
    return shard


def test_gradients_are_weighted_by_their_samples():
    shard = make()
    for worker, value in enumerate((1.0, 5.0, float("nan"))):
        shard.put(worker, torch.full((4,), value))
    shard.apply([Contribution(0, 24), Contribution(1, 8), Contribution(2, 0)])
    assert torch.equal(shard.params_S, torch.full((4,), -1.0))
    assert (shard.state.step, shard.state.samples) == (1, 32)


@pytest.mark.parametrize(
    "optimizer",
    [Sgd(weight_decay=0.1), Momentum(nesterov=True, weight_decay=0.1), AdamW()],
    ids=str,
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_workers_gradient_is_not_changed(optimizer, workers):
    """It may lie in memory that the worker still reads, or in a message."""
    shard, grads = make(optimizer=optimizer), [torch.randn(4) for _ in range(workers)]
    before = [grad_S.clone() for grad_S in grads]
    for _ in range(3):
        for worker, grad_S in enumerate(grads):
            shard.put(worker, grad_S)
        shard.apply([Contribution(worker, 8) for worker in range(workers)])
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


def test_a_gradient_of_another_size_is_refused():
    with pytest.raises(InvariantError, match="worker 0"):
        make().put(0, torch.ones(3))


def test_only_the_newest_two_copies_are_kept():
    shard = make()
    for checkpoint in (1, 2, 3):
        stepped(shard).snapshot(checkpoint)
    tensors, counters = shard.take_snapshot(2)
    assert torch.equal(tensors["params"], torch.zeros(4)) and counters["step"] == 2
    assert torch.equal(shard.take_snapshot(3)[0]["params"], torch.full((4,), -0.5))
    with pytest.raises(KeyError):
        shard.take_snapshot(1)


def test_a_copy_is_of_its_moment():
    shard = stepped(make(optimizer=Momentum(), strategy=Ama(interval=1)))
    shard.outgoing()
    shard.snapshot(1)
    expected = shard.export()
    stepped(shard)
    taken = shard.take_snapshot(1)
    assert set(taken[0]) == {"params", "optimizer/momentum_buffer", "memory/snapshot"}
    assert all(torch.equal(taken[0][k], v) for k, v in expected[0].items())
    assert taken[1] == expected[1]


@pytest.mark.parametrize("name", ["params", "optimizer/momentum_buffer"])
def test_state_that_does_not_fit_is_refused(name):
    shard = stepped(make(optimizer=Momentum(), strategy=Ama(interval=1)))
    shard.outgoing()
    tensors, counters = shard.export()
    for wrong in (torch.ones(1), torch.ones(5)):
        with pytest.raises(CheckpointCorruptError, match=name.rpartition("/")[2]):
            make(optimizer=Momentum()).restore(tensors | {name: wrong}, counters)


def test_state_without_parameters_is_refused():
    with pytest.raises(CheckpointCorruptError, match="'params' is missing"):
        make().restore({}, {"step": 0, "since_send": 0, "samples": 0})


def anchored() -> Shard:
    """A shard of DiLoCo after its first exchange began: parameters, moments and an anchor."""
    shard = stepped(make(optimizer=AdamW(), strategy=DiLoCo(interval=1)))
    shard.outgoing()
    return shard


def test_a_merge_copies_no_moments_and_the_next_step_does():
    """Whoever writes the checkpoint has until that step to read them."""
    shard = anchored()
    shard.snapshot(1)
    expected, _ = shard.export()
    copies, _ = shard.release_snapshot(1)
    shard.merge(ReplyMessage("here", 1, 1, 8, torch.full((4,), 0.25)))
    kept = {name for name, copy in copies.items() if copy._saved.numel()}
    assert kept == {"params", "memory/anchor"}
    stepped(shard)
    kept = {name for name, copy in copies.items() if copy._saved.numel()}
    assert kept == set(expected)
    assert all(torch.equal(copies[k].whole(), v) for k, v in expected.items())


def test_state_that_is_given_is_taken_as_it_is():
    tensors, counters = anchored().export()
    given, copied = (make(optimizer=AdamW(), strategy=DiLoCo(interval=1)) for _ in range(2))
    copied.restore(tensors, counters)
    given.restore({name: value.clone() for name, value in tensors.items()}, counters, given=True)
    assert given.export()[1] == copied.export()[1] == counters
    for _ in range(2):
        assert all(torch.equal(given.export()[0][k], v) for k, v in copied.export()[0].items())
        stepped(given), stepped(copied)
    moments = torch.zeros(4)
    owner = make(optimizer=AdamW(), strategy=DiLoCo(interval=1))
    owner.restore(tensors | {"optimizer/exp_avg": moments}, counters, given=True)
    stepped(owner)
    assert moments.any()  # it is the optimizer's own


@pytest.mark.parametrize(("piece", "is_shared"), [((0, 4), True), ((0, 2), False)])
def test_parameters_that_are_given_are_taken_if_all_are_the_shards(piece, is_shared):
    params_P = torch.ones(4)
    shard = Shard.from_slice(params_P, piece, Sgd(lr=1.0), Sma(interval=100), given=True)
    assert (shard.params_S.data_ptr() == params_P.data_ptr()) == is_shared
    apart = Shard.from_slice(params_P, piece, Sgd(lr=1.0), Sma(interval=100))
    assert apart.params_S.data_ptr() != params_P.data_ptr()
