"""What a region's parameter server is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_ray.training.server.elastic import ElasticConfig
from geo_ray.training.server.stragglers import BackupWorkers, GradientCoding

Phase = Literal["training", "waiting", "must_send", "finishing", "done", "halted"]
"""waiting: for an answer; must_send: for an answer, then send; finishing: for the last answer."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """See the module's docstring.

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
        epoch: incarnation of this server.
        alone: no other region waits for this one, so it may stand still when it is exhausted.
        batches_per_push: batches that a worker takes for one push.
        stragglers: what to do about workers that are late.
        evaluates_outer: not the live parameters are evaluated, but those that the averager knows.
        goal: what the run is to do, in words; at a resume with another goal it goes on, although it
            was told to finish.
        last_round_is_last_word: there may be no exchange after that of the last step, which is the
            last word then: what codecs owe would be lost.
        has_last_word: there is always an exchange after the last step: one of that step would only
            make it later.
        never_waits: the region stands still for no exchange but the last.
        round_steps: steps from one exchange to the next, if all regions exchange after the same
            steps; None: they do not.
        noise_every: steps between measurements of gradient noise; None for the usual number.
        clip_mean_norm: largest norm of the mean of a step's gradients; None: any.
        elastic: whether steps go on while workers are missing; None: they wait for them.
        tells_norms: updates are gradients as they are, whose norms the averager wants to know.
    """

    region: str
    num_workers: int
    batch_size: int
    steps: int | None
    mode: Literal["sync", "async"] = "sync"
    eval_every: int = 0
    eval_rows: int | None = None
    max_refused: int = 3
    epoch: int = 1
    alone: bool = False
    batches_per_push: int = 1
    stragglers: BackupWorkers | GradientCoding | None = None
    evaluates_outer: bool = False
    batch_sizes: tuple[int, ...] | None = None
    elastic: ElasticConfig | None = None
    tells_norms: bool = False
    goal: str = ""
    noise_every: int | None = None
    last_round_is_last_word: bool = False
    has_last_word: bool = False
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
