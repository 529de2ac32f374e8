"""The cluster of a run, and the steward of its processes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.ray_cluster.calls import Tell, tell_nobody
from geo_ray.ray_cluster.connect import ConnectedCluster, connect, watched_head
from geo_ray.ray_cluster.demand import by_label
from geo_ray.runs.recorder import Sink
from geo_ray.runs.requests import Interruption
from geo_ray.runs.status import patience_s
from geo_ray.runtime.driver.supervisor import StewardLine
from geo_ray.runtime.spec import demand_of


@dataclass(frozen=True, slots=True)
class Reporting:
    """Who wants to know.

    Attributes:
        status: told each phase of start-up and end.
        sinks: given every event.
        began_unix_s: time of day of the user's command.
        awaiting: told again and again who is awaited in a phase of the start-up.
        interruption: set to have the run saved and ended.
    """

    status: Callable[[str], None]
    sinks: Sequence[Sink]
    began_unix_s: float
    awaiting: Tell = tell_nobody
    interruption: Interruption = field(default_factory=Interruption)


def cluster_of(
    experiment: Experiment, status: Callable[[str], None]
) -> AbstractContextManager[ConnectedCluster]:
    """The cluster of a run, as `connect` makes it: large enough for all that the run asks for."""
    demands = by_label([demand_of(experiment, region) for region in experiment.regions])
    status("starting the cluster" if experiment.cluster.kind == "local" else "connecting")
    return connect(
        experiment.cluster,
        experiment.labels,
        namespace=f"geo_ray-{experiment.name}",
        cpus_per_region=max(demand.total().get("CPU", 0.0) for demand in demands),
    )


def with_its_driver(experiment: Experiment) -> Experiment:
    """The experiment as a trial that nobody goes on with: its processes end with its driver."""
    run = experiment.run.model_copy(update={"driverless_s": None})
    return experiment.model_copy(update={"run": run})


@dataclass(slots=True)
class RunCluster:
    """The cluster of a run: there once it is asked for, and until the run has ended.

    Attributes:
        experiment: the run.
        reporting: hears that it starts, and that its head is gone.
        stack: ends it.
        stands: one that is there already.
        name: of the run's steward.
        is_watched: whether its head is.
    """

    experiment: Experiment
    reporting: Reporting
    stack: ExitStack
    stands: ConnectedCluster | None
    name: str
    is_watched: bool = False
    _line: StewardLine | None = None

    def get(self) -> ConnectedCluster:
        """The cluster; it is started if it is not there."""
        if self.stands is None:
            start = cluster_of(self.experiment, self.reporting.status)
            self.stands = self.stack.enter_context(start)
        if not self.is_watched:
            self.is_watched = True
            lost = self.reporting.interruption.set
            self.stack.enter_context(watched_head(self.stands.address, lost))
        return self.stands

    def living_steward(self, driver: int) -> StewardLine | None:
        """The line to the steward that a driver before this one had; None if there is none.

        Args:
            driver: epoch of this driver's lease.
        """
        if self._patience_s is None:
            return None
        stands = self.get()
        return self._take(StewardLine.find(self.name, stands.namespace, driver))

    def steward(self, driver: int, home: RegionConfig) -> StewardLine | None:
        """The line to a steward that may take a while to be there; None: the driver owns all.

        Args:
            driver: as above; it must be held, since a steward that has the name is ended.
            home: the averager's region.

        Raises:
            LeaseLostError: another driver commands it by now.
        """
        if self._patience_s is None or (self._line is not None and self._line.lives()):
            return self._line
        namespace = self.get().namespace
        start = partial(StewardLine.start, self.name, namespace, driver)
        return self._take(start(home.label, self._patience_s))

    @property
    def _patience_s(self) -> float | None:
        """A cluster that is made for the run ends with its driver anyway."""
        return patience_s(self.experiment.cluster, self.experiment.run)

    def _take(self, line: StewardLine | None) -> StewardLine | None:
        if self._line is not None:
            self._line.leave()
        self._line = line
        if line is not None:
            self.stack.callback(line.end)
        return line
