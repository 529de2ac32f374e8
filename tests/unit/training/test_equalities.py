"""Equalities that must hold exactly, on a real task with real gradients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from geo_ray.base.types import Span, StepReport
from geo_ray.data.tasks.digits import Digits
from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.base import weighted_mean
from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.sma import Sma
from geo_ray.strategies.state import AveragerState, Update
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import Averager
from geo_ray.training.effects import Assignment, SendUpdate
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.parameters import digest, read_parameters
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard
from geo_ray.training.worker import Worker

BATCH = 8
SEED = 3
TASK = Digits(Digits.Options(width=2))
TRAIN = TASK.dataset(SEED).train
START_P = read_parameters(TASK.model(SEED))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(region: str, span: Span) -> dict:
    """Each region has its own endless stream."""
    offset = 700 if region == "b" else 0
    index = [(offset + i) % len(TRAIN["label"]) for i in range(span.start, span.stop)]
    return {name: array[index] for name, array in TRAIN.items()}


def grad_of(region: str, span: Span, params_P: Tensor) -> Tensor:
    """The gradient as plain torch finds it, fp32 (P,)."""
    module = TASK.model(SEED)
    torch.nn.utils.vector_to_parameters(params_P, module.parameters())
    TASK.loss(module, TASK.collate(rows(region, span), torch.device("cpu"))).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


@dataclass
class Region:
    server: Server
    shard: Shard
    workers: list[Worker]


class Recorded(Shard):
    """Notes what it applied."""

    applied: list[Tensor]

    def ask(self, operation, *arguments, change=None):
        if operation is Shard.apply:
            self.applied.append(self._combine(arguments[0]).clone())
        return super().ask(operation, *arguments)


class Plane:
    """Servers, workers and averager; what is under way is taken in order, or shuffled by a seed."""

    def __init__(self, strategy, optimizer, workers: dict[str, int], steps, shuffle=None, **plan):
        alone = len(workers) == 1
        self.averager = Averager(strategy, START_P.numel(), AveragerState(tuple(sorted(workers))))
        self.applied: list[Tensor] = []
        self._queue: deque = deque()
        self._random = None if shuffle is None else Random(shuffle)
        self.regions = {}
        for name, count in workers.items():
            shard = Recorded(START_P.clone(), optimizer, strategy, alone=alone)
            shard.applied = self.applied
            todo = steps if isinstance(steps, int) else steps[name]
            self.regions[name] = Region(
                Server.over(
                    [shard],
                    START_P.numel(),
                    ServerPlan(name, count, BATCH, todo, **plan),
                    WirePlan(),
                ),
                shard,
                [self._worker(name) for _ in range(count)],
            )

    def _worker(self, region: str) -> Worker:
        params_P = torch.zeros_like(START_P)
        return Worker(TASK, params_P, params_P.clone(), region=region, seed=SEED)

    def run(self) -> Plane:
        for name, region in self.regions.items():
            for rank in range(len(region.workers)):
                self._take(name, region.server.join(rank))
        while self._queue:
            at = 0 if self._random is None else self._random.randrange(len(self._queue))
            self._queue.rotate(-at)
            self._queue.popleft()()
        for region in self.regions.values():
            assert region.server.phase == "done"
            region.server.ledger.check()
        return self

    def _take(self, name: str, effects) -> None:
        for effect in effects:
            if isinstance(effect, Assignment) and effect.span is not None:
                worker = self.regions[name].workers[effect.worker]
                worker.params_P.copy_(self.regions[name].shard.params_S)
                self._queue.append(lambda effect=effect: self._work(name, effect))
            elif isinstance(effect, SendUpdate):
                self._queue.append(lambda update=effect.update: self._on_update(update))

    def _work(self, name: str, answer: Assignment) -> None:
        region = self.regions[name]
        worker = region.workers[answer.worker]
        result = worker.step(rows(name, answer.span), answer.span)
        region.shard.put(answer.worker, worker.grad_P)
        report = StepReport(answer.span, result.loss, 0.0, result.refused)
        self._take(name, region.server.push(answer.worker, report))

    def _on_update(self, update: UpdateMessage) -> None:
        for reply in self.averager.on_update(update):
            self._queue.append(
                lambda reply=reply: self._take(
                    reply.to, self.regions[reply.to].server.on_reply(reply)
                )
            )

    def params(self) -> dict[str, Tensor]:
        return {name: region.shard.params_S for name, region in self.regions.items()}

    def digests(self) -> dict[str, str]:
        return {name: digest(params_P) for name, params_P in self.params().items()}


def near(a_P: Tensor, b_P: Tensor, atol: float = 1e-6) -> bool:
    return torch.allclose(a_P, b_P, rtol=0, atol=atol)


# ------------------------------------------------------------------ one region


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda s: s().kind)
def test_one_region_is_plain_training_whatever_the_strategy(strategy):
    plane = Plane(strategy(), Sgd(lr=0.1), {"a": 1}, 5).run()
    assert plane.digests()["a"] == digest(_plain_by_layer(Sgd(lr=0.1), 5))
    assert plane.averager.state.version == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(lr=0.1, weight_decay=0.01),
        Momentum(lr=0.05),
        Momentum(lr=0.05, nesterov=True, weight_decay=0.01),
    ],
    ids=["sgd", "momentum", "nesterov"],
)
def test_one_region_has_the_bits_of_plain_torch(optimizer):
    plane = Plane(Sma(), optimizer, {"a": 1}, 12).run()
    assert torch.equal(plane.params()["a"], _plain_by_layer(optimizer, 12))


def test_one_region_has_the_bits_of_plain_torch_with_adamw():
    """Bits, if plain torch is fused over one tensor too; over layers, to rounding."""
    optimizer = AdamW(lr=0.01)
    ours_P = Plane(Sma(), optimizer, {"a": 1}, 12).run().params()["a"]
    flat = torch.nn.Parameter(START_P.clone())
    plain = torch.optim.AdamW([flat], lr=0.01, weight_decay=0.01, fused=True)
    for t in range(12):
        flat.grad = grad_of("a", Span(t * BATCH, BATCH), flat.detach())
        plain.step()
    assert torch.equal(ours_P, flat.detach())
    assert near(ours_P, _plain_by_layer(optimizer, 12))


def test_workers_of_a_region_are_one_larger_batch():
    two_P = Plane(Sma(), Sgd(lr=0.1), {"a": 2}, 6).run().params()["a"]
    w_P = START_P.clone()
    for t in range(6):
        w_P = w_P - 0.1 * grad_of("a", Span(2 * t * BATCH, 2 * BATCH), w_P)
    assert near(two_P, w_P)


def _plain_by_layer(optimizer, steps: int) -> Tensor:
    """What anybody would write: a module, a torch optimizer over its layers, a loop."""
    module = TASK.model(SEED)
    params = list(module.parameters())
    plain = {
        "sgd": lambda c: torch.optim.SGD(params, c.lr, weight_decay=c.weight_decay),
        "momentum": lambda c: torch.optim.SGD(
            params, c.lr, c.momentum, weight_decay=c.weight_decay, nesterov=c.nesterov
        ),
        "adamw": lambda c: torch.optim.AdamW(params, c.lr, weight_decay=c.weight_decay),
    }[optimizer.kind](optimizer)
    for t in range(steps):
        plain.zero_grad()
        batch = TASK.collate(rows("a", Span(t * BATCH, BATCH)), torch.device("cpu"))
        TASK.loss(module, batch).backward()
        plain.step()
    return read_parameters(module)


# ------------------------------------------------------------------ several regions


@pytest.mark.parametrize("wait", ["always", "when_busy"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_asgd_ga_with_interval_one_is_asgd(wait, combine):
    twins = [Asgd(wait=wait, combine=combine), AsgdGa(interval=1, wait=wait, combine=combine)]
    for shuffle in (None, 5):
        a, b = (Plane(s, Momentum(), {"a": 1, "b": 2}, 6, shuffle=shuffle).run() for s in twins)
        assert a.digests() == b.digests()


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("kind", ["sma", "bsp"])
def test_one_step_rounds_are_synchronous_data_parallelism(kind, weights):
    """Region a has two workers and so twice the samples of b."""
    strategy = Sma(interval=1, weights=weights) if kind == "sma" else Bsp(weights=weights)
    plane = Plane(strategy, Sgd(lr=0.1), {"a": 2, "b": 1}, 6).run()
    w_P = START_P.clone()
    for t in range(6):
        grad_a_P = grad_of("a", Span(2 * t * BATCH, 2 * BATCH), w_P)
        grad_b_P = grad_of("b", Span(t * BATCH, BATCH), w_P)
        share = 2 / 3 if weights == "samples" else 1 / 2
        w_P = w_P - 0.1 * (share * grad_a_P + (1 - share) * grad_b_P)
    assert len(set(plane.digests().values())) == 1
    assert near(plane.params()["a"], w_P)


@pytest.mark.parametrize("optimizer", [Momentum(), AdamW(lr=0.01)], ids=lambda o: o.kind)
def test_bsp_is_one_optimizer_on_the_mean_gradient(optimizer):
    plane = Plane(Bsp(), optimizer, {"a": 2, "b": 1}, 6).run()
    alone = Shard(START_P.clone(), optimizer, Bsp(), alone=True)
    for t in range(6):
        w_P = alone.params_S.clone()
        grad_a_P = grad_of("a", Span(2 * t * BATCH, 2 * BATCH), w_P)
        grad_b_P = grad_of("b", Span(t * BATCH, BATCH), w_P)
        alone._optimizer.apply(2 / 3 * grad_a_P + 1 / 3 * grad_b_P)
    assert near(plane.params()["b"], alone.params_S, atol=2e-5)


def test_ama_of_one_moment_is_sma_with_equal_weights():
    strategy, state = Ama(interval=1), AveragerState(("a", "b"))
    shards = {name: Shard(START_P.clone(), Sgd(lr=0.1), strategy) for name in state.members}
    for t in range(4):
        updates = []
        for name, shard in shards.items():
            shard.state.params_P.sub_(
                0.1 * grad_of(name, Span(t * BATCH, BATCH), shard.state.params_P)
            )
            shard.state.since_send = 1
            out = shard.outgoing()
            updates.append(Update(name, out.payload_P, BATCH))
        mean_P = weighted_mean(updates, "uniform")
        for update in updates:  # so that the averager knows both of this moment
            strategy.on_update(state, update)
        for update in updates:
            (reply,) = strategy.on_update(state, update)
            shards[update.region].merge(ReplyMessage.sending(reply, seq=1, version=1))
            assert near(shards[update.region].params_S, mean_P)
    final = [Update(n, s.finish().payload_P, 1 + i, final=True) for i, (n, s) in
             enumerate(shards.items())]  # fmt: skip
    assert strategy.on_update(state, final[0]) == []
    for reply in strategy.on_update(state, final[1]):
        shards[reply.to].merge(ReplyMessage.sending(reply, seq=9, version=9))
        assert torch.equal(shards[reply.to].params_S, weighted_mean(final, "uniform"))


@pytest.mark.parametrize("shuffle", range(4))
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "strategy",
    [
        Asgd(combine="sum"),
        Asgd(combine="sum", wait="when_busy"),
        AsgdGa(combine="sum", interval=3),
        AsgdGa(combine="sum", interval=2, wait="when_busy"),
        AsgdGa(combine="sum", interval=2, wait="always"),
    ],
    ids=str,
)
def test_drained_sums_are_all_gradients_everywhere(strategy, mode, shuffle):
    """In whatever order messages and steps happen, and however unequal the regions."""
    plane = Plane(
        strategy,
        Sgd(lr=0.02),
        {"a": 2, "b": 1, "c": 1},
        {"a": 3, "b": 7, "c": 2},
        shuffle,
        mode=mode,
    ).run()
    assert len(plane.applied) == (12 if mode == "sync" else 15)
    values = list(plane.params().values())
    assert all(near(values[0], other, atol=3e-6) for other in values[1:])
    assert near(values[0], START_P - 0.02 * sum(plane.applied), atol=3e-6)


def test_weights_by_samples_follow_the_split():
    by_samples, uniform = (
        Plane(Sma(interval=3, weights=w), Sgd(lr=0.1), {"a": 2, "b": 1}, 3).run().params()["a"]
        for w in ("samples", "uniform")
    )
    alone = {
        name: Plane(Sma(), Sgd(lr=0.1), {name: count}, 3).run().params()[name]
        for name, count in (("a", 2), ("b", 1))
    }
    assert near(by_samples, (2 * alone["a"] + alone["b"]) / 3)
    assert near(uniform, (alone["a"] + alone["b"]) / 2)
    assert not near(by_samples, uniform, atol=1e-4)
