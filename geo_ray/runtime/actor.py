"""Base classes of a run's Ray actors, with their states.

All actors have the same life cycle: Ray creates the process, `ready` loads its contents, a later
call makes it serve on its sockets, and `close` ends that. Operations that can fail run after the
constructor, because Ray converts errors of constructors to text.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Final, Generic, Literal, TypeVar

from geo_ray.base.errors import InvariantError
from geo_ray.base.states import StateTable
from geo_ray.runtime.checkpoint_upload import UploadGrant, UploadRegistration
from geo_ray.runtime.spec import RunSpec, TokenFence


class ActorState(StrEnum):
    """See `ACTOR`."""

    CREATED = "created"
    LOADED = "loaded"
    SERVING = "serving"
    HALTED = "halted"
    CLOSED = "closed"


ActorEvent = Literal["load", "serve", "halt", "close"]

ACTOR: Final[StateTable[ActorState, ActorEvent]] = StateTable(
    name="Actor of a run",
    states={
        ActorState.CREATED: "The process runs; nothing is loaded.",
        ActorState.LOADED: "Task, model or shard are loaded; no socket is open.",
        ActorState.SERVING: "It serves on its sockets; a worker computes steps.",
        ActorState.HALTED: "A worker has returned or failed; it can be loaded again for a new "
        "parameter server of its region.",
        ActorState.CLOSED: "All sockets are closed.",
    },
    moves={
        (ActorState.CREATED, "load"): ActorState.LOADED,
        (ActorState.CREATED, "halt"): ActorState.HALTED,
        (ActorState.LOADED, "serve"): ActorState.SERVING,
        (ActorState.LOADED, "halt"): ActorState.HALTED,
        (ActorState.SERVING, "halt"): ActorState.HALTED,
        (ActorState.HALTED, "load"): ActorState.LOADED,
        (ActorState.CREATED, "close"): ActorState.CLOSED,
        (ActorState.LOADED, "close"): ActorState.CLOSED,
        (ActorState.SERVING, "close"): ActorState.CLOSED,
        (ActorState.HALTED, "close"): ActorState.CLOSED,
        (ActorState.CLOSED, "close"): ActorState.CLOSED,
    },
)

L = TypeVar("L")
S = TypeVar("S")


class RunActor(Generic[L, S]):
    """One actor of a run.

    ``L`` is the type of its loaded contents, ``S`` of its serving state.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec = spec
        self._region = region
        self._fence = TokenFence()
        self._state = ACTOR.initial
        self._lock = threading.Lock()
        self._held: L | None = None
        self._served: S | None = None

    def close(self) -> None:
        """Close all sockets; a second call does nothing."""
        with self._lock:
            self._state = ACTOR.after(self._state, "close")
            served, self._held, self._served = self._served, None, None
        self._release(served)

    def _release(self, served: S | None) -> None:
        """Close the sockets.

        Args:
            served: its serving state; None if it did not serve.
        """

    def _load(self, loaded: L) -> None:
        """Enter the state `ActorState.LOADED`."""
        with self._lock:
            self._state = ACTOR.after(self._state, "load")
            self._held, self._served = loaded, None

    def _serve(self, serving: S) -> None:
        """Enter the state `ActorState.SERVING`."""
        with self._lock:
            self._state = ACTOR.after(self._state, "serve")
            self._served = serving

    def _halt(self) -> None:
        """Enter the state `ActorState.HALTED`."""
        with self._lock:
            self._state = ACTOR.after(self._state, "halt")

    @property
    def _is_starting(self) -> bool:
        """Whether it does not serve yet."""
        return self._state in (ActorState.CREATED, ActorState.LOADED)

    @property
    def _loaded(self) -> L:
        """The loaded contents.

        Raises:
            InvariantError: nothing is loaded.
        """
        if self._held is None:
            raise self._wrong("has loaded nothing")
        return self._held

    @property
    def _serving(self) -> S:
        """The serving state.

        Raises:
            InvariantError: it does not serve.
        """
        if self._served is None:
            raise self._wrong("does not serve")
        return self._served

    def _wrong(self, problem: str) -> InvariantError:
        name = f"{type(self).__name__} of region '{self._region}'"
        return InvariantError(f"{name} {problem}: it is {self._state.value}")


class PartActor(RunActor[L, S]):
    """An actor that writes parts of checkpoints, by upload to the run actor's machine if needed.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        super().__init__(spec, region)
        self._entry = UploadRegistration(spec, region)

    def upload_key(self) -> bytes | None:
        """See `UploadRegistration.upload_key`; before `ready`."""
        return self._entry.upload_key()

    def use_upload_server(self, grant: UploadGrant) -> None:
        """Upload parts to the run actor's machine, and read them from there; before `ready`."""
        self._spec = self._entry.spec(grant)
