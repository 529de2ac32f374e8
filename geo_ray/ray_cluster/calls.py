"""Calls to actors: deadlines, polling, failure classes, and threads that call Ray.

Classify failures only by `failure_of`: for example, `OutOfMemoryError` and `NodeDiedError` are not
`RayActorError`. After ``ray.shutdown()`` a Ray call from another thread reconnects or aborts the
process, so every thread that calls Ray is started by a `RayThreads`, which is closed first; waits
call `check_not_closing`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

import ray
from ray import exceptions

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import (
    GeoRayError,
    HeadLostError,
    InvariantError,
    LeaseLostError,
    RegionLostError,
)
from geo_ray.base.user_code import error_summary


class FailureKind(Enum):
    """What a failed call implies for the called process."""

    RAISED = "raised"
    """It is running, and the call raised an error of geo_ray."""
    PROCESS_DIED = "process died"
    OUT_OF_MEMORY = "out of memory"
    """Ray ended it because its node ran out of memory, or its answer did not fit in memory."""
    NODE_GONE = "node gone"
    NOT_STARTED = "not started"
    """Its place no longer exists, or its environment could not be created."""
    NO_ANSWER = "no answer"
    """It did not answer in time; it may be running."""
    CLUSTER_GONE = "cluster gone"
    """Ray itself does not answer this process."""
    BUG = "internal bug"


_LOST: Final = frozenset(
    {
        FailureKind.PROCESS_DIED,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.NODE_GONE,
        FailureKind.NOT_STARTED,
        FailureKind.NO_ANSWER,
    }
)

# The nearest listed class of an error counts. Other classes are bugs.
KINDS: Final[dict[type[exceptions.RayError], FailureKind]] = {
    exceptions.RayActorError: FailureKind.PROCESS_DIED,
    exceptions.ActorDiedError: FailureKind.PROCESS_DIED,
    exceptions.ActorUnavailableError: FailureKind.PROCESS_DIED,
    exceptions.WorkerCrashedError: FailureKind.PROCESS_DIED,
    exceptions.AsyncioActorExit: FailureKind.PROCESS_DIED,
    exceptions.TaskCancelledError: FailureKind.PROCESS_DIED,
    exceptions.OutOfMemoryError: FailureKind.OUT_OF_MEMORY,
    exceptions.ObjectStoreFullError: FailureKind.OUT_OF_MEMORY,
    exceptions.OutOfDiskError: FailureKind.OUT_OF_MEMORY,
    exceptions.NodeDiedError: FailureKind.NODE_GONE,
    exceptions.LocalRayletDiedError: FailureKind.NODE_GONE,
    exceptions.ObjectLostError: FailureKind.NODE_GONE,
    exceptions.ObjectFetchTimedOutError: FailureKind.NODE_GONE,
    exceptions.OwnerDiedError: FailureKind.NODE_GONE,
    exceptions.ObjectReconstructionFailedError: FailureKind.NODE_GONE,
    exceptions.RuntimeEnvSetupError: FailureKind.NOT_STARTED,
    exceptions.TaskPlacementGroupRemoved: FailureKind.NOT_STARTED,
    exceptions.ActorPlacementGroupRemoved: FailureKind.NOT_STARTED,
    exceptions.TaskUnschedulableError: FailureKind.NOT_STARTED,
    exceptions.ActorUnschedulableError: FailureKind.NOT_STARTED,
    exceptions.GetTimeoutError: FailureKind.NO_ANSWER,
    exceptions.PlasmaObjectNotAvailable: FailureKind.NO_ANSWER,
    exceptions.RayChannelTimeoutError: FailureKind.NO_ANSWER,
    exceptions.RpcError: FailureKind.CLUSTER_GONE,
    exceptions.AuthenticationError: FailureKind.CLUSTER_GONE,
    exceptions.RaySystemError: FailureKind.CLUSTER_GONE,
    exceptions.RayChannelError: FailureKind.BUG,
    exceptions.RayCgraphCapacityExceeded: FailureKind.BUG,
    exceptions.RayDirectTransportError: FailureKind.BUG,
    exceptions.StreamingGeneratorReplayInconsistentError: FailureKind.BUG,
    exceptions.ReferenceCountingAssertionError: FailureKind.BUG,
    exceptions.ObjectFreedError: FailureKind.BUG,
    exceptions.CrossLanguageError: FailureKind.BUG,
    exceptions.UserCodeException: FailureKind.BUG,
    exceptions.UnserializableException: FailureKind.BUG,
    exceptions.PendingCallsLimitExceeded: FailureKind.BUG,
    exceptions.ObjectRefStreamEndOfStreamError: FailureKind.BUG,
    exceptions.OufOfBandObjectRefSerializationException: FailureKind.BUG,
    exceptions.ActorAlreadyExistsError: FailureKind.BUG,
    exceptions.ActorHandleNotFoundError: FailureKind.BUG,
}
_NOT_CONNECTED: Final = "Ray has not been started yet"  # raised after Ray was shut down
_MAY_KILL: Final = "Some common causes include"
_EXIT_TYPE: Final = re.compile(r"Worker exit type: \w+ Worker exit detail: ")
_DIED: Final = "The actor is dead because its worker process has died"
_ENDED: Final = ". Worker unexpectedly exits with a connection error code 2. End of file"
"""All that Ray knows if a process ended without a word."""
_NODE_DIED: Final = "node has died"  # in Ray's message about an actor whose node is gone


@dataclass(frozen=True, slots=True)
class RayFailure:
    """A failed call.

    Attributes:
        kind: what it implies for the called process.
        cause: the cause, as a part of a sentence.
        raised: the error of geo_ray that the call raised, if any.
    """

    kind: FailureKind
    cause: str
    raised: GeoRayError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone or must be treated as gone: it can be replaced."""
        return self.kind in _LOST

    def as_error(self) -> GeoRayError:
        """The error that ends the run if the process cannot be replaced."""
        if self.raised is not None:
            return self.raised
        if self.kind is FailureKind.CLUSTER_GONE:
            return HeadLostError(f"Ray does not answer: {self.cause}")
        if self.kind is FailureKind.BUG:
            return InvariantError(self.cause)
        return RegionLostError(f"an actor is lost: {self.cause}")


def failure_of(error: exceptions.RayError) -> RayFailure:
    """Classify an error that Ray raised for a call."""
    if isinstance(error, exceptions.RayTaskError):
        return _raised_by_call(error.cause)
    kind = next((KINDS[each] for each in type(error).__mro__ if each in KINDS), FailureKind.BUG)
    text = str(error)
    if isinstance(error, exceptions.RaySystemError) and _NOT_CONNECTED in text:
        kind = FailureKind.BUG
    if isinstance(error, exceptions.RayActorError):
        if error.actor_init_failed:  # an actor's constructor only stores its arguments
            return RayFailure(FailureKind.BUG, f"an actor could not be made: {_last_line(text)}")
        if _NODE_DIED in text:
            kind = FailureKind.NODE_GONE
    if isinstance(error, exceptions.ActorUnavailableError):
        return RayFailure(kind, "the connection to it broke")
    cause = _actor_cause(text) if isinstance(error, exceptions.RayActorError) else _first_line(text)
    cause = cause or type(error).__name__
    if kind is FailureKind.BUG:
        cause = f"{type(error).__name__}: {cause}"
    return RayFailure(kind, cause)


def _raised_by_call(cause: BaseException | None) -> RayFailure:
    if isinstance(cause, GeoRayError):
        return RayFailure(FailureKind.RAISED, cause.message, cause)
    if isinstance(cause, exceptions.RayError):  # an argument of the call could not be computed
        return failure_of(cause)
    if isinstance(cause, MemoryError):
        return RayFailure(FailureKind.OUT_OF_MEMORY, "an actor raised MemoryError")
    summary = "an error" if cause is None else error_summary(cause)
    return RayFailure(FailureKind.BUG, f"an actor raised {summary}")


def _actor_cause(text: str) -> str:
    """Return the line in which Ray states why an actor died, without its list of common causes.

    The lines before it name the actor.
    """
    first, *others = text.splitlines() or [""]
    details = [line.strip() for line in others if line.strip() and not line.startswith("\t")]
    line = (details[0] if details else first).partition(_MAY_KILL)[0]
    text = _EXIT_TYPE.sub("", line).rstrip(". ")
    return text.replace(_DIED, "its process died").removesuffix(_ENDED)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].rstrip(".")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].rstrip(".")


T = TypeVar("T")
_CLOSE_S: Final = 30.0
_of_thread = threading.local()
_log = logging.getLogger(__name__)


class RayThreads:
    """Threads of this process that call Ray. All of them end before it disconnects from Ray.

    After ``ray.shutdown()`` a Ray call from another thread connects the process to a cluster again,
    or aborts it in C++. So a thread that calls Ray is started by a `RayThreads`, which is closed
    first at the end of a run. Waits of such threads then end early: `collect` and `place` call
    `check_not_closing`. Any thread may start others; the owner closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[threading.Thread] = set()
        self._is_closing = threading.Event()

    def submit(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on a separate thread.

        Returns:
            Its result. Callbacks run in that thread, or in the thread that adds them. After
            `close`, ``work`` is not run, and the result is a `RegionLostError`.
        """
        future: Future[T] = Future()
        thread = threading.Thread(
            target=self._run, args=(work, future), name=f"ray-{name}", daemon=True
        )
        with self._lock:
            if not self._is_closing.is_set():
                self._open.add(thread)
                thread.start()
                return future
        future.set_exception(_closing())
        return future

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Start no more threads, and wait for the running ones; may be called again.

        Args:
            timeout_s: longest wait. Threads that take longer are logged and abandoned.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closing.set()
            threads = self._open - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s does not end: it waits for Ray", thread.name)

    def check(self) -> None:
        """Raise if this is being closed.

        Raises:
            RegionLostError: it is being closed.
        """
        if self._is_closing.is_set():
            raise _closing()

    def _run(self, work: Callable[[], T], future: Future[T]) -> None:
        _of_thread.owner = self
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:  # of any class: passed to the result
                future.set_exception(error)
            else:
                future.set_result(result)
        finally:
            with self._lock:
                self._open.discard(threading.current_thread())


def is_ray_thread() -> bool:
    """Return whether the calling thread was started by a `RayThreads`."""
    return getattr(_of_thread, "owner", None) is not None


def check_not_closing() -> None:
    """Raise if the calling thread was started by a `RayThreads` that is being closed.

    Raises:
        RegionLostError: it is being closed.
    """
    owner: RayThreads | None = getattr(_of_thread, "owner", None)
    if owner is not None:
        owner.check()


def _closing() -> RegionLostError:
    return RegionLostError("the run ends")


Handle = Any  # a Ray actor handle, for which Ray has no useful type
Ref = Any
ProgressCallback = Callable[[str, int, int, Sequence[str]], None]
"""``progress(phase, done, total, names of those awaited)``, called repeatedly during a wait."""
PhaseProgress = Callable[[int, int, Sequence[str]], None]
"""A `ProgressCallback` of one phase."""
Wait = Callable[[Sequence[Ref], float], Iterable[Ref]]
"""``wait(calls, seconds)``: the calls done after that time, or as soon as all are done."""
_TELL_EVERY_S = 0.5


def no_progress(phase: str, done: int, total: int, names: Sequence[str]) -> None:
    """Show nothing, as a `ProgressCallback`."""


def collect(
    refs: Mapping[Any, Ref], timeout_s: float, progress: PhaseProgress | None = None
) -> dict[Any, Any]:
    """Return the values of several calls, by the same keys.

    Args:
        refs: the calls.
        timeout_s: longest wait.
        progress: receives the number done, the total, and the keys of the others.

    Raises:
        GeoRayError: the one that an actor raised.
        RegionLostError: an actor died or did not answer in time.
        HeadLostError: Ray itself does not answer.
        InvariantError: a call failed for another reason.
    """
    late: list[str] = []
    try:
        if progress is not None or is_ray_thread():
            late = watch(refs, timeout_s, progress or _no_phase_progress, _ended, SystemClock())
        values = ray.get(list(refs.values()), timeout=0 if late else timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        who = f": {', '.join(late)}" if late else ""
        raise RegionLostError(f"actors did not answer within {timeout_s:g} s{who}") from error
    except ray.exceptions.RayError as error:
        raise failure_of(error).as_error() from error
    return dict(zip(refs, values, strict=True))


def watch(
    refs: Mapping[Any, Ref], timeout_s: float, progress: PhaseProgress, wait: Wait, clock: Clock
) -> list[str]:
    """Wait for calls, reporting periodically which are awaited.

    In a thread of a `RayThreads` the wait ends early when that is closed.

    Args:
        refs: the calls by key.
        timeout_s: longest wait.
        progress: see `collect`.
        wait: waits for calls.
        clock: measures the wait.

    Returns:
        The keys of the calls that are not done.
    """
    deadline_s = clock.now_s() + timeout_s
    awaited = {ref: str(key) for key, ref in refs.items()}
    while True:
        check_not_closing()
        left_s = deadline_s - clock.now_s()
        progress(len(refs) - len(awaited), len(refs), list(awaited.values()))
        if not awaited or left_s <= 0:
            return list(awaited.values())
        for ref in wait(list(awaited), min(_TELL_EVERY_S, left_s)):
            del awaited[ref]


def _no_phase_progress(done: int, total: int, names: Sequence[str]) -> None:
    """Show nothing, as a `PhaseProgress`."""


def _ended(refs: Sequence[Ref], timeout_s: float) -> Sequence[Ref]:
    """Return the calls that end in this time; raises the error of a failed call."""
    done: Sequence[Ref]
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    ray.get(list(done))
    return done


def kill(handle: Handle) -> None:
    """End an actor, which may be dead already; None is ignored."""
    if handle is None:
        return
    try:
        ray.kill(handle, no_restart=True)
    except Exception:  # dead actors and dead clusters are gone already
        return


Key = tuple[str, str]
"""(role, region)."""


@dataclass(frozen=True, slots=True)
class _Question:
    handle: Handle
    ref: Any
    asked_s: float


@dataclass(slots=True)
class Polls:
    """Polls actors, with at most one open call per actor.

    Attributes:
        timeout_s: an actor without an answer for this long is lost.
        clock: measures the time.
        token: fencing token of the run actor's lease.
    """

    timeout_s: float
    clock: Clock = field(default_factory=SystemClock)
    token: int = 0
    _open: dict[Key, _Question] = field(default_factory=dict)

    def ask(
        self, handles: Mapping[Key, Handle], wait_s: float
    ) -> tuple[dict[Key, dict[str, Any]], dict[Key, str]]:
        """Call every actor without an open call, and collect answers within ``wait_s``.

        Returns:
            Answers, and the causes of lost actors, by (role, region), in the order of ``handles``.

        Raises:
            LeaseLostError: the actors obey another run actor.
            HeadLostError: Ray itself does not answer.
            InvariantError: a call failed for another reason.
        """
        now_s = self.clock.now_s()
        open_calls = {k: q for k, q in self._open.items() if handles.get(k) is q.handle}
        for key, handle in handles.items():
            if key not in open_calls:
                open_calls[key] = _Question(handle, handle.poll.remote(self.token), now_s)
        ready, _ = ray.wait(
            [q.ref for q in open_calls.values()], num_returns=len(open_calls), timeout=wait_s
        )
        came, now_s = set(ready), self.clock.now_s()
        answers: dict[Key, dict[str, Any]] = {}
        lost: dict[Key, str] = {}
        for key in handles:
            question = open_calls[key]
            if question.ref in came:
                del open_calls[key]
                try:
                    answers[key] = ray.get(question.ref)
                except ray.exceptions.RayError as error:
                    failure = failure_of(error)
                    was_overtaken = isinstance(failure.raised, LeaseLostError)
                    if was_overtaken or not (failure.is_lost or failure.raised):
                        raise failure.as_error() from error
                    lost[key] = failure.cause
            elif now_s - question.asked_s >= self.timeout_s:
                del open_calls[key]
                lost[key] = f"it did not answer within {self.timeout_s:g} s"
        self._open = open_calls
        return answers, lost

    def unresponsive_s(self) -> dict[Key, float]:
        """Return the seconds for which called actors have not answered, by (role, region)."""
        now_s = self.clock.now_s()
        return {key: now_s - question.asked_s for key, question in self._open.items()}
