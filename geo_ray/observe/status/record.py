"""The status of a run as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.observe.html_view import ShownModel
from geo_ray.observe.text import coarse_text, number_text

_WITHOUT_STEPS: Final = (
    "done",
    "lost",
    "left",
    "absent",
    "stopped",
    "trains on",  # nobody sees at what pace
    "joining",
    "did not join",
)

Ended = Literal["finished", "stopped", "failed"]


class DriverStatus(StrictModel):
    """Who drives a run, or did last."""

    host: str = Field(description="name of its machine")
    pid: int = Field(description="process id there")
    since: str = Field(description="when it took the run, by its own clock")
    epoch: int = Field(description="the how manieth driver of the run it is")
    alive: bool | None = Field(description="whether it drives the run now; null if not known")
    how: str = Field(description="why that is thought, in words")
    doing: str = Field(default="", description="what it was last doing")


class RegionStatus(StrictModel):
    """One region."""

    name: str
    state: str = Field(
        description="lost, left, absent, done, starting, computing, waiting, joining, leaving, "
        "stopped, did not join, or trains on (unseen)"
    )
    lost_cause: str | None = Field(default=None, description="why it is lost; null for a member")
    step: int = Field(description="newest step")
    steps: int | None = Field(default=None, description="those that it is to take, if told")
    exchanges: int = Field(description="with the averager; in rounds, the rounds")
    loss: float | None = Field(description="mean of its newest 20 steps; null before the first")
    samples: int = Field(description="whose steps stand")
    samples_per_s: float = Field(description="over its last 10 s")
    workers_lost: int = Field(description="how often a worker died")

    @property
    def has_pace(self) -> bool:
        """Whether its samples per second are known: it takes steps, and somebody sees it."""
        return self.state not in _WITHOUT_STEPS


class CheckpointStatus(StrictModel):
    """The newest checkpoint."""

    id: int
    step: int
    age_s: float | None = Field(description="run time since then; null if not known")
    bytes: int
    healthy: bool = Field(description="whether a resume takes it")


class TargetStatus(StrictModel):
    """The value that training goes for."""

    metric: str
    value: float
    direction: Literal["at_least", "at_most"]
    reached_s: float | None = Field(description="run time when it was first reached; null: not yet")


class SpentStatus(StrictModel):
    """What the run has taken so far."""

    seconds: float = Field(description="of the run's clock")
    wan_bytes: int = Field(description="between regions")
    usd: float | None = Field(description="null without a plan to follow, or without prices")


class RunStatus(ShownModel):
    """How a run stands."""

    run: str = Field(description="its directory")
    phase: str = Field(description="what it is doing, or how it ended")
    is_going: bool | None = Field(description="whether anybody drives it; null if not known")
    waits_s: float | None = Field(
        default=None,
        description="seconds for which it trains on without a driver and waits for one; null: not",
    )
    strategy: str | None = Field(default=None, description="null before training began")
    averager: str | None = Field(default=None, description="region where the averager lives")
    regions: tuple[RegionStatus, ...] = ()
    refused: str | None = Field(
        default=None, description="the newest change of members that was asked for, if refused"
    )
    round: int | None = Field(default=None, description="newest round; null if not in rounds")
    loss: float | None = Field(default=None, description="mean over regions, weighted by samples")
    samples_per_s: float = Field(default=0.0, description="of all members, over the last 10 s")
    left_s: float | None = Field(default=None, description="guessed from the slowest member's pace")
    eval_step: int | None = Field(default=None, description="of the newest evaluation")
    eval: dict[str, float | None] = Field(default={}, description="its metrics over all regions")
    target: TargetStatus | None = None
    checkpoint: CheckpointStatus | None = None
    spent: SpentStatus
    driver: DriverStatus | None = Field(default=None, description="null for a simulation")
    code: str | None = Field(default=None, description="of the error that ended the run")
    message: str | None = Field(
        default=None, description="of that error, or why it is stopping, or was cut off"
    )
    fix: str | None = Field(default=None, description="what to do about it")

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        line = f"{self.run}: {self.phase}"
        if self.loss is not None:
            line += f", loss {number_text(self.loss)}"
        if self.is_going and self.left_s is not None:
            line += f", about {coarse_text(self.left_s)} left"
        if self.code is not None:
            line += f", {self.code}"
        rows = [
            (
                each.name,
                each.state,
                f"{each.step:,}" + ("" if each.steps is None else f" of {each.steps:,}"),
                number_text(each.loss),
                number_text(each.samples_per_s) if each.has_pace else "-",
            )
            for each in self.regions
        ]
        return line, ("region", "state", "step", "loss", "samples/s"), rows
