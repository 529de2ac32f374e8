"""A new driver attaches to the processes of a run that go on without one.

1. It has the run's lease. The steward, then every server and bridge, is told its epoch, and
refuses the driver before from then on.
2. `why_anew` decides. If there is a reason, the steward ends all.
3. Else all that the book does not name ends: the driver before had not finished with it.
4. What the driver before may have heard, and not written, is told again; what the log has is
not written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.errors import LeaseLostError
from geo_ray.job.eval_notes import EvalMark
from geo_ray.observe.events.schema import Event
from geo_ray.runtime.cluster.ray_failures import failure_of
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import Handle
from geo_ray.runtime.desk.part_desk import PartDesk
from geo_ray.runtime.steward.attach_policy import Living, why_anew
from geo_ray.runtime.steward.book import Kept, RunBook
from geo_ray.runtime.steward.line import StewardLine

_ANSWER_S: Final = 15.0
_KNOWN: Final = 20_000  # events of the log that processes may tell again


@dataclass(frozen=True, slots=True)
class Attached:
    """A run that goes on.

    Attributes:
        experiment: its configuration.
        actors: its processes.
        book: what the driver before has noted.
        steps: of each region, as far as it answers.
        stretch: its events since it last began.
    """

    experiment: Experiment
    actors: ActorGroup
    book: RunBook
    steps: Mapping[str, int]
    stretch: list[Event]

    @property
    def known(self) -> list[Event]:
        """The newest events that are written."""
        return self.stretch[-_KNOWN:]

    @property
    def evaluated(self) -> frozenset[EvalMark]:
        """Evaluations that are written."""
        evals = [event for event in self.stretch if event.kind == "eval"]
        return frozenset((e["step"], e["region"], bool(e.fields.get("final"))) for e in evals)

    @property
    def sent(self) -> dict[tuple[str, str], dict[str, int]]:
        """Bytes that were told to have been sent so far, by link and class."""
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for event in self.stretch:
            if event.kind == "wan":
                sums.setdefault((event["src"], event["dst"]), {}).update(event["bytes_by_class"])
        return sums

    @property
    def requested(self) -> set[tuple[str, int]]:
        """Places of workers that were requested, and of which nothing says that they work."""
        places: set[tuple[str, int]] = set()
        for event in self.stretch:
            if event.kind == "worker_requested":
                places.add((event["region"], event["worker"]))
            elif event.kind == "worker_replaced":
                places.discard((event["region"], event["worker"]))
        return places

    @property
    def startup_s(self) -> float:
        """Of the run."""
        begun = next((event for event in self.stretch if event.kind == "run_started"), None)
        return float(begun.fields.get("startup_s") or 0.0) if begun is not None else 0.0

    @property
    def last_s(self) -> float:
        """When something was written last."""
        return max((event.t_s for event in self.stretch), default=0.0)


def attach(
    line: StewardLine,
    driver: int,
    experiment: Experiment,
    shaped: Experiment,
    stretch: Iterable[Event],
    desk: PartDesk | None,
) -> Attached | str:
    """Go on with the processes of a run.

    Args:
        line: to its steward.
        driver: epoch of this driver's lease, which holds.
        experiment: the configuration that is asked for.
        shaped: the same as processes are given it.
        stretch: the run's events since it last began.
        desk: takes parts of newcomers in; None: they go to stores.

    Returns:
        The run; or why it must begin anew from a checkpoint, whatever there was.

    Raises:
        RegionLostError: the steward has ended.
        LeaseLostError: another driver has come since.
    """
    kept = line.attach()
    book = kept.book
    if book is None:
        return "it had not begun to train"
    events = list(stretch)
    as_begun = _as_begun(experiment, book)
    statuses = _attended(book.servers, driver)
    home = statuses.get(("bridge", book.where.home.region), {})
    phases = {region: str(s["phase"]) for (role, region), s in statuses.items() if role == "ps"}
    living = Living(
        digest(_as_begun(shaped, book)) == digest(book.spec.experiment),
        book.is_changing,
        home.get("view"),
        phases,
        {event.kind for event in events},
        book.uses_desk,
    )
    why = why_anew(living)
    if why is not None:
        line.clear()
        return why
    line.keep_only(book.handles)
    actors = _group(line, kept, book, driver, desk)
    for primary in actors.primaries.values():
        primary.pause.remote(False)  # who is missing is looked at anew
    steps = {
        region: int(s.get("version", 0)) for (role, region), s in statuses.items() if role == "ps"
    }
    return Attached(as_begun, actors, book, steps, events)


def _as_begun(experiment: Experiment, book: RunBook) -> Experiment:
    """The configuration, of the regions and the averager that the run last began with."""
    begun = book.spec.experiment
    return experiment.model_copy(update={"members": begun.members, "averager": begun.averager})


def _group(
    line: StewardLine, kept: Kept, book: RunBook, driver: int, desk: PartDesk | None
) -> ActorGroup:
    spec = replace(book.spec, resume=None)
    group = ActorGroup(spec, dict(book.placed), line, line, driver, desk)
    group.go_on_as(kept, book)
    return group


def _attended(
    servers: Mapping[tuple[str, str], Handle], driver: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """What servers and bridges tell that live; the others are missed by who polls them."""
    calls = {key: handle.attend.remote(driver) for key, handle in servers.items()}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    came, told = set(ready), {}
    for key, call in calls.items():
        if call not in came:
            continue
        try:
            told[key] = ray.get(call)
        except ray.exceptions.RayError as error:
            failure = failure_of(error)
            was_overtaken = isinstance(failure.raised, LeaseLostError)
            if was_overtaken or not (failure.is_lost or failure.raised):
                raise failure.as_error() from error
    return told
