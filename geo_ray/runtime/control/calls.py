"""Calls of actors: to wait for several with a deadline, and what is said of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from geo_ray.clock import Clock, SystemClock
from geo_ray.errors import RegionLostError
from geo_ray.runtime.cluster.ray_failures import failure_of
from geo_ray.runtime.cluster.ray_threads import check_not_closing, is_ray_thread

Handle = Any  # a Ray actor handle; Ray gives it no useful type
Ref = Any
Tell = Callable[[str, int, int, Sequence[str]], None]
"""``tell(phase, done, total, names of those that are awaited)``, again and again in a wait."""
Heard = Callable[[int, int, Sequence[str]], None]
"""A `Tell` of one phase."""
Wait = Callable[[Sequence[Ref], float], Iterable[Ref]]
"""``wait(calls, seconds)``: those that are done after so many seconds, or as soon as all are."""
_TELL_EVERY_S = 0.5


def tell_nobody(phase: str, done: int, total: int, names: Sequence[str]) -> None:
    """A `Tell` that shows nothing."""


def collect(
    refs: Mapping[Any, Ref], timeout_s: float, heard: Heard | None = None
) -> dict[Any, Any]:
    """The values of several calls, by the same keys.

    Args:
        refs: the calls.
        timeout_s: longest wait.
        heard: hears how many are done, of how many, and the keys of the others.

    Raises:
        GeoRayError: the one that an actor raised.
        RegionLostError: if an actor died or did not answer in time.
        HeadLostError: if Ray itself does not answer.
        InvariantError: for every other failure of a call.
    """
    late: list[str] = []
    try:
        if heard is not None or is_ray_thread():
            late = watch(refs, timeout_s, heard or _show_nobody, _ended, SystemClock())
        values = ray.get(list(refs.values()), timeout=0 if late else timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        who = f": {', '.join(late)}" if late else ""
        raise RegionLostError(f"actors did not answer within {timeout_s:g} s{who}") from error
    except ray.exceptions.RayError as error:
        raise failure_of(error).as_error() from error
    return dict(zip(refs, values, strict=True))


def watch(
    refs: Mapping[Any, Ref], timeout_s: float, heard: Heard, wait: Wait, clock: Clock
) -> list[str]:
    """Wait for calls, telling every so often which are awaited.

    In a thread of a `RayThreads` the wait ends early when that is closed.

    Args:
        refs: the calls by key.
        timeout_s: longest wait.
        heard: see `collect`.
        wait: how to wait for calls.
        clock: measures the wait.

    Returns:
        The keys of the calls that are not done.
    """
    deadline_s = clock.now_s() + timeout_s
    awaited = {ref: str(key) for key, ref in refs.items()}
    while True:
        check_not_closing()
        left_s = deadline_s - clock.now_s()
        heard(len(refs) - len(awaited), len(refs), list(awaited.values()))
        if not awaited or left_s <= 0:
            return list(awaited.values())
        for ref in wait(list(awaited), min(_TELL_EVERY_S, left_s)):
            del awaited[ref]


def _show_nobody(done: int, total: int, names: Sequence[str]) -> None:
    """A `Heard` that shows nothing."""


def _ended(refs: Sequence[Ref], timeout_s: float) -> Sequence[Ref]:
    """Those that have ended in this time; an error that one ended with is raised."""
    done: Sequence[Ref]
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    ray.get(list(done))
    return done


def kill(handle: Handle) -> None:
    """End an actor; it may be dead already, and None is nobody."""
    if handle is None:
        return
    try:
        ray.kill(handle, no_restart=True)
    except Exception:  # dead actors, dead clusters: gone is what we want
        return
