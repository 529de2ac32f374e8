"""Workers of one region come, go, die in mid-step and are saved: rows and parameters stay exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geo_ray.base.types import Span, StepReport
from geo_ray.strategies.sma import Sma
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.config import ElasticConfig
from geo_ray.training.effects import Assignment, Snapshot, StepDone
from geo_ray.training.optimizers import Momentum
from geo_ray.training.parameters import split_sizes
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard

NUM_PARAMS = 6
BATCHES = (3, 5, 2, 4)
OPTIMIZER = Momentum(lr=0.05, momentum=0.5)
EVENTS = st.sampled_from(
    ["push"] * 6 + ["gather", "join", "join", "die", "die", "drain", "save", "crash"]
)


def gradient(params_P: Tensor, span: Span) -> Tensor:
    """Mean over the rows of a span: it depends on the parameters, and on each row."""
    rows_RP = torch.sin(torch.arange(span.start, span.stop)[:, None] + torch.arange(NUM_PARAMS))
    return 0.1 * params_P + rows_RP.mean(0)


@dataclass
class Site:
    """One region without others, driven by whoever holds it; all memory is the workers' own."""

    workers: int
    steps: int
    elastic: ElasticConfig | None
    mode: str = "sync"
    num_shards: int = 1
    busy: dict[int, tuple[Span, Tensor]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)  # exited before the end
    memory: dict[int, Tensor] = field(default_factory=dict)
    applied: list[tuple[Span, ...]] = field(default_factory=list)  # by step
    rates: list[float] = field(default_factory=list)
    saved: tuple | None = None
    saves: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.shards = [
            Shard.from_slice(torch.linspace(-1, 1, NUM_PARAMS), piece, OPTIMIZER, Sma(), alone=True)
            for piece in split_sizes(NUM_PARAMS, self.num_shards)
        ]
        plan = ServerPlan(
            "eu",
            self.workers,
            batch_size=4,
            batch_sizes=BATCHES[: self.workers],
            steps=self.steps,
            mode=self.mode,
            alone=True,
            elastic=self.elastic,
        )
        self.server = Server.over(self.shards, NUM_PARAMS, plan, WirePlan())
        for each in (self.busy, self.here, self.away, self.memory):
            each.clear()

    @property
    def params_P(self) -> Tensor:
        return torch.cat([shard.params_S for shard in self.shards])

    def take(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Assignment) and effect.span is None:
                self.here.discard(effect.worker)
                self.away.add(effect.worker)
            elif isinstance(effect, Assignment):
                assert effect.worker in self.here and effect.worker not in self.busy
                assert torch.equal(self.params_P, self.server.model.whole_params())
                self.busy[effect.worker] = (effect.span, self.params_P.clone())
            elif isinstance(effect, Snapshot):
                states = [shard.take_snapshot(effect.id) for shard in self.shards]
                self.saved = (effect.control, effect.tensors, states, list(self.applied))
            elif isinstance(effect, StepDone):
                assert self.pushed  # noted by `push`

    def push(self, rank: int) -> None:
        span, params_P = self.busy.pop(rank)
        place_P = self.memory.setdefault(rank, torch.empty(NUM_PARAMS))
        place_P.copy_(gradient(params_P, span))
        partition = self.server.partition_of(rank)
        for shard, (i, j) in zip(
            self.shards, split_sizes(NUM_PARAMS, self.num_shards), strict=True
        ):
            shard.put(partition, place_P[i:j])
        pushes = self.server.work.pushes
        self.pushed = {k: report.span for k, report in pushes.items()} | {partition: span}
        before = self.server.version
        effects = self.server.push(rank, StepReport(span, 1.0, 0.0))
        if self.server.version > before:
            self.applied.append(tuple(self.pushed[k] for k in sorted(self.pushed)))
        self.take(effects)

    def gone(self, rank: int) -> None:
        self.here.discard(rank)
        self.busy.pop(rank, None)
        place_P = self.memory.pop(rank, None)
        step = self.server.version
        pushes = {k: report.span for k, report in self.server.work.pushes.items()}
        effects = self.server.leave(rank)
        if self.server.version > step:  # the others had pushed all that the step still needs
            self.applied.append(tuple(pushes[k] for k in sorted(pushes)))
            self.pushed = pushes
        self.take(effects)
        del place_P

    def crash(self) -> None:
        """All processes end; they begin again as they were saved, or anew."""
        self.begin()
        if self.saved is None:
            self.applied.clear()
            return
        control, tensors, states, self.applied[:] = self.saved
        self.server.restore(control, tensors)
        for shard, state in zip(self.shards, states, strict=True):
            shard.restore(*state)

    def happens(self, what: str, which: int) -> None:
        def pick(ranks):
            return sorted(ranks)[which % len(ranks)] if ranks else None

        if what == "push" and self.busy:
            self.push(pick(self.busy))
        elif what == "join" and (absent := set(range(self.workers)) - self.here):
            self.join(pick(absent))
        elif what == "gather":
            for rank in sorted(set(range(self.workers)) - self.here):
                self.join(rank)
        elif what == "die" and self.here:
            self.gone(pick(self.here))
        elif what == "drain" and self.here:
            self.take(self.server.drain(pick(self.here)))
        elif what == "save":
            self.saves += 1
            self.take(self.server.snapshot(self.saves, halt=False))
        elif what == "crash":
            self.crash()
        self.check()

    def join(self, rank: int) -> None:
        self.here.add(rank)
        self.take(self.server.join(rank))

    def check(self) -> None:
        ledger = self.server.ledger
        ledger.check()
        spans = [span for step in self.applied for span in step]
        spans += [*ledger.in_flight.values(), *ledger.returned]
        rows = sorted(row for span in spans for row in range(span.start, span.stop))
        assert rows == list(range(ledger.cursor)), "a row twice, or not at all"
        assert sum(s.count for step in self.applied for s in step) == ledger.applied
        assert len(self.applied) == self.server.version

    def finish(self) -> None:
        for _ in range(2000):
            if self.server.phase == "done":
                return
            absent = set(range(self.workers)) - self.here
            if absent:
                self.happens("join", 0)
            else:
                assert self.busy, "nobody works"
                self.happens("push", 0)
        raise AssertionError("no end in sight")

    def lived(self, history) -> Site:
        for what, which in [("gather", 0), *history]:
            if self.server.phase == "done":
                break
            self.happens(what, which)
        self.finish()
        return self


def reference(steps: list[tuple[Span, ...]], rate=lambda rows: 1.0) -> Tensor:
    """A plain program: every step is the weighted mean over these spans, in this order."""
    params_P = torch.linspace(-1, 1, NUM_PARAMS)
    velocity_P = None
    for spans in steps:
        total = sum(span.count for span in spans)
        mean_P = torch.zeros(NUM_PARAMS, dtype=torch.float64)
        for span in spans:
            mean_P += gradient(params_P, span).double() * (span.count / total)
        grad_P = mean_P.float()
        velocity_P = grad_P if velocity_P is None else 0.5 * velocity_P + grad_P
        params_P = params_P - 0.05 * rate(total) * velocity_P
    return params_P


HISTORY = st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=60)
COMMON = {
    "history": HISTORY,
    "workers": st.integers(1, 4),
    "steps": st.integers(1, 6),
    "least": st.integers(1, 3),
    "shards": st.integers(1, 2),
}


@settings(max_examples=300)
@given(**COMMON)
def test_with_a_fixed_batch_nobody_can_tell_who_was_there(
    history, workers: int, steps: int, least: int, shards: int
) -> None:
    site = Site(workers, steps, ElasticConfig(min_workers=least), num_shards=shards).lived(history)
    quiet = Site(workers, steps, None, num_shards=shards).lived([])
    assert site.applied == quiet.applied
    assert torch.equal(site.params_P, quiet.params_P)
    assert torch.allclose(site.params_P, reference(site.applied), atol=1e-6)
    assert site.server.ledger.applied == steps * sum(BATCHES[:workers])


@settings(max_examples=300)
@given(rate=st.sampled_from(["same", "linear"]), **COMMON)
def test_where_the_batch_follows_a_step_has_the_rows_of_those_who_are_there(
    history, workers: int, steps: int, least: int, shards: int, rate: str
) -> None:
    elastic = ElasticConfig(min_workers=least, batch="follows", rate=rate)
    site = Site(workers, steps, elastic, num_shards=shards).lived(history)
    rows = sum(BATCHES[:workers])
    expected_P = reference(site.applied, (lambda n: n / rows) if rate == "linear" else lambda n: 1)
    assert torch.allclose(site.params_P, expected_P, atol=1e-6)
    assert all(1 <= len(step) <= workers for step in site.applied)


@settings(max_examples=150)
@given(**COMMON)
def test_pushes_that_are_applied_alone_have_every_row_once(
    history, workers: int, steps: int, least: int, shards: int
) -> None:
    elastic = ElasticConfig(min_workers=least)
    site = Site(workers, steps, elastic, mode="async", num_shards=shards).lived(history)
    assert len(site.applied) == steps * workers


@settings(max_examples=150)
@given(history=HISTORY, workers=st.integers(1, 4), steps=st.integers(1, 6))
def test_without_the_section_steps_wait_and_nothing_changes(history, workers, steps) -> None:
    site = Site(workers, steps, None).lived(history)
    quiet = Site(workers, steps, None).lived([])
    assert site.applied == quiet.applied and torch.equal(site.params_P, quiet.params_P)
