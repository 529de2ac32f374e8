"""The local cloud: machines that are processes of this one, for trials, demos and fault tests.

All that it knows lies in a directory, so that another process sees the same machines, and a launch
that broke off is completed by the same request. Machines belong to no process that asked for them;
they end by their own keeper, at the latest when their time is up.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from geo_ray.errors import ProviderRefusedError
from geo_ray.providers.base import (
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineState,
    Pool,
    Shortage,
    Stock,
)
from geo_ray.providers.local.catalog import LocalCatalog, read_catalog
from geo_ray.providers.local.folder import LocalMachineFolder, put
from geo_ray.providers.local.keeper import born

_REMEMBERED_S: Final = 86400.0
_FAILURES_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class LocalMachinePlace:
    """What a program on a local machine is told of it.

    Attributes:
        id: the machine's.
        address: its loopback address.
        cpus: its logical CPUs.
        scratch: its own directory, removed at its end.
        notice_path: file of its notice.
    """

    id: str
    address: str
    cpus: int
    scratch: Path
    notice_path: Path


class LocalMachineProgram(Protocol):
    """What runs on local machines; the machine ends with it."""

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> Mapping[str, tuple[Sequence[str], Mapping[str, str]]]:
        """Return arguments and environment of processes by name; the first is the program."""


class LocalProvider:
    """See the module.

    Args:
        root: the cloud's directory, with its catalog.
        program: runs on the machines that this provider launches; None: it launches none.
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
        """Return all machines that bear the cluster's name."""
        listed_until = time.time() - read_catalog(self._root).list_delay_s
        self._children = [child for child in self._children if child.poll() is None]
        return [
            machine
            for folder in self._folders()
            if (folder.record() or {}).get("cluster") == cluster
            if (machine := folder.machine()) is not None and machine.launched_unix_s <= listed_until
        ]

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """Start machines; the same request again starts only what it lacks."""
        if self._program is None:
            raise ProviderRefusedError(
                "this local cloud has no program for its machines",
                fix="Give LocalProvider a program, such as RayMachineProgram.",
            )
        catalog = read_catalog(self._root)
        with self._locked():
            self._forget()
            answered = self._root / "requests" / f"{_digest(request.request_id)}.json"
            if answered.exists():
                granted = int(json.loads(answered.read_text())["granted"])
                shortage = json.loads(answered.read_text())["shortage"]
            else:
                granted, shortage = self._grant(request, catalog)
                answered.parent.mkdir(mode=0o700, exist_ok=True)
                told: dict[str, Any] = {
                    "granted": granted,
                    "shortage": shortage,
                    "cluster": request.cluster,
                }
                told |= {"request": asdict(request), "at_unix_s": time.time()}
                put(answered, told)
            for number in range(granted):
                self._make(request, number, catalog)
        return _failures(request, granted, shortage)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """End machines politely."""
        for folder in self._named(machine_ids):
            folder.ask("terminate")

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """Return what launches of the last minutes lacked."""
        since = time.time() - _FAILURES_S
        found: list[LaunchFailure] = []
        for path in sorted((self._root / "requests").glob("*.json")):
            told = json.loads(path.read_text())
            if told["cluster"] == cluster and told["at_unix_s"] >= since:
                asked = told["request"]
                request = LaunchRequest(**{**asked, "pool": Pool(**asked["pool"])})
                found += _failures(request, told["granted"], told["shortage"])
        return found

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """Return what the catalog has."""
        catalog, living = read_catalog(self._root), self._living()
        return [self._stock(pool, catalog, living) for pool in pools]

    # ------------------------------------------------------------------ for demos and fault tests

    def preempt(self, machine_id: str, notice_s: float) -> None:
        """Take a machine back, as a cloud does with spot machines.

        Args:
            machine_id: which.
            notice_s: how long it stays after the notice; 0: it is gone without any, as if cut off.
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
        stock = self._stock(request.pool, catalog, self._living())
        if stock.usd_per_hour is None:
            return 0, Shortage.SOLD_OUT
        granted, shortage = request.count, None
        if stock.available is not None and stock.available < granted:
            granted, shortage = stock.available, Shortage.SOLD_OUT
        if stock.quota_left is not None and stock.quota_left < granted:
            granted, shortage = stock.quota_left, Shortage.QUOTA
        return granted, shortage

    def _stock(self, pool: Pool, catalog: LocalCatalog, living: Sequence[Machine]) -> Stock:
        offer = next((one for one in catalog.offers if one.pool == pool), None)
        if offer is None:
            return Stock(pool, None)
        taken = sum(machine.pool == pool for machine in living)
        quota = catalog.quota.get(pool.region)
        used = sum(machine.pool.region == pool.region for machine in living)
        return Stock(
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
            if not folder.was_ever_kept():  # whoever wrote the record was killed right then
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
        """Return an address that no machine of this cloud has had; clouds share no network."""
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
        """Remove what ended long ago."""
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


def _failures(request: LaunchRequest, granted: int, shortage: str | None) -> list[LaunchFailure]:
    if shortage is None:
        return []
    why = {
        Shortage.SOLD_OUT: f"the pool has no more than {granted} machines left",
        Shortage.QUOTA: f"the quota of {request.pool.region} leaves {granted} machines",
    }[Shortage(shortage)]
    missing = request.count - granted
    return [LaunchFailure(request.request_id, request.pool, missing, Shortage(shortage), why)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scratch(folder: Path) -> Path:
    """Return a directory with a short name: sockets below it must not exceed 107 bytes."""
    system = tempfile.gettempdir()
    base = system if len(system) <= len("/tmp/xxxxxxxxxx") else "/tmp"  # noqa: S108
    return Path(base) / f"geo-{os.getuid()}-{_digest(str(folder.resolve()))[:12]}"
