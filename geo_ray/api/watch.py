"""Who watches a run from Python: a function that takes its events, a live table, or nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.console import Console

from geo_ray.base.output import outliving
from geo_ray.base.text import printable
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.progress import Progress

if TYPE_CHECKING:
    from geo_ray.experiment.experiment import Experiment

OnEvent: TypeAlias = Callable[[Event], None]
ShowProgress: TypeAlias = bool | Literal["plain"]
"""True: as the command line shows a run, on standard error; "plain": in lines; False: not."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a run in progress tells, and to whom.

    Attributes:
        status: told each phase.
        awaiting: told who is awaited in a phase of the start-up.
        sinks: given every event.
        note: told what is to stay to be read.
    """

    status: Callable[[str], None]
    awaiting: Callable[[str, int, int, Sequence[str]], None]
    sinks: tuple[OnEvent, ...]
    note: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunWatch:
    """What the caller asked for.

    Attributes:
        progress: whether people are shown the run.
        on_event: given a copy of every event, in the caller's thread; what it raises ends the run.
    """

    progress: ShowProgress = False
    on_event: OnEvent | None = None

    def tell(self, text: str) -> None:
        """Say a line to people, if they are shown the run."""
        if self.progress:
            console_of_progress().print(
                printable(text), highlight=False, markup=False, soft_wrap=True
            )

    @contextmanager
    def over(self, experiment: Experiment) -> Iterator[Watched]:
        """RunWatch one run of ``experiment``."""
        sinks = () if self.on_event is None else (_with_copies(self.on_event),)
        if not self.progress:
            yield Watched(_ignore_text, _nobody, sinks, _ignore_text)
            return
        train = experiment.train
        most = 1 if train.mode == "sync" else max(r.workers for r in experiment.regions)
        plain = True if self.progress == "plain" else None
        console = console_of_progress()
        with Progress(train.steps * most, experiment.present_names, console, plain) as shown:
            yield Watched(shown.status, shown.awaiting, (shown.feed, *sinks), shown.note)
            shown.status("")


def console_of_progress() -> Console:
    """Standard error for people; if they close it, nothing else ends."""
    return Console(file=outliving(sys.stderr))


def _with_copies(on_event: OnEvent) -> OnEvent:
    """Whatever the caller does to an event, the run's books do not change with it."""
    return lambda event: on_event(replace(event, fields=deepcopy(dict(event.fields))))


def _ignore_text(text: str) -> None:
    pass


def _nobody(phase: str, done: int, total: int, names: Sequence[str]) -> None:
    pass
