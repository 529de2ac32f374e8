"""The lease of a run: at most one process may write to a run at a time.

Each holder has a larger fencing token; a holder renews the lease in the background and refuses
writes once it is lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from pydantic import Field, ValidationError

from geo_ray.base.clock import BootClock, Clock
from geo_ray.base.errors import GeoRayError, LeaseLostError, RunDirectoryError, RunHeldError
from geo_ray.base.model import StrictModel
from geo_ray.base.output import RateLimitedLog
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore, StoredValue

LEASE_KEY = "lease.json"


class Owner(StrictModel):
    """A current or former holder of a lease.

    Its times of day are informative; no decision depends on them.
    """

    host: str = Field(description="name of its machine")
    pid: int = Field(ge=1, description="process id there")
    machine: str = Field(
        default="", description="boot id of the machine and namespace of its process ids"
    )
    started: str = Field(default="", description="start time of the process, in system ticks")
    nonce: str = Field(description="unique id of this holder")
    since: str = Field(description="time at which it took the lease, by its clock")

    @property
    def text(self) -> str:
        """``host h, process 123, since 2026-01-01T10:00:00+00:00``."""
        return f"host {self.host}, process {self.pid}, since {self.since}"


class LeaseRecord(StrictModel):
    """A record of a run's lease. Every write replaces it."""

    token: int = Field(ge=1, description="fencing token; grows by one with every holder")
    renewal: int = Field(ge=0, description="grows by one with every write of the same holder")
    owner: Owner
    lives_s: float = Field(gt=0, description="seconds for which it is valid after a renewal")
    released: bool = Field(default=False, description="whether its holder has released it")
    doing: str = Field(default="", description="last activity of the holder, informative")


def encode_record(record: LeaseRecord) -> bytes:
    """Encode a record for `decode_record`."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode_record(data: bytes) -> LeaseRecord:
    """Decode a record.

    Raises:
        RunDirectoryError: the bytes are not a record.
    """
    try:
        return LeaseRecord.model_validate_json(data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"the run's {LEASE_KEY} cannot be read: {error.error_count()} invalid fields",
            fix=f"If the run is not active, remove {LEASE_KEY} from its directory.",
        ) from error


PATIENCE = 1.25
"""Number of lifetimes for which a lease must be unchanged before another process takes it."""


@dataclass(frozen=True, slots=True)
class Acquirable:
    """The lease can be taken.

    Attributes:
        record: record to write, if the lease is still unchanged.
        from_unknown: whether the previous holder has stopped renewing but may still be running.
    """

    record: LeaseRecord
    from_unknown: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """The lease may be held: whether its holder is alive is not known yet.

    Attributes:
        record: current record of the lease.
        left_s: seconds until the lease can be taken, if it does not change.
    """

    record: LeaseRecord
    left_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The holder is alive.

    Attributes:
        record: current record of the lease.
    """

    record: LeaseRecord


@dataclass(slots=True)
class Claim:
    """State of a process that requests the lease.

    Attributes:
        owner: the process.
        lives_s: seconds for which each renewal is valid.
    """

    owner: Owner
    lives_s: float
    _first: LeaseRecord | None = field(default=None)
    _since_s: float = 0.0

    def see(
        self, record: LeaseRecord | None, now_s: float, *, has_ended: bool
    ) -> Acquirable | Waiting | Refused:
        """Judge a record that was just read.

        Args:
            record: the lease; None if there is none yet.
            now_s: own clock, read after ``record``.
            has_ended: whether the holder's process is known to have ended.
        """
        if record is None:
            return Acquirable(self._after(0), from_unknown=False)
        if record.released or has_ended:
            return Acquirable(self._after(record.token), from_unknown=False)
        if self._first is None:
            self._first, self._since_s = record, now_s
        if record != self._first:
            return Refused(record)
        left_s = self._since_s + PATIENCE * record.lives_s - now_s
        if left_s > 0:
            return Waiting(record, left_s)
        return Acquirable(self._after(record.token), from_unknown=True)

    def _after(self, token: int) -> LeaseRecord:
        return LeaseRecord(token=token + 1, renewal=0, owner=self.owner, lives_s=self.lives_s)


@dataclass(slots=True)
class LeaseWatch:
    """Observes a lease repeatedly, and judges it by its own clock."""

    _newest: LeaseRecord | None = None
    _since_s: float = 0.0
    _is_heard: bool = False

    def see(self, record: LeaseRecord, now_s: float) -> bool | None:
        """Judge a record that was just read.

        Args:
            record: the lease.
            now_s: own clock, read after ``record``.

        Returns:
            Whether its holder has renewed it within its lifetime; None if unknown.
        """
        if record != self._newest:
            self._is_heard = self._newest is not None
            self._newest, self._since_s = record, now_s
        if self.left_s(now_s) <= 0:
            return False
        return True if self._is_heard else None

    def left_s(self, now_s: float) -> float:
        """Return the seconds until the holder counts as unresponsive, without a renewal."""
        if self._newest is None:
            return 0.0
        return self._since_s + PATIENCE * self._newest.lives_s - now_s


@dataclass(slots=True)
class Holding:
    """State of a holder.

    Attributes:
        record: the record that it last wrote.
        until_s: end of its validity, by the own clock.
        is_lost: whether another process has taken the lease; final.
    """

    record: LeaseRecord
    until_s: float
    is_lost: bool = False

    @classmethod
    def taken(cls, record: LeaseRecord, began_s: float) -> Holding:
        """Note that the lease was written.

        Args:
            record: the written record.
            began_s: own clock, read before the write; start of the validity.
        """
        return cls(record, began_s + record.lives_s)

    def may_write(self, now_s: float) -> bool:
        """Return whether no other process can have the lease at this time of the own clock."""
        return not self.is_lost and now_s < self.until_s

    def next(self, doing: str, *, released: bool = False) -> LeaseRecord:
        """Return the record to write for renewing or releasing the lease."""
        return self.record.model_copy(
            update={"renewal": self.record.renewal + 1, "doing": doing, "released": released}
        )

    def renewed(self, record: LeaseRecord, began_s: float) -> None:
        """The lease was renewed; see `taken`."""
        self.record, self.until_s = record, began_s + record.lives_s

    def found(self, record: LeaseRecord) -> bool:
        """Judge the record found after a rejected write.

        Returns:
            Whether it is the own lease: an earlier write has arrived whose answer was lost.
        """
        held = self.record
        if record.token == held.token and record.owner == held.owner:
            self.record = record
            return True
        self.is_lost = True
        return False


def this_process() -> Owner:
    """Return this process as a holder; with a new id at every call."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=_started(os.getpid()) or "",
        nonce=secrets.token_hex(8),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def has_ended(owner: Owner) -> bool | None:
    """Return whether a process has ended; None if this machine cannot know.

    Process ids are only meaningful within one namespace and one boot of one machine. A zombie
    process counts as ended, because it writes nothing.
    """
    if not owner.machine or not owner.started or owner.machine != _machine():
        return None
    return _started(owner.pid) != owner.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a process in system ticks; None if it does not exist."""
    try:
        # The name, in parentheses, may contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in ("Z", "X") else started


_RENEWALS: Final = 5  # per lifetime
_log = logging.getLogger(__name__)


class Fence(Protocol):
    """Fencing token check of a holder."""

    def check(self) -> None:
        """Return if no other holder can act now.

        Raises:
            LeaseLostError: another holder may act.
        """


class Unfenced:
    """A `Fence` without other holders: a simulation, or a single process."""

    def check(self) -> None:
        """See `Fence.check`."""


class LeaseKeeper:
    """The lease while this process holds it. Created by `LeaseSeeker`; thread-safe.

    Args:
        store: store of the lease.
        name: name of the run, for messages.
        holding: state of the holder.
        tag: version of the written record.
        clock: clock of the validity.
        from_unknown: whether the previous holder has stopped renewing but may still be running.
    """

    def __init__(
        self,
        store: ConditionalStore,
        name: str,
        holding: Holding,
        tag: str,
        clock: Clock,
        *,
        from_unknown: bool = False,
    ) -> None:
        self._store, self._name = store, name
        self._holding, self._tag = holding, tag
        self._clock = clock
        self.from_unknown = from_unknown
        self._doing = ""
        self._by = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._renew_often, name="lease", daemon=True)

    @property
    def token(self) -> int:
        """Number of this holder of the lease; each new holder gets the next."""
        return self._holding.record.token

    def start(self) -> None:
        """Start renewing the lease in a background thread."""
        self._renewer.start()

    def note(self, doing: str) -> None:
        """Set the activity, which the next renewal writes to the lease."""
        self._doing = doing

    def check(self) -> None:
        """Return if no other process can have the lease now; usually without I/O.

        After a pause the lease is renewed first, which fails if another process has taken it.

        Raises:
            LeaseLostError: another process has the lease.
            RunDirectoryError: the lease cannot be read or written.
        """
        if not self.may_write():
            self.renew()

    def check_known(self) -> None:
        """Return unless another process is known to have the lease; without I/O.

        For writes to data that only this process reads: they need not wait for the store.

        Raises:
            LeaseLostError: another process has the lease.
        """
        if self._holding.is_lost:
            raise self._lost()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Guard a small write: no other process takes the lease while the block runs.

        Raises:
            LeaseLostError: another process has taken it; the block is not run.
            RunDirectoryError: the lease cannot be read or written.
        """
        with self._lock:
            self.check()
            with self._store.unchanged(LEASE_KEY, self._tag) as is_held:
                if is_held:
                    yield
                    return
            self._find_again()  # an earlier write may have arrived late
            with self._store.unchanged(LEASE_KEY, self._tag) as is_held:
                if not is_held:
                    raise self._lost()
                yield

    def may_write(self) -> bool:
        """Return whether no other process can have the lease now, by the own clock only."""
        return self._holding.may_write(self._clock.now_s())

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: another process has it.
            RunDirectoryError: it cannot be written.
        """
        self._put(released=False)

    def close(self) -> None:
        """Release the lease, so that the next process need not wait; never raises."""
        self._ended.set()
        if self._renewer.is_alive():
            self._renewer.join()
        if self._holding.is_lost:
            return
        try:
            self._put(released=True)
        except GeoRayError as error:
            _log.warning("the lease of %s expires by itself: %s", self._name, error.message)

    def _put(self, *, released: bool) -> None:
        with self._lock:
            if self._holding.is_lost:
                raise self._lost()
            for _ in range(2):
                began_s = self._clock.now_s()
                record = self._holding.next(self._doing, released=released)
                tag = self._store.write(LEASE_KEY, encode_record(record), self._tag)
                if tag is not None:
                    self._tag = tag
                    self._holding.renewed(record, began_s)
                    return
                self._find_again()
            raise self._lost()

    def _find_again(self) -> None:
        found = self._store.read(LEASE_KEY)
        if found is None:
            raise self._lost()
        record = decode_record(found.data)
        if not self._holding.found(record):
            raise self._lost(record)
        self._tag = found.tag

    def _lost(self, record: LeaseRecord | None = None) -> LeaseLostError:
        self._holding.is_lost = True
        if record is not None:
            self._by = f" by {record.owner.text}, as holder {record.token}"
        return LeaseLostError(
            f"{self._name} was taken over{self._by}; this process was holder {self.token} and "
            "no longer writes to the run"
        )

    def _renew_often(self) -> None:
        limited_log = RateLimitedLog(_log, 10.0)
        while not self._ended.wait(self._holding.record.lives_s / _RENEWALS):
            try:
                self.renew()
            except LeaseLostError:
                return  # the next write raises
            except GeoRayError as error:
                limited_log.warning(
                    "renew", f"{self._name}: its lease is not renewed: {error.message}"
                )


LEASE_S: Final = 10.0
_POLL_EVERY_S: Final = 0.25


class LeaseSeeker:
    """A process that requests the lease of a run.

    Args:
        store: store of the lease.
        name: name of the run, for messages.
        notify: called with the reason of a wait.
        lives_s: seconds for which each renewal is valid.
        clock: clock for judging; None: a `BootClock`, so that a lease also expires while the
            machine is suspended.
    """

    def __init__(
        self,
        store: ConditionalStore,
        name: str,
        notify: Callable[[str], None],
        *,
        lives_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._name, self._notify = store, name, notify
        self._clock = clock or BootClock()
        self.claim = Claim(this_process(), lives_s)
        self._has_notified = False

    def wait(self) -> None:
        """Return when the lease can be taken; writes nothing.

        Waits for the lifetime of the lease if its holder may be alive but is not observed.

        Raises:
            RunHeldError: another process holds the lease.
            RunDirectoryError: the lease cannot be read.
        """
        while isinstance(decision := self._see()[0], Waiting):
            self._wait_for(decision)

    def take(self) -> LeaseKeeper:
        """Take the lease, and hold it until `LeaseKeeper.close`; waits as `wait` does.

        Raises:
            RunHeldError: another process holds the lease.
            RunDirectoryError: the lease cannot be read or written.
        """
        while isinstance(found := self.try_acquire(), Waiting):
            self._wait_for(found)
        found.start()
        return found

    def try_acquire(self) -> LeaseKeeper | Waiting:
        """Read the lease once, and take it if possible.

        Returns:
            The lease, not renewed yet; or the state to wait for.

        Raises:
            RunHeldError, RunDirectoryError: as for `take`.
        """
        while True:
            decision, found, now_s = self._see()
            if isinstance(decision, Waiting):
                return decision
            mine = decision.record
            expected = None if found is None else found.tag
            tag = self._store.write(LEASE_KEY, encode_record(mine), expected)
            if tag is not None:
                return LeaseKeeper(
                    self._store,
                    self._name,
                    Holding.taken(mine, now_s),
                    tag,
                    self._clock,
                    from_unknown=decision.from_unknown,
                )
            # Another process was faster.

    def _see(self) -> tuple[Acquirable | Waiting, StoredValue | None, float]:
        found = self._store.read(LEASE_KEY)
        record = None if found is None else decode_record(found.data)
        gone = record is not None and bool(has_ended(record.owner))
        now_s = self._clock.now_s()
        decision = self.claim.see(record, now_s, has_ended=gone)
        if isinstance(decision, Refused):
            raise _held(self._name, decision.record)
        return decision, found, now_s

    def _wait_for(self, what: Waiting) -> None:
        if not self._has_notified:
            self._has_notified = True
            self._notify(
                f"{self._name} is held by {what.record.owner.text}: checking for up to "
                f"{what.left_s:.0f} s whether that process is alive"
            )
        self._clock.sleep_s(min(what.left_s, _POLL_EVERY_S))


def _held(name: str, record: LeaseRecord) -> RunHeldError:
    owner = record.owner
    return RunHeldError(
        f"{name} is active: {owner.text}",
        fix=f"Check it with `geo-ray status {name}`, or watch it with `geo-ray train "
        f"--resume {name}` and no changes to its configuration. To continue it from here or with "
        f"changes, stop it first: `geo-ray stop {name}`.",
    )


REMOTE_LEASE_S: Final = 30.0
"""Lifetime of a lease in a bucket, where each renewal costs money."""


def seeker_of(
    run_dir: Path, notify: Callable[[str], None], remote_store: ConditionalStore | None = None
) -> LeaseSeeker:
    """Return the seeker of a run's lease.

    Args:
        run_dir: directory of the run.
        notify: called with the reason of a wait.
        remote_store: store of the lease, if it is not in the directory.
    """
    if remote_store is not None:
        return LeaseSeeker(remote_store, str(remote_store), notify, lives_s=REMOTE_LEASE_S)
    path = run_dir.absolute()
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return LeaseSeeker(LocalConditionalStore(path), str(near), notify)


@contextmanager
def driving(seeker: LeaseSeeker) -> Iterator[LeaseKeeper]:
    """Hold the lease of a run while the block runs.

    Raises:
        RunHeldError: another process holds the lease.
        RunDirectoryError: the lease cannot be read or written.
    """
    keeper = seeker.take()
    try:
        yield keeper
    finally:
        keeper.close()
