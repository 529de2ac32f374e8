"""Assigns rows to a region's workers; tracks pushes, joins, departures and evaluations.

Rows are booked by batch partition of a step, never by the worker that computes them. Positions
are handed out in order; rows of a lost worker return to the pool and are handed out first, so
every row is applied once or discarded for a named reason (`Ledger`). While a worker's gradient
is still in its own memory, shards copy it before that worker computes another partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import Span, StepReport
from geo_ray.training.config import ElasticConfig
from geo_ray.training.effects import ActiveWorkersChanged, Assignment
from geo_ray.training.shard import Contribution
from geo_ray.training.stragglers import BackupWorkers, GradientCoding, Stragglers

Phase = Literal["training", "waiting", "must_send", "finishing", "done", "halted"]
"""waiting: for an answer; must_send: for an answer, then send; finishing: for the last answer."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a region's parameter server is to do.

    Attributes:
        region: its name.
        num_workers: ranks 0 to num_workers - 1 take part.
        batch_size: rows per worker and step.
        batch_sizes: the same by worker, if they are unequal.
        steps: sync: region steps; async: pushes per worker on average. None: until the averager
            says so.
        mode: ``sync`` combines one gradient per worker into a step; ``async`` applies each alone.
        eval_every: steps between evaluations by worker 0; 0 for none but the last.
        eval_rows: instead, rows of all regions together between evaluations.
        max_refused: steps refused in a row that end the run.
        attempt: incarnation of this server.
        alone: no other region waits for this one, so it may stand still when it is exhausted.
        batches_per_push: batches that a worker takes for one push.
        stragglers: what to do about workers that are late.
        evaluates_outer: not the live parameters are evaluated, but those that the averager knows.
        goal: what the run is to do, in words; at a resume with another goal it goes on, although it
            was told to finish.
        last_round_is_final: there may be no exchange after that of the last step, which is the
            last word then: what codecs owe would be lost.
        has_final_update: there is always an exchange after the last step: one of that step would
            only make it later.
        never_waits: the region stands still for no exchange but the last.
        round_steps: steps from one exchange to the next, if all regions exchange after the same
            steps; None: they do not.
        noise_every: steps between measurements of gradient noise; None for the usual number.
        clip_mean_norm: largest norm of the mean of a step's gradients; None: any.
        elastic: whether steps go on while workers are missing; None: they wait for them.
        reports_norms: updates are gradients as they are, whose norms the averager wants to know.
    """

    region: str
    num_workers: int
    batch_size: int
    steps: int | None
    mode: Literal["sync", "async"] = "sync"
    eval_every: int = 0
    eval_rows: int | None = None
    max_refused: int = 3
    attempt: int = 1
    alone: bool = False
    batches_per_push: int = 1
    stragglers: BackupWorkers | GradientCoding | None = None
    evaluates_outer: bool = False
    batch_sizes: tuple[int, ...] | None = None
    elastic: ElasticConfig | None = None
    reports_norms: bool = False
    goal: str = ""
    noise_every: int | None = None
    last_round_is_final: bool = False
    has_final_update: bool = False
    never_waits: bool = False
    round_steps: int | None = None
    clip_mean_norm: float | None = None

    @property
    def steps_per_round(self) -> int:
        """Region steps in which every worker's gradient is taken in once."""
        return 1 if self.mode == "sync" else self.num_workers

    def rows_per_push(self, worker: int) -> int:
        """Rows that a worker takes at once."""
        size = self.batch_sizes[worker] if self.batch_sizes else self.batch_size
        return size * self.batches_per_push

    def rate_of(self, rows: int) -> float:
        """What the learning rate is multiplied by in a step of ``rows`` rows."""
        if self.elastic is None or self.elastic.rate == "same" or not rows:
            return 1.0
        return rows / sum(map(self.rows_per_push, range(self.num_workers)))


@dataclass(slots=True)
class Ledger:
    """Assigned = applied + in flight + returned + discarded, at every moment.

    Attributes:
        cursor: the next position that nobody had yet.
        returned: spans of lost workers, lowest first.
        in_flight: spans by worker rank.
        applied: rows whose gradient changed the model or took part in a round.
        discarded: rows by the reason why their gradient was refused.
    """

    cursor: int = 0
    returned: list[Span] = field(default_factory=list)
    in_flight: dict[int, Span] = field(default_factory=dict)
    applied: int = 0
    discarded: Counter[str] = field(default_factory=Counter)

    def assign(self, worker: int, count: int) -> Span:
        """Hand ``count`` rows to ``worker``: returned ones first, else the next of the stream.

        A worker that already holds a span (it was replaced) gets the same again.
        """
        if worker in self.in_flight:
            return self.in_flight[worker]
        if self.returned:
            span = self.returned.pop(0)
        else:
            span = Span(self.cursor, count)
            self.cursor += count
        self.in_flight[worker] = span
        return span

    def take_back(self, worker: int) -> None:
        """Return the span of a worker that is gone for good to the pool."""
        span = self.in_flight.pop(worker, None)
        if span is not None:
            self.returned.append(span)
            self.returned.sort(key=attrgetter("start"))

    def settle(self, worker: int, refused: str | None = None) -> Span:
        """Book ``worker``'s span as applied, or as discarded for the reason ``refused``.

        Raises:
            InvariantError: if it holds none.
        """
        span = self.in_flight.pop(worker, None)
        if span is None:
            raise InvariantError(f"worker {worker} reported rows that it was not assigned")
        if refused is None:
            self.applied += span.count
        else:
            self.discarded[refused] += span.count
        return span

    def check(self) -> None:
        """Raise `InvariantError` unless the books balance."""
        open_rows = sum(s.count for s in self.in_flight.values())
        pool_rows = sum(s.count for s in self.returned)
        booked = self.applied + sum(self.discarded.values()) + open_rows + pool_rows
        if booked != self.cursor:
            raise InvariantError(f"sample books: {self.cursor} rows assigned, {booked} booked")

    def export(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        spans = {str(w): [s.start, s.count] for w, s in self.in_flight.items()}
        return {
            "cursor": self.cursor,
            "returned": [[s.start, s.count] for s in self.returned],
            "in_flight": spans,
            "applied": self.applied,
            "discarded": dict(self.discarded),
        }

    @classmethod
    def restore(cls, data: dict[str, object]) -> Ledger:
        """The ledger of `export`. Spans in flight stay with their worker's rank."""
        raw: dict[str, object] = dict(data)
        in_flight = raw["in_flight"]
        returned = raw["returned"]
        discarded = raw["discarded"]
        if not (
            isinstance(in_flight, dict)
            and isinstance(returned, list)
            and isinstance(discarded, dict)
        ):
            raise InvariantError(f"sample books of another shape: {sorted(raw)}")
        return cls(
            cursor=int(str(raw["cursor"])),
            returned=[Span(int(s), int(n)) for s, n in returned],
            in_flight={int(w): Span(int(v[0]), int(v[1])) for w, v in in_flight.items()},
            applied=int(str(raw["applied"])),
            discarded=Counter({str(k): int(v) for k, v in discarded.items()}),
        )


class ActiveWorkers:
    """A region's team: which workers are there, and who computes which share of the step.

    A step is made of *shares*, one for each rank: its rows are those that this rank is assigned.
    Where all are there, each computes its own. A worker whose gradient lies in its own memory while
    the step is not complete has *lent* it: before it computes another share, shards must keep a
    copy.

    Attributes:
        ranks: 0 to ranks - 1 belong to the region.
        elastic: the rule for missing ones; None: steps wait for them.
        joined: workers that are there.
        awaited: ranks that the next step waits for.
        leaving: workers that are to go home when they have pushed what they compute.
        idle: workers that wait for rows.
        computes: shares that are being computed, by worker.
        uncopied: pushed shares that no step has used yet and that lie with their worker, by worker.
        step: shares of the step under way; empty between two.
    """

    def __init__(self, ranks: int, elastic: ElasticConfig | None = None) -> None:
        self.ranks = ranks
        self.elastic = elastic
        self.joined: set[int] = set()
        self.awaited = set(range(ranks))
        self.leaving: set[int] = set()
        self.idle: set[int] = set()
        self.computes: dict[int, int] = {}
        self.uncopied: dict[int, int] = {}
        self.step: set[int] = set()
        self._pushed_by: dict[int, int] = {}
        self._reported = set(range(ranks))

    # -------------------------------------------------------------- who is there

    def join(self, worker: int) -> int | None:
        """A worker, new or replaced, is here; the share that went with its predecessor's memory."""
        self.leaving.discard(worker)
        self.awaited.discard(worker)
        self.joined.add(worker)
        self.idle.add(worker)
        return self.uncopied.pop(worker, None)

    def leave(self, worker: int) -> int | None:
        """A worker is gone; the share that it was computing, if it was."""
        self.joined.discard(worker)
        self.idle.discard(worker)
        if self.elastic is None:
            self.awaited.add(worker)
        else:
            self.awaited.discard(worker)
        return self.computes.pop(worker, None)

    def departing(self) -> dict[int, int | None]:
        """Those that wait and are to go home, with what they had lent; they are not here now."""
        going = {
            worker: self.uncopied.pop(worker, None)
            for worker in sorted(self.leaving & self.waiting)
        }
        for worker in going:
            self.leave(worker)
            self.leaving.discard(worker)
        return going

    @property
    def present(self) -> set[int]:
        """Workers that take part: they are here, and stay."""
        return self.joined - self.leaving

    @property
    def may_work(self) -> bool:
        """Whether enough are there for anybody to be given rows."""
        least = 0 if self.elastic is None else self.elastic.least(self.ranks)
        return not self.awaited and len(self.present) >= least

    def changed_ranks(self) -> tuple[int, ...] | None:
        """Who takes part, if that has changed since it was last asked."""
        if self.elastic is None or self.awaited or self.present == self._reported:
            return None
        self._reported = self.present
        return tuple(sorted(self._reported))

    # -------------------------------------------------------------- who computes what

    @property
    def follows(self) -> bool:
        """Whether a step has the shares of those only that are there when it begins."""
        return self.elastic is not None and self.elastic.batch == "follows"

    def begin(self) -> None:
        """Begin a step, unless one is under way."""
        if not self.step:
            self.step = self.present if self.follows else set(range(self.ranks))

    def give_up(self, partition: int) -> None:
        """The step under way does without this share."""
        self.step.discard(partition)

    def is_whole(self, pushed: Collection[int]) -> bool:
        """Whether these shares make the step under way."""
        return bool(self.step) and self.step <= set(pushed)

    def deal(self, pushed: Collection[int]) -> dict[int, int]:
        """Open shares by those who are to compute them next: their own, else any."""
        left = self.step - set(pushed) - set(self.computes.values())
        takers = self.idle & self.present
        dealt = {worker: worker for worker in sorted(takers & left)}
        if self.elastic is not None:
            helpers = sorted(takers - left) + sorted(self.present & self.uncopied.keys())
            dealt |= dict(zip(helpers, sorted(left - dealt.keys()), strict=False))
        return dealt

    def take(self, worker: int, partition: int) -> int | None:
        """``worker`` begins a share; the one that it had lent, whose place it needs now."""
        self.idle.discard(worker)
        self.computes[worker] = partition
        return self.uncopied.pop(worker, None)

    def pushed(self, worker: int) -> None:
        """It has pushed what it computed."""
        partition = self.computes.pop(worker)
        self.uncopied[worker] = partition
        self._pushed_by[partition] = worker

    def applied(self, partitions: Iterable[int]) -> None:
        """A step has used these shares; whoever waited for that is idle."""
        used = set(partitions)
        for worker in [w for w, partition in self.uncopied.items() if partition in used]:
            del self.uncopied[worker]
            self.idle |= {worker} & self.joined
        self.step.clear()

    def compute_s(self, reports: Mapping[int, StepReport]) -> float:
        """Of the worker that computed longest for a step, by what was reported of its shares."""
        took_s: dict[int, float] = {}
        for partition, report in reports.items():
            worker = self._pushed_by.get(partition, partition)
            took_s[worker] = took_s.get(worker, 0.0) + report.compute_s
        return max(took_s.values())

    @property
    def waiting(self) -> set[int]:
        """Workers that are here and compute nothing."""
        return (self.idle | self.uncopied.keys()) & self.joined


@dataclass(slots=True)
class EvalTimes:
    """The next evaluation of a region.

    Attributes:
        every: region steps between two; 0 for none.
        rows: instead, rows of all regions together between two.
        by: the worker that was asked for the newest one.
        last: what has become of the one after the end.
    """

    every: int
    rows: int | None
    by: int | None = None
    last: Literal["owed", "open", "reported"] = "owed"
    _next: int = 0
    _open: bool = False  # one was asked for, and its result was not told yet
    _owed: bool = False

    @classmethod
    def of(cls, plan: ServerPlan) -> EvalTimes:
        """As a region's plan says; not at the start."""
        every = plan.eval_every * plan.steps_per_round
        return cls(every, plan.eval_rows, _next=every if plan.eval_rows is None else 0)

    @property
    def is_owed(self) -> bool:
        """Whether one was asked for, and whoever made it is gone."""
        return self._owed

    def is_due(self, version: int, seen: int) -> bool:
        """Whether to evaluate now; if so, the next one is later.

        Args:
            version: steps that the region has applied.
            seen: rows that the averager has taken in.
        """
        self._open = self._pass(version, seen) or self._owed
        self._owed = False
        return self._open

    def ask_last(self, worker: int) -> bool:
        """Whether ``worker`` is to make the one after the end: nobody else does, or has."""
        if self.last != "owed":
            return False
        self.by, self.last = worker, "open"
        return True

    def skip_last(self) -> None:
        """There is none after the end."""
        self.last = "reported"

    def reported(self, *, final: bool = False) -> None:
        """The result of the newest one is there, or of the one after the end."""
        self._open = False
        if final:
            self.last = "reported"

    def lost(self, worker: int) -> None:
        """A worker is gone; what it was asked for and did not tell is owed by whoever comes."""
        if worker != self.by:
            return
        self._owed |= self._open
        self._open = False
        if self.last == "open":
            self.last = "owed"

    def _pass(self, version: int, seen: int) -> bool:
        """Whether a time to evaluate has been reached."""
        if self.rows is not None:
            due = seen // self.rows > self._next
            self._next = seen // self.rows
            return due
        if not self.every or version < self._next:
            return False
        self._next = (version // self.every + 1) * self.every
        return True

    def resume(self, version: int) -> None:
        """Go on at ``version``; what is due there has not been done."""
        if self.rows is None and self.every:
            self._next = -(-max(version, 1) // self.every) * self.every


@dataclass(slots=True)
class RegionWork:
    """Who of a region's workers computes which rows, what they have pushed, and who goes home when.

    Rows are booked by share of a step (see `geo_ray.training.assignment`), never by who computes
    them.

    Attributes:
        plan: what the region is to do.
        copy_partition: lets the shards copy what was pushed for a share, whose place is needed.
        ledger: the sample books.
        pushes: what was pushed and is in no step yet, by share.
        workers: the workers.
        evals: when somebody evaluates.
        rule: of late workers.
    """

    plan: ServerPlan
    copy_partition: Callable[[int], None]
    ledger: Ledger = field(default_factory=Ledger)
    pushes: dict[int, StepReport] = field(default_factory=dict)
    workers: ActiveWorkers = field(init=False)
    evals: EvalTimes = field(init=False)
    rule: Stragglers = field(init=False)
    _late: dict[int, Span] = field(default_factory=dict)  # what the step was made without

    def __post_init__(self) -> None:
        plan = self.plan
        self.workers = ActiveWorkers(plan.num_workers, plan.elastic)
        self.evals = EvalTimes.of(plan)
        self.rule = Stragglers.of(plan.stragglers, plan.num_workers)

    # -------------------------------------------------------------- who is there

    def join(self, worker: int) -> None:
        """See `Server.join`."""
        self.leave(worker)
        dropped = self.workers.join(worker)
        if dropped is not None:  # it lay in the memory of the one before
            self.pushes.pop(dropped, None)

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        partition = self.workers.leave(worker)
        self._late.pop(worker, None)
        self.evals.lost(worker)
        if self.plan.elastic is None:
            return
        if self.plan.mode == "async" and worker not in self.pushes:
            self.ledger.take_back(worker)
        elif self.workers.follows and partition is not None:
            self.workers.give_up(partition)
            self.ledger.take_back(partition)

    def drain(self, worker: int) -> None:
        """See `Server.drain`."""
        if worker in self.workers.joined:
            self.workers.leaving.add(worker)

    def changed_ranks(self, version: int) -> ActiveWorkersChanged | None:
        """Who takes part after ``version`` steps, if that has changed."""
        ranks = self.workers.changed_ranks()
        if ranks is None:
            return None
        alone = self.plan.mode == "async" or self.workers.follows
        takers = ranks if alone else range(self.plan.num_workers)
        return ActiveWorkersChanged(version, ranks, sum(map(self.plan.rows_per_push, takers)))

    @property
    def is_computing(self) -> bool:
        """Whether anybody computes what may still count."""
        return bool(self.workers.computes)

    @property
    def is_still(self) -> bool:
        """Whether all workers are here, and none of them computes anything."""
        return not (self.workers.awaited or self.workers.computes or self._late)

    # -------------------------------------------------------------- what they compute

    def partition_of(self, worker: int) -> int:
        """See `Server.partition_of`."""
        return self.workers.computes.get(worker, worker)

    def push(self, worker: int, report: StepReport) -> None:
        """See `Server.push`."""
        if self._late.pop(worker, None) == report.span:
            self.workers.idle.add(worker)
            return
        partition = self.partition_of(worker)
        held = self.ledger.in_flight.get(partition)
        if held != report.span or worker not in self.workers.computes:
            raise InvariantError(f"worker {worker} pushed {report.span}, it was assigned {held}")
        self.workers.pushed(worker)
        self.pushes[partition] = report

    def ready(self) -> list[int]:
        """The shares whose gradients make the next step, lowest rank first; empty if not yet."""
        if self.plan.mode == "async":
            return sorted(self.pushes)[:1]
        waits = self.plan.stragglers is None
        is_enough = (
            self.workers.is_whole(self.pushes) if waits else self.rule.is_enough(self.pushes)
        )
        return sorted(self.pushes) if is_enough else []

    def settle(
        self, reports: Mapping[int, StepReport], contributions: list[Contribution]
    ) -> tuple[int, float]:
        """Book a step that was made of these.

        Returns:
            The rows in it, and the seconds of the worker that computed longest.
        """
        whole = self.rule.holds_all_rows(contributions)
        samples = 0
        for partition, report in reports.items():
            del self.pushes[partition]
            refused = None if whole else report.refused
            span = self.ledger.settle(partition, refused)
            samples += 0 if refused else span.count
        self.workers.applied(reports)
        if self.plan.mode == "sync":
            samples += self._do_without(None if whole else "late")
        return samples, self.workers.compute_s(reports)

    def _do_without(self, lost: str | None) -> int:
        """Book what workers hold that the step did not wait for; how many rows are in it anyway."""
        samples = 0
        for worker in sorted(self.ledger.in_flight):
            span = self.ledger.settle(worker, lost)
            samples += 0 if lost else span.count
            if self.workers.computes.pop(worker, None) is not None:
                self._late[worker] = span
        return samples

    def assign(self, version: int, seen: int) -> list[Assignment]:
        """Next rows for idle workers; in sync mode to all together, so that ranks get their own.

        Args:
            version: steps that the parameters hold.
            seen: rows that the averager has taken in.
        """
        dealt, readers = self._dealt()
        rows_of = self.plan.rows_per_push
        spans = {
            partition: self.ledger.assign(partition, rows_of(partition)) for partition in readers
        }
        return [self._work(w, partition, spans, version, seen) for w, partition in dealt.items()]

    def _dealt(self) -> tuple[dict[int, int], list[int]]:
        """Shares by who begins them now, and all shares that have rows in this step."""
        workers, stragglers = self.workers, self.plan.stragglers
        if self.plan.mode == "sync" and stragglers is None:
            if not workers.may_work:
                return {}, []
            workers.begin()
            for partition in [held for held in self.ledger.in_flight if held not in workers.step]:
                self.ledger.take_back(partition)  # of somebody who was there before a resume
            return workers.deal(self.pushes), sorted(workers.step)
        ready = workers.elastic is None or workers.may_work
        if stragglers is not None:
            ready = len(workers.joined) >= self.rule.needed
        dealt = {worker: worker for worker in sorted(workers.idle & workers.present) if ready}
        return dealt, list(self.rule.readers(list(dealt)))

    def _work(
        self, worker: int, partition: int, spans: Mapping[int, Span], version: int, seen: int
    ) -> Assignment:
        uncopied = self.workers.take(worker, partition)
        if uncopied is not None:
            self.copy_partition(uncopied)
        evaluate = self._evaluates(worker) and self.evals.is_due(version, seen)
        if evaluate:
            self.evals.by = worker
        judged = evaluate and self.plan.evaluates_outer
        parts = self.rule.parts_of(partition, spans)
        other = None if partition == worker else partition
        return Assignment(
            worker,
            version,
            spans[partition],
            evaluate,
            eval_params=judged,
            parts=parts,
            partition=other,
        )

    def _evaluates(self, worker: int) -> bool:
        """Whether it falls to ``worker`` to evaluate: the first one, or whoever is there."""
        if self.plan.elastic is None:
            return worker == 0
        return worker == min(self.workers.present or self.workers.joined) or self.evals.is_owed

    # -------------------------------------------------------------- who goes home

    def departing(self, version: int) -> list[Assignment]:
        """Send home those that are to leave; what they pushed stays."""
        going = self.workers.departing()
        for uncopied in going.values():
            if uncopied is not None:
                self.copy_partition(uncopied)
        return [Assignment(worker, version, None, done=True) for worker in going]

    def finish_all(self, version: int, *, done: bool) -> list[Assignment]:
        """Send workers home: those that wait, and those that come back too late to count.

        Args:
            version: steps that the parameters hold.
            done: the region is at its end: somebody evaluates the final model.
        """
        answers = []
        for partition in sorted(self.pushes):
            self.ledger.settle(partition, "after_end")
        for worker in sorted(self.workers.waiting):
            last = done and self._evaluates(worker) and self.evals.ask_last(worker)
            answers.append(Assignment(worker, version, None, evaluate=last, done=True))
        self.workers.joined -= self.workers.waiting
        self.workers.idle.clear()
        self.workers.uncopied.clear()
        self.pushes.clear()
        return answers

    def restore(self, ledger: dict[str, object], version: int) -> None:
        """Go on with saved books, after ``version`` steps.

        Workers join anew and get the rows that were in flight; those of ranks that are no more go
        to whoever asks first.
        """
        self.ledger = Ledger.restore(ledger)
        for partition in [s for s in self.ledger.in_flight if s >= self.plan.num_workers]:
            self.ledger.take_back(partition)
        self.evals.resume(version)
