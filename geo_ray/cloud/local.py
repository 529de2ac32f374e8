"""The local machine provider: processes as machines, for trials, demos and fault tests.

All state is in a directory, so other processes see the same machines, and an interrupted launch is
completed by repeating the request. Each machine is a separate process (`local_machine`) that is no
child of the process that requested it. It ends at the latest when its lifetime is over. The catalog
of offers is a file that may be changed while machines run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import Field, ValidationError

from geo_ray.base.errors import ProviderRefusedError
from geo_ray.base.model import StrictModel
from geo_ray.cloud import local_machine
from geo_ray.cloud.local_machine import born
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    LaunchRequest,
    Machine,
    MachineState,
    Market,
    Pool,
)

_NAME: Final = "catalog.json"


class LocalOffer(StrictModel):
    """A pool of the local cloud."""

    region: str = Field(min_length=1, description="region name in the local cloud")
    zone: str | None = Field(None, description="null: the region has no zones")
    type: str = Field(min_length=1, description="name of a machine type")
    market: Market = Field(Market.ON_DEMAND, description="on_demand or spot")
    usd_per_hour: float = Field(gt=0, description="price of a machine, in play money")
    capacity: int | None = Field(
        None, ge=0, description="maximum number of machines; null: no limit"
    )

    @property
    def pool(self) -> Pool:
        """The pool."""
        return Pool(region=self.region, zone=self.zone, type=self.type, market=self.market)


class LocalCatalog(StrictModel):
    """Offers and behavior of a local cloud."""

    offers: tuple[LocalOffer, ...] = Field((), description="available pools")
    cpus: dict[str, int] = Field(
        default_factory=dict, description="logical CPUs by machine type; default 1"
    )
    quota: dict[str, int] = Field(
        default_factory=dict, description="maximum machines by region; default: no limit"
    )
    start_delay_s: float = Field(
        0.0, ge=0, description="seconds from a launch to a running machine"
    )
    list_delay_s: float = Field(0.0, ge=0, description="seconds until a new machine is listed")
    longest_life_s: float = Field(43200.0, gt=0, description="maximum lifetime of a machine")
    owner_pid: int | None = Field(
        None, ge=1, description="id of a process; all machines end when it ends; null: none"
    )


def catalog_path(root: Path) -> Path:
    """Return the path of the catalog of a local cloud."""
    return root / _NAME


def read_catalog(root: Path) -> LocalCatalog:
    """Return the catalog of a local cloud.

    Raises:
        ProviderRefusedError: the cloud does not exist, or its catalog is invalid.
    """
    try:
        return LocalCatalog.model_validate_json(catalog_path(root).read_bytes())
    except OSError as error:
        raise ProviderRefusedError(
            f"no local cloud exists in {root}: {error.strerror or error}",
            fix="Create one with its catalog, or name an existing directory.",
        ) from None
    except ValidationError as error:
        message = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ProviderRefusedError(
            f"the catalog in {root} is not valid: {message}", fix=f"Correct {_NAME} there."
        ) from None


def write_catalog(root: Path, catalog: LocalCatalog) -> None:
    """Create a local cloud or change its catalog; running machines stay."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = root / f".{_NAME}.{os.getpid()}"
    temporary.write_text(catalog.model_dump_json(indent=1))
    temporary.replace(catalog_path(root))


@dataclass(frozen=True, slots=True)
class LocalMachineFolder:
    """Files of a machine. Any process may read them and request the end of the machine.

    Attributes:
        path: the folder, named after the machine.
    """

    path: Path

    @property
    def notice_path(self) -> Path:
        """Path of the notice file, which is written before a preemption."""
        return self.path / "notice.json"

    def start(self, record: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start the machine's keeper process, which outlives this process."""
        put(self.path / "machine.json", record)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the keeper inherits the lock
            with (self.path / "keeper.log").open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", local_machine.__file__, str(self.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def record(self) -> Mapping[str, Any] | None:
        """Return the launch record; None: there is none yet."""
        try:
            found = json.loads((self.path / "machine.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def was_ever_locked(self) -> bool:
        """Return whether a keeper process runs or has run."""
        return self._is_locked() or (self.path / "kept").exists()

    def machine(self) -> Machine | None:
        """Return the current machine; after its end, no process of it runs."""
        record = self.record()
        if record is None:
            return None
        state = self._state()
        if state is MachineState.ENDED:
            # of a keeper that was killed, whose processes died with it
            shutil.rmtree(record["scratch"], ignore_errors=True)
        ends = [record["ends_unix_s"], self._notice_unix_s()]
        return Machine(
            id=self.path.name,
            request_id=record["request_id"],
            pool=Pool(**{**record["pool"], "market": Market(record["pool"]["market"])}),
            state=state,
            launched_unix_s=record["launched_unix_s"],
            address=record["address"] if state is not MachineState.PENDING else None,
            labels=record["labels"],
            ends_unix_s=min((at for at in ends if at is not None), default=None),
            cluster_id=record.get("cluster_id", ""),  # machines of an earlier release have none
        )

    def ask(self, what: str) -> None:
        """Request ``terminate`` or ``kill`` from the keeper."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / what).touch()

    def give_notice(self, unix_s: float) -> None:
        """Announce a preemption at a time."""
        put(self.notice_path, {"unix_s": unix_s})

    def _notice_unix_s(self) -> float | None:
        try:
            return float(json.loads(self.notice_path.read_text())["unix_s"])
        except (OSError, ValueError, KeyError):
            return None

    def _state(self) -> MachineState:
        if not self._is_locked():
            return MachineState.ENDED
        if any((self.path / name).exists() for name in ("terminate", "kill", "ending")):
            return MachineState.ENDING
        started = (self.path / "started").exists()
        return MachineState.RUNNING if started else MachineState.PENDING

    def _is_locked(self) -> bool:
        try:
            lock = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def put(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


_REMEMBERED_S: Final = 86400.0
_FAILURES_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class LocalMachinePlace:
    """Properties of a local machine that its program receives.

    Attributes:
        id: id of the machine.
        address: loopback address.
        cpus: logical CPUs.
        scratch: scratch directory, removed when the machine ends.
        notice_path: path of the notice file.
    """

    id: str
    address: str
    cpus: int
    scratch: Path
    notice_path: Path


class LocalMachineProgram(Protocol):
    """Program of local machines; a machine ends with its program."""

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        """Return arguments and environment of processes by name. The first one is the program."""


class LocalProvider:
    """Local provider; see the module.

    Args:
        root: directory of the cloud, with its catalog.
        program: program of the machines that this provider launches; None: it cannot launch any.
    """

    def __init__(self, root: Path, program: LocalMachineProgram | None = None) -> None:
        self._root = root
        self._program = program
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def name(self) -> str:
        """Name of the provider."""
        return "local"

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """Return all machines of the cluster."""
        listed_until = time.time() - read_catalog(self._root).list_delay_s
        self._children = [child for child in self._children if child.poll() is None]
        return [
            machine
            for folder in self._folders()
            if (folder.record() or {}).get("cluster") == cluster
            if (machine := folder.machine()) is not None and machine.launched_unix_s <= listed_until
        ]

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Start machines. A repeated request starts only the missing ones."""
        if self._program is None:
            raise ProviderRefusedError(
                "this local provider has no program for machines",
                fix="Pass LocalProvider a program, such as RayMachineProgram.",
            )
        catalog = read_catalog(self._root)
        with self._locked():
            self._forget()
            answered = self._root / "requests" / f"{_digest(request.request_id)}.json"
            if answered.exists():
                granted = int(json.loads(answered.read_text())["granted"])
                kind = json.loads(answered.read_text())["kind"]
            else:
                granted, kind = self._grant(request, catalog)
                answered.parent.mkdir(mode=0o700, exist_ok=True)
                message: dict[str, Any] = {
                    "granted": granted,
                    "kind": kind,
                    "cluster": request.cluster,
                }
                message |= {"request": asdict(request), "at_unix_s": time.time()}
                put(answered, message)
            for number in range(granted):
                self._make(request, number, catalog)
        return _failures(request, granted, kind)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """Terminate machines gracefully."""
        for folder in self._named(machine_ids):
            folder.ask("terminate")

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return failures of launches in the last minutes."""
        since = time.time() - _FAILURES_S
        found: list[LaunchFailure] = []
        for path in sorted((self._root / "requests").glob("*.json")):
            message = json.loads(path.read_text())
            if message["cluster"] == cluster and message["at_unix_s"] >= since:
                asked = message["request"]
                request = LaunchRequest(**{**asked, "pool": Pool(**asked["pool"])})
                found += _failures(request, message["granted"], message["kind"])
        return found

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """Return the offers of the catalog."""
        catalog, living = read_catalog(self._root), self._living()
        return [self._availability(pool, catalog, living) for pool in pools]

    # ------------------------------------------------------------------ for demos and fault tests

    def preempt(self, machine_id: str, notice_s: float) -> None:
        """Preempt a machine, as a cloud does with spot machines.

        Args:
            machine_id: id of the machine.
            notice_s: seconds from the notice to the end; 0: it is killed without notice.
        """
        for folder in self._named([machine_id]):
            if notice_s > 0:
                folder.give_notice(time.time() + notice_s)
            else:
                folder.ask("kill")

    def logs(self, machine_id: str) -> Mapping[str, str]:
        """Return what the processes of a machine printed, by process."""
        return {
            path.stem: path.read_text(errors="replace")
            for folder in self._named([machine_id])
            for path in sorted(folder.path.glob("*.log"))
        }

    # ------------------------------------------------------------------ parts

    def _grant(self, request: LaunchRequest, catalog: LocalCatalog) -> tuple[int, str | None]:
        availability = self._availability(request.pool, catalog, self._living())
        if availability.usd_per_hour is None:
            return 0, LaunchFailureKind.SOLD_OUT
        granted, kind = request.count, None
        if availability.available is not None and availability.available < granted:
            granted, kind = availability.available, LaunchFailureKind.SOLD_OUT
        if availability.quota_left is not None and availability.quota_left < granted:
            granted, kind = availability.quota_left, LaunchFailureKind.QUOTA
        return granted, kind

    def _availability(
        self, pool: Pool, catalog: LocalCatalog, living: Sequence[Machine]
    ) -> Availability:
        offer = next((one for one in catalog.offers if one.pool == pool), None)
        if offer is None:
            return Availability(pool, None)
        taken = sum(machine.pool == pool for machine in living)
        quota = catalog.quota.get(pool.region)
        used = sum(machine.pool.region == pool.region for machine in living)
        return Availability(
            pool,
            offer.usd_per_hour,
            available=None if offer.capacity is None else max(0, offer.capacity - taken),
            quota_left=None if quota is None else max(0, quota - used),
        )

    def _make(self, request: LaunchRequest, number: int, catalog: LocalCatalog) -> None:
        folder = LocalMachineFolder(
            self._root / "machines" / f"i-{_digest(request.request_id)[:8]}-{number}"
        )
        if self._program is None:
            return
        if (known := folder.record()) is not None:
            if (
                not folder.was_ever_locked()
            ):  # the launching process was killed after it had written the record
                self._children.append(folder.start(known))
            return
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = time.time()
        life_ends = now + catalog.longest_life_s
        place = LocalMachinePlace(
            id=folder.path.name,
            address=self._next_address(),
            cpus=catalog.cpus.get(request.pool.type, 1),
            scratch=_scratch(folder.path),
            notice_path=folder.notice_path,
        )
        programs = self._program.processes(place, request)
        owner = catalog.owner_pid
        record = {
            "request_id": request.request_id,
            "cluster": request.cluster,
            "cluster_id": request.cluster_id,
            "pool": asdict(request.pool),
            "labels": dict(request.labels),
            "launched_unix_s": now,
            "ends_unix_s": min(life_ends, request.ends_unix_s or life_ends),
            "start_delay_s": catalog.start_delay_s,
            "address": place.address,
            "scratch": str(place.scratch),
            "owner": None if owner is None else {"pid": owner, "born": born(owner)},
            "main": next(iter(programs)),
            "programs": {
                name: {"argv": list(argv), "env": dict(env)}
                for name, (argv, env) in programs.items()
            },
        }
        self._children.append(folder.start(record))

    def _next_address(self) -> str:
        """Return an address that no machine of this cloud has used.

        Clouds use different networks.
        """
        path = self._root / "addresses.json"
        number = int(json.loads(path.read_text())["given"]) if path.exists() else 0
        put(path, {"given": number + 1})
        network = 16 + int(_digest(str(self._root.resolve())), 16) % 200
        return f"127.{network}.{number // 250 % 250}.{number % 250 + 2}"

    def _folders(self) -> Iterator[LocalMachineFolder]:
        for path in sorted((self._root / "machines").glob("i-*")):
            yield LocalMachineFolder(path)

    def _named(self, machine_ids: Sequence[str]) -> Iterator[LocalMachineFolder]:
        wanted = set(machine_ids)
        return (folder for folder in self._folders() if folder.path.name in wanted)

    def _living(self) -> list[Machine]:
        found = (folder.machine() for folder in self._folders())
        return [m for m in found if m is not None and m.state is not MachineState.ENDED]

    def _forget(self) -> None:
        """Remove files of machines that ended long ago."""
        before = time.time() - _REMEMBERED_S
        for path in (self._root / "requests").glob("*.json"):
            if path.stat().st_mtime < before:
                path.unlink()
        for folder in self._folders():
            machine = folder.machine()
            if (
                machine is not None
                and machine.state is MachineState.ENDED
                and machine.launched_unix_s < before
            ):
                shutil.rmtree(folder.path, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _failures(request: LaunchRequest, granted: int, kind: str | None) -> list[LaunchFailure]:
    if kind is None:
        return []
    why = {
        LaunchFailureKind.SOLD_OUT: f"the pool has no more than {granted} machines left",
        LaunchFailureKind.QUOTA: f"the quota of {request.pool.region} leaves {granted} machines",
    }[LaunchFailureKind(kind)]
    missing = request.count - granted
    return [LaunchFailure(request.request_id, request.pool, missing, LaunchFailureKind(kind), why)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scratch(folder: Path) -> Path:
    """Return a directory with a short name: sockets below it must not exceed 107 bytes."""
    system = tempfile.gettempdir()
    base = system if len(system) <= len("/tmp/xxxxxxxxxx") else "/tmp"  # noqa: S108
    return Path(base) / f"geo-{os.getuid()}-{_digest(str(folder.resolve()))[:12]}"
