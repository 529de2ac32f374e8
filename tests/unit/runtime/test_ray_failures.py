"""What each of Ray's exception classes says about the process that was called."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import ray
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext, RayException

from geo_ray.base.errors import (
    GeoRayError,
    HeadLostError,
    InvariantError,
    LinkDownError,
    RegionLostError,
    TaskOutputError,
)
from geo_ray.ray_cluster.calls import KINDS, FailureKind, collect, failure_of
from geo_ray.runtime.state_transfer import answer_of

NODE = "a" * 40
OBJECT: tuple[str, None, str] = ("f" * 40, None, "")


def died(message: str, **fields: Any) -> exceptions.ActorDiedError:
    return exceptions.ActorDiedError(
        ActorDiedErrorContext(
            error_message=message, class_name="WorkerActor", actor_id=b"\1" * 16, pid=7, **fields
        )
    )


def init_failed() -> exceptions.ActorDiedError:
    cause = exceptions.RayTaskError("WorkerActor.__init__", "Traceback\nKeyError: 'x'", KeyError())
    return exceptions.ActorDiedError(cause)


def raised(cause: BaseException) -> exceptions.RayTaskError:
    return exceptions.RayTaskError("poll", "Traceback", cause)


LOW = "Task was killed due to the node running low on memory.\nMemory on the node was 9 GB."

# One instance of each class of Ray's, as Ray makes it, and what it says.
INSTANCES: list[tuple[exceptions.RayError, FailureKind, str]] = [
    (exceptions.RayActorError(), FailureKind.PROCESS_DIED, "The actor experienced an error"),
    (died("its worker process has died. Exit type: SYSTEM_ERROR"), FailureKind.PROCESS_DIED, "its"),
    (died("because its node has died. Node Id: 1"), FailureKind.NODE_GONE, "its node has died"),
    (init_failed(), FailureKind.BUG, "could not be made: KeyError: 'x'"),
    (exceptions.ActorUnavailableError("lost", b"\1" * 16), FailureKind.PROCESS_DIED, "broke"),
    (exceptions.WorkerCrashedError(), FailureKind.PROCESS_DIED, "died unexpectedly"),
    (exceptions.AsyncioActorExit("over"), FailureKind.PROCESS_DIED, "over"),
    (exceptions.TaskCancelledError(), FailureKind.PROCESS_DIED, "Cancel"),
    (exceptions.OutOfMemoryError(LOW), FailureKind.OUT_OF_MEMORY, "running low on memory"),
    (exceptions.ObjectStoreFullError("full"), FailureKind.OUT_OF_MEMORY, "full"),
    (exceptions.OutOfDiskError("full"), FailureKind.OUT_OF_MEMORY, "full"),
    (exceptions.NodeDiedError(f"node {NODE} died"), FailureKind.NODE_GONE, NODE),
    (exceptions.LocalRayletDiedError(), FailureKind.NODE_GONE, "raylet died"),
    (exceptions.ObjectLostError(*OBJECT), FailureKind.NODE_GONE, "Failed to retrieve"),
    (exceptions.ObjectFetchTimedOutError(*OBJECT), FailureKind.NODE_GONE, "Failed to retrieve"),
    (exceptions.OwnerDiedError(*OBJECT), FailureKind.NODE_GONE, "Failed to retrieve"),
    (exceptions.ObjectReconstructionFailedError(OBJECT[0]), FailureKind.NODE_GONE, "Failed to"),
    (exceptions.RuntimeEnvSetupError("no pip"), FailureKind.NOT_STARTED, "runtime environment"),
    (exceptions.TaskPlacementGroupRemoved(), FailureKind.NOT_STARTED, "has been removed"),
    (exceptions.ActorPlacementGroupRemoved(), FailureKind.NOT_STARTED, "has been removed"),
    (exceptions.TaskUnschedulableError("no node"), FailureKind.NOT_STARTED, "no node"),
    (exceptions.ActorUnschedulableError("no node"), FailureKind.NOT_STARTED, "no node"),
    (exceptions.GetTimeoutError("late"), FailureKind.NO_ANSWER, "late"),
    (exceptions.PlasmaObjectNotAvailable("late"), FailureKind.NO_ANSWER, "late"),
    (exceptions.RayChannelTimeoutError("late"), FailureKind.NO_ANSWER, "late"),
    (exceptions.RpcError("failed to connect"), FailureKind.CLUSTER_GONE, "failed to connect"),
    (exceptions.AuthenticationError("wrong token"), FailureKind.CLUSTER_GONE, "wrong token"),
    (exceptions.RaySystemError("raylet is gone"), FailureKind.CLUSTER_GONE, "raylet is gone"),
    (exceptions.RayChannelError("odd"), FailureKind.BUG, "odd"),
    (exceptions.RayCgraphCapacityExceeded("odd"), FailureKind.BUG, "odd"),
    (exceptions.RayDirectTransportError("odd"), FailureKind.BUG, "odd"),
    (exceptions.StreamingGeneratorReplayInconsistentError("odd"), FailureKind.BUG, "odd"),
    (exceptions.ReferenceCountingAssertionError(*OBJECT), FailureKind.BUG, "Failed to retrieve"),
    (exceptions.ObjectFreedError(*OBJECT), FailureKind.BUG, "Failed to retrieve"),
    (exceptions.CrossLanguageError(RayException(language=1)), FailureKind.BUG, "JAVA"),
    (exceptions.UserCodeException("odd"), FailureKind.BUG, "odd"),
    (exceptions.UnserializableException("odd"), FailureKind.BUG, "deserialize"),
    (exceptions.PendingCallsLimitExceeded("odd"), FailureKind.BUG, "odd"),
    (exceptions.ObjectRefStreamEndOfStreamError("odd"), FailureKind.BUG, "odd"),
    (exceptions.OufOfBandObjectRefSerializationException("odd"), FailureKind.BUG, "odd"),
    (exceptions.ActorAlreadyExistsError("odd"), FailureKind.BUG, "odd"),
    (exceptions.ActorHandleNotFoundError("odd"), FailureKind.BUG, "odd"),
    (raised(TaskOutputError("no loss")), FailureKind.RAISED, "no loss"),
    (raised(KeyError("x")), FailureKind.BUG, "KeyError: 'x'"),
    (raised(MemoryError()), FailureKind.OUT_OF_MEMORY, "MemoryError"),
    (raised(exceptions.OutOfMemoryError(LOW)), FailureKind.OUT_OF_MEMORY, "low on memory"),
]


def all_classes() -> set[type[exceptions.RayError]]:
    return {
        each
        for _, each in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(each, exceptions.RayError) and each is not exceptions.RayError
    }


def test_every_class_of_ray_is_classified_and_tested() -> None:
    assert all_classes() == {*KINDS, exceptions.RayTaskError}
    assert all_classes() == {type(error) for error, _, _ in INSTANCES}


@pytest.mark.parametrize(
    ("error", "kind", "cause"), INSTANCES, ids=[type(each[0]).__name__ for each in INSTANCES]
)
def test_each_class_has_one_meaning(
    error: exceptions.RayError, kind: FailureKind, cause: str
) -> None:
    failure = failure_of(error)
    assert failure.kind is kind and cause in failure.cause and "\n" not in failure.cause
    expected: dict[FailureKind, type[GeoRayError]] = {
        FailureKind.RAISED: TaskOutputError,
        FailureKind.CLUSTER_GONE: HeadLostError,
        FailureKind.BUG: InvariantError,
    }
    assert type(failure.as_error()) is expected.get(kind, RegionLostError)
    assert failure.is_lost is (kind not in expected)


def test_a_class_that_ray_adds_is_a_bug_until_it_is_classified() -> None:
    class NewError(exceptions.RayError):
        pass

    class NewActorError(exceptions.ActorDiedError):
        pass

    assert failure_of(NewError("odd")).kind is FailureKind.BUG
    assert failure_of(NewActorError()).kind is FailureKind.PROCESS_DIED


def test_a_call_after_ray_was_shut_down_is_a_bug() -> None:
    told = "Ray has not been started yet. You can start Ray with 'ray.init()'."
    assert failure_of(exceptions.RaySystemError(told)).kind is FailureKind.BUG


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (exceptions.OutOfMemoryError(LOW), RegionLostError),
        (exceptions.NodeDiedError("gone"), RegionLostError),
        (exceptions.GetTimeoutError("late"), RegionLostError),
        (exceptions.RpcError("gone"), HeadLostError),
        (raised(TaskOutputError("no loss")), TaskOutputError),
        (raised(KeyError("x")), InvariantError),
    ],
)
def test_collect_raises_only_errors_of_geo_ray(
    error: exceptions.RayError, becomes: type[GeoRayError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(becomes):
        collect({"eu/ps": object()}, 1.0)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (exceptions.OutOfMemoryError(LOW), LinkDownError),
        (raised(LinkDownError("x")), LinkDownError),
    ],
)
def test_a_copy_between_actors_fails_with_an_error_of_geo_ray(
    error: exceptions.RayError, becomes: type[GeoRayError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(becomes):
        answer_of(object())


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("Worker unexpectedly exits with a connection error code 2. End of file", ""),
        ("Task was killed due to the node running low on memory", ". Task was killed due to the "),
    ],
)
def test_the_cause_is_what_ray_knows_without_its_list_of_common_causes(
    detail: str, shown: str
) -> None:
    error = died(
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        f"Worker exit detail: {detail}. Some common causes include: (1) the process was killed by "
        "the OOM killer due to high memory usage (2) ray stop --force is called."
    )
    cause = failure_of(error).cause
    assert cause.startswith(f"its process died{shown}")
    assert "common causes" not in cause and "connection error" not in cause
