"""Finds processes of a run that have stopped or hang, and names them to the user.

`Hangs` decides from what servers tell of their workers. A worker that is late is asked what it is
doing; one that has stopped does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.group_worker import GroupWorker
from geo_ray.runtime.control.hangs import NAMED_S, Hangs

_ASK_S: Final = 5.0
_HEARD_S: Final = 15.0  # for how long an answer counts
_TELL_AGAIN_S: Final = 60.0


@dataclass(slots=True)
class _Suspect:
    """A worker that is late.

    Attributes:
        worker: it.
        asked: the open question; None: none is.
        asked_s: when it was asked last.
        doing: its newest answer.
        heard_s: when that came.
    """

    worker: GroupWorker
    asked: Any = None
    asked_s: float = -_ASK_S
    doing: str | None = None
    heard_s: float = 0.0

    def ask(self, now_s: float) -> str | None:
        """What it is doing, as far as it has answered lately; nothing is waited for."""
        if self.asked is not None and ray.wait([self.asked], timeout=0)[0]:
            asked, self.asked = self.asked, None
            try:
                self.doing, self.heard_s = str(ray.get(asked)), now_s
            except ray.exceptions.RayError:  # it is gone, which is heard of by its work
                self.doing = None
        if self.asked is None and now_s - self.asked_s >= _ASK_S:
            self.asked, self.asked_s = self.worker.handle.doing.remote(), now_s
        return self.doing if now_s - self.heard_s < _HEARD_S else None


@dataclass(slots=True)
class HangWatch:
    """See the module's docstring.

    Attributes:
        actors: of the run.
        hangs: decides.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows the user a line; an empty one when nothing is late any more.
    """

    actors: ActorGroup
    hangs: Hangs
    emit: Callable[..., None]
    tell: Callable[[str], None]
    _suspects: dict[tuple[str, int], _Suspect] = field(default_factory=dict)
    _named: set[tuple[str, str]] = field(default_factory=set)  # region and process
    _told_s: float = 0.0

    def look(
        self,
        statuses: Mapping[str, Mapping[str, Any]],
        silent_s: Mapping[tuple[str, str], float],
    ) -> list[tuple[GroupWorker, str]]:
        """Look at all processes.

        Args:
            statuses: what parameter servers told of themselves just now, by region.
            silent_s: for how long servers and bridges have not answered, by (process, region).

        Returns:
            Workers to replace, with the cause.
        """
        now_s, hung = time.monotonic(), []
        late = {
            (region, process): f"the {process} of region '{region}' has not answered for {s:.0f} s"
            for (process, region), s in silent_s.items()
            if s >= NAMED_S
        }
        seconds = {(region, process): s for (process, region), s in silent_s.items()}
        for region, status in statuses.items():
            usual_s = status.get("usual_s")
            for rank, computing in status.get("computing", {}).items():
                place = region, rank
                worker = self.actors.workers.get(place)
                if worker is None or worker.epoch != computing.epoch or not worker.is_out:
                    continue
                is_late = self.hangs.judge(computing, usual_s, None) != "fine"
                if not is_late:
                    self._suspects.pop(place, None)
                    continue
                suspect = self._suspects.get(place)
                if suspect is None or suspect.worker is not worker:
                    suspect = self._suspects[place] = _Suspect(worker)
                doing = suspect.ask(now_s)
                cause = _cause(doing, computing.for_s, usual_s)
                if self.hangs.judge(computing, usual_s, doing) == "replaced":
                    del self._suspects[place]
                    hung.append((worker, cause))
                    continue
                late[region, f"worker {rank}"] = f"worker {region}/{rank}: {cause}"
                seconds[region, f"worker {rank}"] = computing.for_s
        # A region whose server is silent says nothing of its workers: what was named stays so.
        gone = {key for key in self._named - late.keys() if key[0] not in statuses}
        self._name(late, seconds, gone, now_s)
        return hung

    def _name(
        self,
        late: Mapping[tuple[str, str], str],
        seconds: Mapping[tuple[str, str], float],
        unknown: set[tuple[str, str]],
        now_s: float,
    ) -> None:
        fresh = late.keys() - self._named
        for region, process in sorted(fresh):
            self.emit(
                "process_silent",
                region=region,
                process=process,
                silent_s=seconds[region, process],
            )
        had_any, self._named = bool(self._named), {*late, *unknown}
        if late and (fresh or now_s - self._told_s >= _TELL_AGAIN_S):
            self._told_s = now_s
            self.tell("; ".join(late[key] for key in sorted(late)))
        elif had_any and not self._named:
            self.tell("")


def _cause(doing: str | None, for_s: float, usual_s: float | None) -> str:
    usual = "" if usual_s is None else f" (usually {usual_s:.2g} s)"
    what = "it does not answer" if doing is None else f"it is {doing}"
    return f"its step takes {for_s:.0f} s{usual}, and {what}"
