"""Classifies what Ray raises for a call. Every caller that decides about a failure asks here.

A caller never looks at Ray's classes itself: `OutOfMemoryError` and `NodeDiedError`, for instance,
are not subclasses of `RayActorError`, although they say just the same of an actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from ray import exceptions

from geo_ray.errors import GeoRayError, HeadLostError, InvariantError, RegionLostError
from geo_ray.util.blame import summary


class FailureKind(Enum):
    """What a failed call says about the process that was called."""

    RAISED = "raised"
    """It runs, and the call raised an error of geo_ray."""
    PROCESS_DIED = "process died"
    OUT_OF_MEMORY = "out of memory"
    """Ray ended it because its node ran out of memory, or there is no room for its answer."""
    NODE_GONE = "node gone"
    NOT_STARTED = "not started"
    """Its place does not exist any more, or its environment could not be made."""
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

# The nearest class of an error's class counts. Classes that are not listed are bugs.
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
_NOT_CONNECTED: Final = "Ray has not been started yet"  # said to a process that has shut Ray down
_NODE_DIED: Final = "node has died"  # in Ray's text about an actor whose node is gone


@dataclass(frozen=True, slots=True)
class RayFailure:
    """A failed call.

    Attributes:
        kind: what it says about the process that was called.
        cause: why, as a part of a sentence.
        raised: the error of geo_ray that the call raised; None unless it raised one.
    """

    kind: FailureKind
    cause: str
    raised: GeoRayError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone, or has to be treated so: another one can take its place."""
        return self.kind in _LOST

    def as_error(self) -> GeoRayError:
        """The error that ends whoever cannot do without the process."""
        if self.raised is not None:
            return self.raised
        if self.kind is FailureKind.CLUSTER_GONE:
            return HeadLostError(f"Ray does not answer: {self.cause}")
        if self.kind is FailureKind.BUG:
            return InvariantError(self.cause)
        return RegionLostError(f"an actor is lost: {self.cause}")


def failure_of(error: exceptions.RayError) -> RayFailure:
    """Classify what Ray raised for a call."""
    if isinstance(error, exceptions.RayTaskError):
        return _raised_by_call(error.cause)
    kind = next((KINDS[each] for each in type(error).__mro__ if each in KINDS), FailureKind.BUG)
    text = str(error)
    if isinstance(error, exceptions.RaySystemError) and _NOT_CONNECTED in text:
        kind = FailureKind.BUG
    if isinstance(error, exceptions.RayActorError):
        if error.actor_init_failed:  # an actor's constructor only keeps its arguments
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
    if isinstance(cause, exceptions.RayError):  # what a call was given came to nothing
        return failure_of(cause)
    if isinstance(cause, MemoryError):
        return RayFailure(FailureKind.OUT_OF_MEMORY, "an actor raised MemoryError")
    told = "an error" if cause is None else summary(cause)
    return RayFailure(FailureKind.BUG, f"an actor raised {told}")


def _actor_cause(text: str) -> str:
    """The line in which Ray says why an actor died; those before it name the actor."""
    first, *others = text.splitlines() or [""]
    told = [line.strip() for line in others if line.strip() and not line.startswith("\t")]
    return (told[0] if told else first).rstrip(".")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].rstrip(".")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].rstrip(".")
