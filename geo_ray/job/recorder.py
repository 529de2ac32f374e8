"""Where the events of a run go: the log file first, then whoever shows or counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.job.start.links_text import links_text
from geo_ray.observe.events.log import EventLog
from geo_ray.observe.events.schema import Event

Sink = Callable[[Event], None]


class Recorder:
    """Writes events down and passes them on.

    Args:
        log: the run's event log.
        sinks: take every event after it is written, such as `Progress.feed`.
        check: called before every event; raises if this process may not write to the run any more.
        known: events of the log that may be told again, and are not written twice.
    """

    def __init__(
        self,
        log: EventLog,
        sinks: Sequence[Sink] = (),
        check: Callable[[], None] = lambda: None,
        known: Iterable[Event] = (),
    ) -> None:
        self._log = log
        self._sinks = tuple(sinks)
        self.check = check
        self._known = {_mark(event): event for event in known}

    def emit(self, kind: str, t_s: float, **fields: Any) -> Event:
        """Take in one event.

        Raises:
            RunDirectoryError: if the log cannot be written.
            LeaseLostError: another process has taken the run over.
        """
        self.check()
        known = self._known.get(_mark(Event(kind, t_s, fields))) if self._known else None
        if known is not None:
            return known
        event = self._log.write(kind, t_s, **fields)
        self.pass_on(event)
        return event

    def pass_on(self, event: Event) -> None:
        """Let sinks have an event that is written."""
        for sink in self._sinks:
            sink(event)

    def started(
        self, experiment: Experiment, run_name: str, t_s: float, *, simulated: bool, **more: Any
    ) -> Event:
        """Note that a run, or its resumption, begins."""
        up, down = experiment.codec.up, experiment.codec.down
        each = experiment.train.steps
        alone = experiment.train.mode == "sync"  # else every worker's steps are the region's
        return self.emit(
            "run_started",
            t_s,
            run=run_name,
            digest=digest(experiment),
            strategy=experiment.strategy.kind,
            regions=list(experiment.present_names),
            task=experiment.task.use,
            seed=experiment.seed,
            simulated=simulated,
            averager=experiment.averager_region,
            steps={r.name: each * (1 if alone else r.workers) for r in experiment.present},
            links=links_text(experiment, simulated=simulated),
            codec={"up": up.kind if up else None, "down": down.kind if down else None},
            **more,
        )


def _mark(event: Event) -> tuple[object, ...]:
    """What tells an event from all others of its run."""
    about = tuple(event.fields.get(name) for name in ("region", "step", "worker", "round"))
    return (event.kind, round(event.t_s, 6), *about)
