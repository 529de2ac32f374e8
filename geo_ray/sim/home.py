"""Where the averager lives in a simulated run, and how it moves when that region is lost.

Rule: the averager that goes on has all that was taken in where it lived before, as a standby does
that is never behind (`averager.max_divergence` 0). Updates on their way to the former home are
lost; answers that it has sent may come until the others know that it is gone. Then every region
says its open request again.

Source: ours; docs/transfers.md, "A standby averager".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from geo_ray.config.experiment import Experiment
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.succession import next_standby
from geo_ray.training.averager.twin import become_twin, twin_of


@dataclass(slots=True)
class SimHome:
    """The averager, and its region.

    Attributes:
        experiment: the run.
        make: builds an averager that has done nothing yet.
        averager: the one at work.
        region: where it lives.
        epoch: 1, and one more after each move.
        is_down: whether its region is lost, and nobody has taken over yet.
    """

    experiment: Experiment
    make: Callable[[], Averager]
    averager: Averager = field(init=False)
    region: str = field(init=False)
    epoch: int = 1
    is_down: bool = False

    def __post_init__(self) -> None:
        self.averager, self.region = self.make(), self.experiment.averager_region

    def hears(self, epoch: int) -> bool:
        """Whether what was said to the home of ``epoch`` reaches the averager."""
        return epoch == self.epoch and not self.is_down

    def heir(self, alive: Collection[str]) -> str | None:
        """Who takes over from here; None if nobody can."""
        view = self.averager.view
        able = {name for name in view.members if name in alive and name not in view.joining}
        return next_standby(self.experiment.averager.named_standbys, able - {self.region}, {})

    def move(self, region: str) -> None:
        """The averager goes on in another region."""
        averager = self.make()
        become_twin(averager, twin_of(self.averager))
        averager.took_over(region)
        self.averager, self.region, self.is_down = averager, region, False
        self.epoch += 1
