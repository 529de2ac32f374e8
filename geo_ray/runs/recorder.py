"""Records the events of a run: first in the log file, then in other sinks.

Also describes the run's links in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geo_ray.base.load import digest
from geo_ray.experiment.experiment import Experiment
from geo_ray.telemetry.event_log import EventLog
from geo_ray.telemetry.events import Event
from geo_ray.transport.emulation import LinkSpec


def links_text(experiment: Experiment, *, simulated: bool) -> str:
    """Describe a run's links and steps, for its header.

    Args:
        experiment: the run.
        simulated: whether it runs on a virtual clock.
    """
    parts = [_links(experiment, simulated=simulated), _steps(experiment, simulated=simulated)]
    return "; ".join(part for part in parts if part)


def _links(experiment: Experiment, *, simulated: bool) -> str:
    names = experiment.region_names
    if len(names) == 1:
        return "no links: one region"
    pairs = len(names) * (len(names) - 1)
    specs = list(experiment.links().values())
    if not specs:
        if simulated:
            return "links without delay and limit: no `emulate` is configured"
        return "real links: nothing is emulated"
    word = "assumed" if simulated else "emulated"
    some = "" if len(specs) == pairs else f" in {len(specs)} of {pairs} directions"
    text = f"links {word}{some}: {_facts(specs)}"
    if not simulated and experiment.cluster.kind != "local":
        text += ", which slows down the cluster's links"
    if len(specs) < pairs:
        text += "; the others without delay and limit" if simulated else "; the others are real"
    return text


def _facts(specs: Iterable[LinkSpec]) -> str:
    chosen = list(specs)
    rates = [spec.rate_mbps for spec in chosen]
    limited = [rate for rate in rates if rate is not None]
    parts = ["no limit" if None in rates else "", _span(limited, 1.0, "Mbit/s")]
    parts.append(_span([spec.delay_s for spec in chosen], 1e3, "ms one way"))
    if any(spec.jitter_s for spec in chosen):
        parts.append(_span([spec.jitter_s for spec in chosen], 1e3, "ms jitter"))
    if any(spec.loss for spec in chosen):
        parts.append(_span([spec.loss for spec in chosen], 1e2, "% loss"))
    if any(spec.outages for spec in chosen):
        parts.append("with outages")
    return ", ".join(part for part in parts if part)


def _span(values: list[float], factor: float, unit: str) -> str:
    if not values:
        return ""
    low, high = min(values) * factor, max(values) * factor
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"


def _steps(experiment: Experiment, *, simulated: bool) -> str:
    emulated = [experiment.step_s(name) for name in experiment.region_names]
    known = [step_s for step_s in emulated if step_s is not None]
    if not known:
        return "steps as measured on this machine" if simulated else ""
    some = "" if len(known) == len(emulated) else f" in {len(known)} of {len(emulated)} regions"
    word = "take" if simulated else "padded to"
    return f"steps {word} {_span(known, 1.0, 's')}{some}"


Sink = Callable[[Event], None]


class Recorder:
    """Writes events to the log and passes them to sinks.

    Args:
        log: the run's event log.
        sinks: receive every event after it is written, such as `Progress.feed`.
        check: called before every event; raises if this process may no longer write to the run.
        known: events of the log that may be reported again, and are not written twice.
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
        """Record one event.

        Raises:
            RunDirectoryError: the log cannot be written.
            LeaseLostError: another process has taken over the run.
        """
        self.check()
        known = self._known.get(_mark(Event(kind, t_s, fields))) if self._known else None
        if known is not None:
            return known
        event = self._log.write(kind, t_s, **fields)
        self.pass_on(event)
        return event

    def pass_on(self, event: Event) -> None:
        """Pass a written event to the sinks."""
        for sink in self._sinks:
            sink(event)

    def started(
        self, experiment: Experiment, run_name: str, t_s: float, *, simulated: bool, **more: Any
    ) -> Event:
        """Record the start or resume of a run."""
        up, down = experiment.codec.up, experiment.codec.down
        each = experiment.train.steps
        alone = experiment.train.mode == "sync"  # else every worker's steps count for the region
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
            averager="" if experiment.is_served else experiment.averager_region,
            steps={r.name: each * (1 if alone else r.workers) for r in experiment.present},
            links=links_text(experiment, simulated=simulated),
            codec={"up": up.kind if up else None, "down": down.kind if down else None},
            **more,
        )


def _mark(event: Event) -> tuple[object, ...]:
    """Return the identity of an event within its run."""
    about = tuple(event.fields.get(name) for name in ("region", "step", "worker", "round"))
    return (event.kind, round(event.t_s, 6), *about)
