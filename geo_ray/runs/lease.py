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
    """A process that drives a run, or did.

    Its times of day are for people; nothing is decided by them.
    """

    host: str = Field(description="name of its machine")
    pid: int = Field(ge=1, description="process id there")
    machine: str = Field(
        default="", description="the machine since its last start, and which of its process ids"
    )
    started: str = Field(default="", description="of the process, as its system counts")
    token: str = Field(description="of this holder alone")
    since: str = Field(description="when it took the lease, by its own clock")

    @property
    def text(self) -> str:
        """``host h, process 123, since 2026-01-01T10:00:00+00:00``."""
        return f"host {self.host}, process {self.pid}, since {self.since}"


class LeaseRecord(StrictModel):
    """The lease of one run. Every write of it is another record."""

    epoch: int = Field(ge=1, description="grows by one with every holder")
    renewal: int = Field(ge=0, description="grows by one with every write of the same holder")
    owner: Owner
    lives_s: float = Field(gt=0, description="how long it counts after its newest renewal")
    released: bool = Field(default=False, description="whether its holder has given it back")
    doing: str = Field(default="", description="what the holder was last doing, for people")


def encode_record(record: LeaseRecord) -> bytes:
    """Write a record as `decode_record` reads it."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode_record(data: bytes) -> LeaseRecord:
    """Read a record.

    Raises:
        RunDirectoryError: the bytes are no record.
    """
    try:
        return LeaseRecord.model_validate_json(data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"the run's {LEASE_KEY} cannot be read: {error.error_count()} things in it are wrong",
            fix=f"If no process drives the run any more, remove {LEASE_KEY} from its directory.",
        ) from error


PATIENCE = 1.25
"""How many times its life a lease must stand unchanged before somebody else takes it."""


@dataclass(frozen=True, slots=True)
class Taking:
    """The lease is to be had.

    Attributes:
        record: to be written in its place, if it still is as it was seen.
        from_unknown: whether the holder before may still be there, unheard.
    """

    record: LeaseRecord
    from_unknown: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """It is not known yet whether the holder lives.

    Attributes:
        record: the lease as it stands.
        left_s: seconds until it is to be had, if nothing changes.
    """

    record: LeaseRecord
    left_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The holder lives.

    Attributes:
        record: the lease as it stands.
    """

    record: LeaseRecord


@dataclass(slots=True)
class Claim:
    """One process that wants the lease.

    Attributes:
        owner: the process.
        lives_s: for how long its own renewals are to count.
    """

    owner: Owner
    lives_s: float
    _first: LeaseRecord | None = field(default=None)
    _since_s: float = 0.0

    def see(
        self, record: LeaseRecord | None, now_s: float, *, has_ended: bool
    ) -> Taking | Waiting | Refused:
        """Judge what was just read.

        Args:
            record: the lease; None if there is none yet.
            now_s: of the own clock, read after ``record`` was.
            has_ended: whether the holder's process is known not to be there any more.
        """
        if record is None:
            return Taking(self._after(0), from_unknown=False)
        if record.released or has_ended:
            return Taking(self._after(record.epoch), from_unknown=False)
        if self._first is None:
            self._first, self._since_s = record, now_s
        if record != self._first:
            return Refused(record)
        left_s = self._since_s + PATIENCE * record.lives_s - now_s
        if left_s > 0:
            return Waiting(record, left_s)
        return Taking(self._after(record.epoch), from_unknown=True)

    def _after(self, epoch: int) -> LeaseRecord:
        return LeaseRecord(epoch=epoch + 1, renewal=0, owner=self.owner, lives_s=self.lives_s)


@dataclass(slots=True)
class LeaseWatch:
    """Looks at one lease again and again, and judges by its own clock."""

    _newest: LeaseRecord | None = None
    _since_s: float = 0.0
    _is_heard: bool = False

    def see(self, record: LeaseRecord, now_s: float) -> bool | None:
        """Judge what was just read.

        Args:
            record: the lease.
            now_s: of the own clock, read after ``record`` was.

        Returns:
            Whether its holder was heard in the time that it lives; None if that is not known yet.
        """
        if record != self._newest:
            self._is_heard = self._newest is not None
            self._newest, self._since_s = record, now_s
        if self.left_s(now_s) <= 0:
            return False
        return True if self._is_heard else None

    def left_s(self, now_s: float) -> float:
        """Seconds until the holder counts as silent, if nothing changes."""
        if self._newest is None:
            return 0.0
        return self._since_s + PATIENCE * self._newest.lives_s - now_s


@dataclass(slots=True)
class Holding:
    """What the holder knows.

    Attributes:
        record: as it last wrote it.
        until_s: when it stops to count, by the own clock.
        is_lost: whether somebody else has the lease; it never comes back.
    """

    record: LeaseRecord
    until_s: float
    is_lost: bool = False

    @classmethod
    def taken(cls, record: LeaseRecord, began_s: float) -> Holding:
        """The lease was written.

        Args:
            record: what was written.
            began_s: of the own clock, read before that: the lease counts from there.
        """
        return cls(record, began_s + record.lives_s)

    def may_write(self, now_s: float) -> bool:
        """Whether nobody else can have the lease at this moment of the own clock."""
        return not self.is_lost and now_s < self.until_s

    def next(self, doing: str, *, released: bool = False) -> LeaseRecord:
        """What to write to renew the lease, or to give it back."""
        return self.record.model_copy(
            update={"renewal": self.record.renewal + 1, "doing": doing, "released": released}
        )

    def renewed(self, record: LeaseRecord, began_s: float) -> None:
        """The lease was renewed; see `taken`."""
        self.record, self.until_s = record, began_s + record.lives_s

    def found(self, record: LeaseRecord) -> bool:
        """Judge what stands there although a write of the own was refused.

        Returns:
            Whether it is the own lease: an earlier write has arrived whose answer has not.
        """
        held = self.record
        if record.epoch == held.epoch and record.owner == held.owner:
            self.record = record
            return True
        self.is_lost = True
        return False


def this_process() -> Owner:
    """This process as the holder of a lease; another one at every call."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=_started(os.getpid()) or "",
        token=secrets.token_hex(8),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def has_ended(owner: Owner) -> bool | None:
    """Whether a process is gone; None if that cannot be known from this machine.

    Process ids mean the same only within one namespace of one start of one machine. A process that
    has ended and is not yet taken note of by its parent is gone: it writes nothing any more.
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
    """When a process began, in its system's ticks; None if it is not there."""
    try:
        # The name, in parentheses, may have blanks and parentheses of its own.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in ("Z", "X") else started


_RENEWALS: Final = 5  # within a life
_log = logging.getLogger(__name__)


class Fence(Protocol):
    """Tells a holder that another one may act."""

    def check(self) -> None:
        """Return if nobody else can act now.

        Raises:
            LeaseLostError: another holder may act.
        """


class Unfenced:
    """A `Fence` where nobody else can act: a simulation, or a single process."""

    def check(self) -> None:
        """See `Fence.check`."""


class LeaseKeeper:
    """The lease while this process holds it. Made by `LeaseSeeker`; any thread may call it.

    Args:
        store: where the lease lies.
        name: of the run, for messages.
        holding: what was written.
        tag: of what was written.
        clock: by which it counts.
        from_unknown: whether the holder before may still be there, unheard.
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
    def epoch(self) -> int:
        """Number of this holder of the lease; each new holder gets the next."""
        return self._holding.record.epoch

    def start(self) -> None:
        """Renew the lease from now on, on a thread of its own."""
        self._renewer.start()

    def note(self, doing: str) -> None:
        """Say what is being done; it stands in the lease from the next renewal on."""
        self._doing = doing

    def check(self) -> None:
        """Return if nobody else can have the lease now; costs nothing as a rule.

        After a pause the lease is renewed first, which is refused if somebody has taken it.

        Raises:
            LeaseLostError: somebody has.
            RunDirectoryError: that cannot be found out.
        """
        if not self.may_write():
            self.renew()

    def check_known(self) -> None:
        """Return unless it is known that somebody else has the lease; asks nobody.

        For what is written where only this process reads it, while the store may be out of reach.

        Raises:
            LeaseLostError: somebody has.
        """
        if self._holding.is_lost:
            raise self._lost()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For a small write that must not be late: nobody takes the lease while the block runs.

        Raises:
            LeaseLostError: somebody has taken it; the block is not run.
            RunDirectoryError: that cannot be found out.
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
        """Whether nobody else can have the lease now; looks at the own clock only."""
        return self._holding.may_write(self._clock.now_s())

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: somebody else has it.
            RunDirectoryError: it cannot be written.
        """
        self._put(released=False)

    def close(self) -> None:
        """Give the lease back, so that the next process need not wait; never raises."""
        self._ended.set()
        if self._renewer.is_alive():
            self._renewer.join()
        if self._holding.is_lost:
            return
        try:
            self._put(released=True)
        except GeoRayError as error:
            _log.warning("the lease of %s runs out by itself: %s", self._name, error.message)

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
            self._by = f" by {record.owner.text}, as holder {record.epoch}"
        return LeaseLostError(
            f"{self._name} was taken over{self._by}; this process was holder {self.epoch} and "
            "writes nothing to the run any more"
        )

    def _renew_often(self) -> None:
        limited_log = RateLimitedLog(_log, 10.0)
        while not self._ended.wait(self._holding.record.lives_s / _RENEWALS):
            try:
                self.renew()
            except LeaseLostError:
                return  # who writes next is told
            except GeoRayError as error:
                limited_log.warning(
                    "renew", f"{self._name}: its lease is not renewed: {error.message}"
                )


LEASE_S: Final = 10.0
_POLL_EVERY_S: Final = 0.25


class LeaseSeeker:
    """One process that wants the lease of one run.

    Args:
        store: where the lease lies.
        name: of the run, for messages.
        notify: told why it waits.
        lives_s: for how long a renewal of its own is to count.
        clock: by which it judges; a `BootClock` if None, so that a lease also runs out while the
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
        """Return when the lease is to be had; writes nothing.

        Waits for the time that a lease lives if its holder may be alive and is not heard.

        Raises:
            RunHeldError: another process drives the run.
            RunDirectoryError: the lease cannot be read.
        """
        while isinstance(decision := self._see()[0], Waiting):
            self._wait_for(decision)

    def take(self) -> LeaseKeeper:
        """Take the lease, and keep it until `LeaseKeeper.close`; waits as `wait` does.

        Raises:
            RunHeldError: another process drives the run.
            RunDirectoryError: the lease cannot be read or written.
        """
        while isinstance(found := self.try_acquire(), Waiting):
            self._wait_for(found)
        found.start()
        return found

    def try_acquire(self) -> LeaseKeeper | Waiting:
        """Look at the lease once, and take it if it is to be had.

        Returns:
            The lease, which nobody renews yet; or what to wait for.

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
            # Somebody was quicker.

    def _see(self) -> tuple[Taking | Waiting, StoredValue | None, float]:
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
                f"{self._name} is driven by {what.record.owner.text}: looking for up to "
                f"{what.left_s:.0f} s whether that lives"
            )
        self._clock.sleep_s(min(what.left_s, _POLL_EVERY_S))


def _held(name: str, record: LeaseRecord) -> RunHeldError:
    owner = record.owner
    return RunHeldError(
        f"{name} is being driven: {owner.text}",
        fix=f"See how it stands with `geo-ray status {name}`, or watch it with `geo-ray train "
        f"--resume {name}` and no changes to its configuration. To continue it from here or with "
        f"changes, stop it first: `geo-ray stop {name}`.",
    )


REMOTE_LEASE_S: Final = 30.0
"""Of a lease in a bucket: each renewal is paid for."""


def seeker_of(
    run_dir: Path, notify: Callable[[str], None], remote_store: ConditionalStore | None = None
) -> LeaseSeeker:
    """What seeks the lease of a run.

    Args:
        run_dir: its directory.
        notify: told why it takes a while.
        remote_store: where the lease lies, if that is not in the directory.
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
        RunHeldError: another process drives the run.
        RunDirectoryError: the lease cannot be read or written.
    """
    keeper = seeker.take()
    try:
        yield keeper
    finally:
        keeper.close()
