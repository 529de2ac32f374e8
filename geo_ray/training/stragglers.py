"""Late workers: how long steps usually take, and whether to wait, skip or decode.

- Without a section: the step waits for every worker.
- ``backup_workers``: the first ``workers - spares`` gradients make the step.
- ``gradient_coding``: each worker computes ``tolerate + 1`` partitions; the exact mean
  is decoded from any ``workers - tolerate`` workers.

Source: Chen et al., "Revisiting Distributed Synchronous SGD" (2016); Tandon et al. (ICML 2017);
both reconstructed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Final, Literal

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.base.types import CodedPartition, Span, StepReport
from geo_ray.strategies.gradient_code import GradientCode, cyclic, fractional_repetition
from geo_ray.training.shard import Contribution

_EXACT = 1e-6


class BackupWorkers(StrictModel):
    """Make a step of the first gradients."""

    kind: Literal["backup_workers"] = "backup_workers"
    spares: int = Field(1, ge=1, description="workers that a step does not wait for")


class GradientCoding(StrictModel):
    """Compute rows more than once, so that late workers are not missed."""

    kind: Literal["gradient_coding"] = "gradient_coding"
    tolerate: int = Field(1, ge=1, description="workers that a step does not wait for")
    scheme: Literal["auto", "fractional", "cyclic"] = Field(
        "auto", description="fractional needs workers to be a multiple of tolerate + 1"
    )


StragglersConfig = Annotated[BackupWorkers | GradientCoding, Field(discriminator="kind")]
"""The ``train.stragglers`` section of a configuration."""


def code_of(config: GradientCoding, num_workers: int) -> GradientCode:
    """The code of a region with so many workers.

    Raises:
        ConfigError: the scheme does not fit.
    """
    even = num_workers % (config.tolerate + 1) == 0
    if config.scheme == "fractional" or (config.scheme == "auto" and even):
        return fractional_repetition(num_workers, config.tolerate)
    return cyclic(num_workers, config.tolerate)


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The rule of one region.

    Attributes:
        num_workers: of the region.
        needed: pushes that make a step.
        code: of gradient coding; None without.
    """

    num_workers: int
    needed: int
    code: GradientCode | None = None

    @classmethod
    def of(cls, config: BackupWorkers | GradientCoding | None, num_workers: int) -> Stragglers:
        """Return the rule of a region's configuration."""
        if config is None:
            return cls(num_workers, num_workers)
        if isinstance(config, BackupWorkers):
            return cls(num_workers, num_workers - config.spares)
        code = code_of(config, num_workers)
        return cls(num_workers, num_workers - config.tolerate, code)

    def holds_all_rows(self, contributions: Sequence[Contribution]) -> bool:
        """Tell whether a step has the rows of all workers, even of those it did not wait for."""
        return self.code is not None and any(c.num_samples for c in contributions)

    def readers(self, takers: Sequence[int]) -> Sequence[int]:
        """Whose rows are computed now: with a code also those of workers that are still late."""
        return takers if self.code is None or not takers else range(self.num_workers)

    def parts_of(self, worker: int, spans: Mapping[int, Span]) -> tuple[CodedPartition, ...]:
        """Return rows and weights of ``worker``'s push; empty for a plain gradient."""
        if self.code is None:
            return ()
        pairs = zip(self.code.partitions_of(worker), self.code.weights_of(worker), strict=True)
        return tuple(CodedPartition(spans[partition], weight) for partition, weight in pairs)

    def is_enough(self, pushes: Mapping[int, StepReport]) -> bool:
        """Tell whether these pushes make a step."""
        return sum(not report.refused for report in pushes.values()) >= self.needed or (
            len(pushes) == self.num_workers
        )

    def contributions(self, pushes: Mapping[int, StepReport]) -> list[Contribution]:
        """Return the weight of each push."""
        if self.code is None:
            return [
                Contribution(worker, 0 if report.refused else report.span.count)
                for worker, report in pushes.items()
            ]
        alive = [worker for worker, report in pushes.items() if not report.refused]
        weights, error = self.code.decode(alive) if alive else ((), 1.0)
        weight_of = dict(zip(alive, weights, strict=True)) if error < _EXACT else {}
        return [
            Contribution(
                worker,
                report.span.count if worker in weight_of else 0,
                weight_of.get(worker, 0.0) / self.num_workers,
            )
            for worker, report in pushes.items()
        ]


def stragglers_problems(
    config: BackupWorkers | GradientCoding, workers: Mapping[str, int], mode: str
) -> Iterator[str]:
    """Yield what the regions do not support."""
    if mode != "sync":
        yield (
            "train.stragglers: requires train.mode sync; in async mode no step waits for workers"
        )
    missing = config.spares if isinstance(config, BackupWorkers) else config.tolerate
    few: Sequence[str] = [name for name, count in workers.items() if count <= missing]
    if few:
        yield (
            f"train.stragglers: {', '.join(few)} would have no gradient in some steps: give each "
            f"region more than {missing} workers"
        )
    if isinstance(config, GradientCoding) and config.scheme == "fractional":
        odd = [name for name, count in workers.items() if count % (config.tolerate + 1)]
        if odd:
            yield (
                f"train.stragglers.scheme: fractional needs a multiple of {config.tolerate + 1} "
                f"workers, {', '.join(odd)} has another number: use cyclic"
            )


READING: Final = "reading"
"""State that a worker reports while it waits for its rows."""
_NEWEST: Final = 32


@dataclass(frozen=True, slots=True)
class Computing:
    """Present work of one worker.

    Attributes:
        attempt: incarnation of the worker.
        for_s: seconds since it received its rows.
        is_usual: whether its step should take the usual time.
    """

    attempt: int
    for_s: float
    is_usual: bool


@dataclass(slots=True)
class _Work:
    attempt: int
    began_s: float
    is_usual: bool
    evaluates: bool


class WorkTimes:
    """Measures the compute time of each worker of a region. Pure.

    The usual time is the median over the newest steps. A worker's first step, which may compile or
    fetch, and steps after an evaluation are excluded. Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Work] = {}
        self._attempts: dict[int, int] = {}  # of workers that have made a step
        self._took_s: deque[float] = deque(maxlen=_NEWEST)

    def begin(self, worker: int, attempt: int, now_s: float, *, evaluates: bool) -> None:
        """A worker was given rows.

        Args:
            worker: its rank.
            attempt: its incarnation.
            now_s: the present time.
            evaluates: whether it evaluates first.
        """
        is_first = self._attempts.get(worker) != attempt
        self._open[worker] = _Work(attempt, now_s, not (is_first or evaluates), evaluates)

    def evaluated(self, worker: int, now_s: float) -> None:
        """Record the end of a worker's evaluation; its step begins."""
        work = self._open.get(worker)
        if work is not None and work.evaluates:
            work.began_s, work.evaluates = now_s, False
            work.is_usual = self._attempts.get(worker) == work.attempt

    def end(self, worker: int, now_s: float) -> None:
        """Record a worker's push."""
        work = self._open.pop(worker, None)
        if work is None:
            return
        self._attempts[worker] = work.attempt
        if work.is_usual:
            self._took_s.append(now_s - work.began_s)

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone or waits for others."""
        self._open.pop(worker, None)

    @property
    def usual_s(self) -> float | None:
        """The usual time of a step; None until one was measured."""
        return median(self._took_s) if self._took_s else None

    def computing(self, now_s: float) -> Mapping[int, Computing]:
        """The workers that compute, by rank."""
        return {
            worker: Computing(work.attempt, now_s - work.began_s, work.is_usual)
            for worker, work in self._open.items()
        }
