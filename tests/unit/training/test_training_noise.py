"""Gradient noise: the estimate, its smoothing, and who measures when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from geo_ray.base.types import Span, StepReport
from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.sma import Sma
from geo_ray.strategies.state import AveragerState
from geo_ray.training import noise
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import LogEntry, TakeIn, execute
from geo_ray.training.effects import Effect, SendUpdate, StepDone
from geo_ray.training.messages import UpdateMessage
from geo_ray.training.noise import NOISE_EVERY, NoiseMeter, RegionNoise, estimate
from geo_ray.training.optimizers import Sgd
from geo_ray.training.parameters import split_sizes, square_norm
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.replication import AveragerReplica
from geo_ray.training.server import Server
from geo_ray.training.shard import Contribution, Shard

NUM_PARAMS = 50
BATCHES = (4, 12, 16)


def gradients(true_P: Tensor, sigma: float, batches: Sequence[int], seed: int) -> list[Tensor]:
    """Means over so many rows of gradients with the given noise per element."""
    random = torch.Generator().manual_seed(seed)
    return [
        true_P + torch.randn(len(true_P), generator=random) * sigma / math.sqrt(rows)
        for rows in batches
    ]


def measured(
    grads: Sequence[Tensor], batches: Sequence[int]
) -> tuple[list[tuple[int, float]], float]:
    mean_P = sum(rows * grad_P for rows, grad_P in zip(batches, grads, strict=True)) / sum(batches)
    norms = [(rows, square_norm(grad_P)) for rows, grad_P in zip(batches, grads, strict=True)]
    return norms, square_norm(mean_P)


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("batches", [(8, 8), BATCHES, (1, 31)], ids=str)
def test_both_values_are_unbiased_whatever_the_batches(batches: tuple[int, ...]) -> None:
    true_P, sigma = torch.full((NUM_PARAMS,), 0.3), 1.5
    singles = [
        estimate(*measured(gradients(true_P, sigma, batches, seed), batches))
        for seed in range(3000)
    ]
    grad_sq, trace = torch.tensor(singles, dtype=torch.float64).mean(0).tolist()
    assert grad_sq == pytest.approx(square_norm(true_P), rel=0.03)
    assert trace == pytest.approx(NUM_PARAMS * sigma**2, rel=0.03)


def test_values_below_zero_are_kept_until_they_are_smoothed() -> None:
    meter = NoiseMeter()
    assert meter.feed([(8, 3.0), (8, 3.0)], 1.0)  # all noise: 2 * 1 - 3
    assert meter.grad_sq == pytest.approx(-1.0)
    assert meter.feed([(8, 3.0), (8, 3.0)], 4.0)  # longer than its parts: rounding, or clipping
    assert meter.grad_sq == pytest.approx((-0.99 + 5) / 1.99)
    assert meter.trace == pytest.approx((0.99 * 32 - 16) / 1.99)


def test_a_constant_is_itself_from_the_first_measurement_on() -> None:
    meter = NoiseMeter()
    assert math.isnan(meter.grad_sq) and math.isnan(meter.trace)
    for _ in range(5):
        meter.feed([(8, 3.0), (24, 2.0)], 1.75)
        assert (meter.grad_sq, meter.trace) == pytest.approx(
            estimate([(8, 3.0), (24, 2.0)], 1.75), rel=1e-12
        )


@pytest.mark.parametrize(
    ("norms", "mean_sq"),
    [
        ([(8, math.nan), (8, 1.0)], 1.0),
        ([(8, 1.0), (8, 1.0)], math.inf),
        ([(8, 1.0)], 1.0),
        ([], 0.0),
    ],
)
def test_what_says_nothing_is_passed_over(norms: list[tuple[int, float]], mean_sq: float) -> None:
    meter = NoiseMeter()
    assert not meter.feed(norms, mean_sq)
    assert meter.count == 0


def test_a_meter_goes_on_where_it_was_saved() -> None:
    meter, other = NoiseMeter(), NoiseMeter()
    meter.feed([(8, 3.0), (8, 2.0)], 1.5)
    other.restore(meter.export())
    for one in (meter, other):
        one.feed([(8, 5.0), (8, 1.0)], 2.5)
    assert other == meter and other.count == 2
    other.restore(None)  # of an older release
    assert other == NoiseMeter()


def test_many_squares_are_summed_exactly_enough() -> None:
    x_P = torch.randn(3_000_017, generator=torch.Generator().manual_seed(1))
    assert square_norm(x_P) == pytest.approx(float(x_P.double().square().sum()), rel=1e-7)
    assert square_norm(x_P[:5]) == pytest.approx(float(x_P[:5].double().square().sum()), rel=1e-6)
    assert square_norm(torch.empty(0)) == 0.0
    x_P[2_000_000] = math.nan
    assert math.isnan(square_norm(x_P))


# ------------------------------------------------------------------ shards and server


class Region:
    """One region's server over some shards, all of whose workers push made-up gradients."""

    def __init__(self, num_shards: int = 1, strategy: object = None, **plan: object) -> None:
        self.slices = split_sizes(NUM_PARAMS, num_shards)
        rule = strategy or Bsp()
        self.shards = [Shard(torch.zeros(b - a), Sgd(lr=0.1), rule) for a, b in self.slices]
        settings = {"num_workers": 3, "steps": None, "reports_norms": True} | plan
        settings["batch_sizes"] = BATCHES[: settings["num_workers"]]
        todo = ServerPlan("eu", batch_size=4, **settings)
        self.server = Server.over(self.shards, NUM_PARAMS, todo, WirePlan())
        self.effects: list[Effect] = []
        for worker in range(settings["num_workers"]):
            self.effects += self.server.join(worker)

    def step(self, refused: Sequence[int] = (), norms: bool = True) -> None:
        """One step; who waits for the averager gets its own gradient back."""
        batches = self.server.plan.batch_sizes
        true_P = torch.full((NUM_PARAMS,), 0.3)
        grads = gradients(true_P, 1.0, batches, seed=self.server.version)
        for worker, grad_P in enumerate(grads):
            for shard, (a, b) in zip(self.shards, self.slices, strict=True):
                shard.put(worker, grad_P[a:b])
            span = self.server.ledger.in_flight[worker]
            grad_sq = square_norm(grad_P) if norms and worker not in refused else None
            why = "why" if worker in refused else None
            report = StepReport(span, None if why else 1.0, 0.1, why, grad_sq)
            self.effects += self.server.push(worker, report)
        if self.server.link_busy:
            self.server.requests.answered(0.0, dropped=False)
            self.server.phase = "training"
            self.effects += self.server._advance()

    def steps(self, count: int, **how: object) -> Region:
        for _ in range(count):
            self.step(**how)
        return self

    @property
    def readings(self) -> list[object]:
        done = [e for e in self.effects if isinstance(e, StepDone)]
        return [e.noise for e in done if e.noise is not None]

    @property
    def told(self) -> list[float | None]:
        return [e.update.grad_sq for e in self.effects if isinstance(e, SendUpdate)]


def test_every_sixteenth_step_is_measured() -> None:
    region = Region().steps(2 * NOISE_EVERY)
    first, second = region.readings
    assert (first.step, first.rows, first.workers, first.count) == (16, 32, 3, 1)
    assert (second.step, second.count) == (32, 2)
    true_P = torch.full((NUM_PARAMS,), 0.3)
    norms, mean_sq = measured(gradients(true_P, 1.0, BATCHES, seed=15), BATCHES)
    assert (first.grad_sq, first.trace) == pytest.approx(estimate(norms, mean_sq), rel=1e-5)
    told = [(i + 1, sq) for i, sq in enumerate(region.told) if sq is not None]
    assert [step for step, _ in told] == [16, 32]
    assert told[0][1] == pytest.approx(mean_sq, rel=1e-5)


def test_shards_measure_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    one, three = Region(1).steps(4), Region(3).steps(4)
    for whole, cut in zip(one.readings, three.readings, strict=True):
        assert tuple(cut.fields().values()) == pytest.approx(
            tuple(whole.fields().values()), rel=1e-6
        )


def test_measuring_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Region(2).steps(5)
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    always = Region(2).steps(5)
    assert len(always.readings) == 5 and not never.readings
    updates = [
        [e.update.payload_P for e in r.effects if isinstance(e, SendUpdate)]
        for r in (never, always)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*updates, strict=True))


def test_a_region_of_one_worker_learns_nothing_alone_but_tells_its_norm() -> None:
    region = Region(num_workers=1).steps(NOISE_EVERY)
    grad_P = gradients(torch.full((NUM_PARAMS,), 0.3), 1.0, BATCHES[:1], seed=NOISE_EVERY - 1)[0]
    assert not region.readings
    assert region.told == [None] * (NOISE_EVERY - 1) + [pytest.approx(square_norm(grad_P))]


@pytest.mark.parametrize(
    ("how", "count"), [({"refused": [1]}, 1), ({"refused": [0, 2]}, 0), ({"norms": False}, 0)]
)
def test_gradients_that_are_not_used_are_not_counted(
    how: dict[str, object], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    region = Region().steps(1, **how)
    assert len(region.readings) == count
    if count:
        assert (region.readings[0].rows, region.readings[0].workers) == (20, 2)


def test_a_step_of_refused_gradients_alone_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    region = Region().steps(1, refused=[0, 1, 2])
    assert not region.readings and region.told == [None]


def test_coded_gradients_are_not_measured() -> None:
    reports = {rank: StepReport(Span(8 * rank, 8), 1.0, 0.1, None, 2.0) for rank in (0, 1)}
    plain = [Contribution(0, 8), Contribution(1, 8)]
    assert RegionNoise().norms(NOISE_EVERY, plain, reports) == [(8, 2.0), (8, 2.0)]
    coded = [Contribution(0, 8), Contribution(1, 8, weight=0.5)]
    assert RegionNoise().norms(NOISE_EVERY, coded, reports) == []


def test_an_update_of_other_rows_than_the_last_steps_has_no_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    assert Region(strategy=Sma(interval=2)).steps(2).told == [None]


def test_a_server_goes_on_where_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NOISE_EVERY", 1)
    region, other = Region().steps(3), Region()
    (snapshot,) = region.server.snapshot(1, halt=False)
    saved = dict(snapshot.control)
    other.server.restore(saved, snapshot.tensors)
    assert other.server.noise.meter == region.server.noise.meter
    del saved["noise"]  # of an older release
    other.server.restore(saved, snapshot.tensors)
    assert other.server.noise.meter.count == 0


def test_a_shard_measures_only_if_asked() -> None:
    shard = Shard(torch.zeros(2), Sgd(), Sma())
    for worker, value in enumerate((1.0, 3.0)):
        shard.put(worker, torch.full((2,), value))
    both = [Contribution(0, 8), Contribution(1, 8)]
    assert shard.apply(both) is None
    for worker, value in enumerate((1.0, 3.0)):
        shard.put(worker, torch.full((2,), value))
    assert shard.apply(both, measure=True) == pytest.approx(8.0)


# ------------------------------------------------------------------ averager


def update(region: str, seq: int, values: tuple[float, float], **more: object) -> UpdateMessage:
    payload_P = torch.tensor(values)
    fields: dict[str, object] = {"num_samples": 8, "grad_sq": square_norm(payload_P)} | more
    return UpdateMessage(region, 1, seq, 0, payload_P=payload_P, **fields)


def rounds(strategy: object, **more: object) -> Averager:
    averager = Averager(strategy, 2, AveragerState(("a", "b")))
    averager.on_update(update("a", 1, (1.0, 0.0), num_samples=24))
    averager.on_update(update("b", 1, (0.0, 2.0), **more))
    return averager


def test_a_round_of_gradients_is_measured() -> None:
    averager = rounds(Bsp())
    (reading,) = averager.noise.news()
    assert (reading.step, reading.rows, reading.workers, reading.count) == (1, 32, 2, 1)
    expected = estimate([(24, 1.0), (8, 4.0)], 0.75**2 + 0.5**2)
    assert (reading.grad_sq, reading.trace) == pytest.approx(expected, rel=1e-6)
    assert averager.noise.news() == []


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (Bsp(weights="uniform"), {}),
        (Sma(interval=1, weights="samples"), {}),
        (Bsp(), {"grad_sq": None}),
        (Bsp(), {"num_samples": 0, "grad_sq": None}),
    ],
)
def test_other_rounds_are_not(strategy: object, more: dict[str, object]) -> None:
    averager = rounds(strategy, **more)
    assert averager.state.version == 1 and not averager.noise.news()


def test_an_averager_goes_on_where_it_was_saved() -> None:
    averager, other = rounds(Bsp()), Averager(Bsp(), 2, AveragerState(("a", "b")))
    tensors, control = averager.export()
    other.restore(tensors, control)
    assert other.noise.meter == averager.noise.meter
    del control["noise"]  # of an older release
    other.restore(tensors, control)
    assert other.noise.meter.count == 0


def test_a_standby_knows_the_same_and_leaves_the_telling_to_the_hub() -> None:
    state, other = (Averager(Bsp(), 2, AveragerState(("a", "b"))) for _ in range(2))
    replica = AveragerReplica(other)
    for number, region in enumerate(("a", "b"), 1):
        op = TakeIn(update(region, 1, (float(number), 2.0)))
        execute(state, op)
        replica.on_entry(LogEntry(number, op))
    assert other.noise.meter == state.noise.meter and state.noise.meter.count == 1
    assert len(state.noise.news()) == 1 and not other.noise.news()


def test_updates_that_were_summed_on_the_way_say_the_same() -> None:
    plain, summed = rounds(Bsp()), Averager(Bsp(), 2, AveragerState(("a", "b")))
    for region, rows, grad_sq in (("a", 24, 1.0), ("b", 8, 4.0)):
        summed.on_update(update(region, 1, (0.75, 0.5), num_samples=rows, grad_sq=grad_sq))
    assert summed.noise.news() == plain.noise.news()
