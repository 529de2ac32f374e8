"""What is done about a Ray head that does not answer.

Ray ends every process of a node that has not reached the head for a while; until then actors that
know each other go on. So the run has to be saved before, and a head that comes back is no event.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import ray

from geo_ray.errors import HeadLostError, RayUnreachableError
from geo_ray.runtime.cluster.address import wait_for_ray

_VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAYS_OWN_S: Final = 60.0
_TOLD_AFTER_S: Final = 4.0
_STOPS_AT: Final = 0.5
_LOOK_EVERY_S: Final = 2.0
_ANSWERS_WITHIN_S: Final = 2.0
_log = logging.getLogger(__name__)


class HeadState(Enum):
    """How it stands with the head."""

    THERE = "there"
    SILENT = "silent"
    """It may come back."""
    GONE = "gone"
    """The run has to be saved now."""


@dataclass(slots=True)
class HeadWatch:
    """Judges what a look at the head, every few seconds, has found. Pure.

    Attributes:
        patience_s: after so many seconds Ray ends its processes.
    """

    patience_s: float
    _answered_s: float | None = None

    @property
    def stops_after_s(self) -> float:
        """Seconds of silence after which the run is saved and ended."""
        return _STOPS_AT * self.patience_s

    def see(self, now_s: float, *, answers: bool) -> HeadState:
        """Judge.

        Args:
            now_s: of the own clock.
            answers: whether the head has answered just now.
        """
        if answers or self._answered_s is None:
            self._answered_s = now_s
            return HeadState.THERE
        silent_s = now_s - self._answered_s
        if silent_s >= self.stops_after_s:
            return HeadState.GONE
        return HeadState.SILENT if silent_s >= _TOLD_AFTER_S else HeadState.THERE


def patience_s(environ: Mapping[str, str] | None = None) -> float:
    """For how long Ray waits for a head, as this node was told."""
    text = (os.environ if environ is None else environ).get(_VARIABLE, "")
    try:
        return max(1.0, float(text))
    except ValueError:
        return _RAYS_OWN_S


@contextmanager
def watched_head(address: str, lost: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Look at the head of a run's cluster for as long as the run goes on, in a thread.

    Args:
        address: host:port of the head.
        lost: told once, by that thread, that the run has to be saved and ended now.
    """
    over = threading.Event()

    def keep_watch() -> None:
        watch, before = HeadWatch(patience_s()), HeadState.THERE
        while before is not HeadState.GONE and not over.wait(_LOOK_EVERY_S):
            state = watch.see(time.monotonic(), answers=answers(address))
            if state is before or over.is_set():
                continue
            before = state
            if state is HeadState.THERE:
                _log.warning("the Ray head at %s answers again", address)
            elif state is HeadState.SILENT:
                _log.warning(
                    "the Ray head at %s does not answer; training goes on, and is saved and ended "
                    "if it is not back within %.0f s",
                    address,
                    watch.stops_after_s,
                )
            else:
                silent_s = f"{watch.stops_after_s:.0f} s"
                lost(HeadLostError(f"the Ray head at {address} has not answered for {silent_s}"))

    thread = threading.Thread(target=keep_watch, name="head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def answers(address: str) -> bool:
    """Whether a Ray head answers there just now; takes 2 s at most."""
    try:
        wait_for_ray(address, _ANSWERS_WITHIN_S)
    except RayUnreachableError:
        return False
    return True


def head_answers() -> bool:
    """Whether the head of the cluster answers that this process is connected to."""
    return answers(ray.get_runtime_context().gcs_address)
