"""The processes that serve a run, the standby, and the addresses that ranks know.

The run loop is the only one that decides: it lets the standby replace a lost server, or lets the
server continue without a lost standby, and never both. With each decision it signs a new endpoint
list (`geo_ray.joining.endpoints`). The standby runs on another node if the cluster has one. Holders
of further slices have no standby: the run continues from its newest checkpoint if one is lost.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from geo_ray.base.errors import CertificateError, GeoRayError, RegionLostError
from geo_ray.base.files import write_atomic
from geo_ray.experiment.experiment import Experiment, ServeConfig
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import EndpointList, SignedEndpoints, address_text
from geo_ray.joining.layout import Layout, holder_ranges
from geo_ray.joining.protocol import SERVER, JoinTerms, process_words
from geo_ray.joining.server import STANDBY
from geo_ray.joining.slices import SavedRun
from geo_ray.ray_cluster.calls import (
    Handle,
    PhaseProgress,
    ProgressCallback,
    collect,
    kill,
    no_progress,
)
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.runtime.group_actor import JOIN_KEY
from geo_ray.runtime.launcher import ProcessLauncher, ProcessSpec
from geo_ray.runtime.served_checkpoints import send_saved
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.security.process_keys import seal_secret

log = logging.getLogger(__name__)

ADDRESS_FILE: Final = "address"
"""File in the folder of credentials with the address at which the run is served."""
_LIST_FILE: Final = "endpoints.json"
_AUTHORITY_FILE: Final = "authority.json"
_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_CLOSE_S: Final = 60.0
_END_S: Final = 4.0  # shorter than a supervisor gives the run actor to end
_LOOK_S: Final = 1.0
_RETRY_S: Final = 5.0
_PIECE_BYTES: Final = 32 << 20


def write_credentials(experiment: Experiment, folder: Path) -> str:
    """Write the run's authority and the credentials of servers and regions, unless they exist.

    Returns:
        The run's id.
    """
    own = folder / f"{SERVER}.pem"
    if own.exists():
        return JoinCredentials.read(own).run_id
    authority, key = Authority.create(experiment.name), secrets.token_bytes(32)
    run_id = f"{experiment.name}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True, exist_ok=True)
    pems = {"cert": authority.cert_pem.decode(), "key": authority.key_pem.decode()}
    write_atomic(folder / _AUTHORITY_FILE, json.dumps(pems).encode(), 0o600)
    for name in (*experiment.region_names, STANDBY, SERVER):
        JoinCredentials(name, run_id, key, authority.issue(name)).write(folder / f"{name}.pem")
    return run_id


def _read_authority(folder: Path) -> Authority:
    """Read the run's authority.

    Raises:
        CertificateError: it cannot be read.
    """
    path = folder / _AUTHORITY_FILE
    try:
        pems = json.loads(path.read_bytes())
        return Authority.from_pem(pems["cert"].encode(), pems["key"].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CertificateError(
            f"cannot read {path}: {error!r}", fix="Restore the file from the run's directory."
        ) from None


@dataclass(frozen=True, slots=True)
class _Process:
    """An averager's process.

    Attributes:
        actor: its actor.
        slot: number of its bundle.
        host: its machine.
        public: its public key.
        port: where it listens, or will.
        pid: its process id there; 0: unknown.
    """

    actor: Handle
    slot: int
    host: str
    public: bytes
    port: int
    pid: int = 0


class AveragerProcesses:
    """See the module.

    Args:
        experiment: the run.
        terms: what ranks must know.
        launcher: starts processes.
        placed: places of the server and its standby.
        folder: credentials of the run; see `write_credentials`.
    """

    def __init__(
        self,
        experiment: Experiment,
        terms: JoinTerms,
        launcher: ProcessLauncher,
        placed: PlacedRegion,
        folder: Path,
    ) -> None:
        self._experiment, self._terms = experiment, terms
        self._launcher, self._placed, self._folder = launcher, placed, folder
        self._authority = _read_authority(folder)
        self._texts = {
            name: JoinCredentials.read(folder / f"{name}.pem").text() for name in (SERVER, STANDBY)
        }
        self._run_id = JoinCredentials.read(folder / f"{SERVER}.pem").run_id
        self._list = self._known_list()
        self._server: _Process | None = None
        self._standby: _Process | None = None
        self._holders: list[Handle] = []  # from holder 1 on
        self._holder_addresses: list[str] = []
        self._server_links: dict[str, dict[str, int]] = {}  # of the newest call of `links`
        self._earlier_links: dict[str, dict[str, int]] = {}  # of servers that were replaced
        self._starting: Future[_Process] | None = None
        self._starter = ThreadPoolExecutor(1, "standby")
        self._next_s = 0.0  # when a standby is started, or looked at
        self._attempt = 0
        self._ports: dict[int, int] = {}  # by slot, so that a rank that was away finds the run
        self._events: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ the server

    def start(self, saved: SavedRun | None, progress: ProgressCallback = no_progress) -> None:
        """Start the server, and the other processes that hold slices.

        Args:
            saved: the checkpoint from which the run continues; None: it begins.
            progress: receives the processes awaited.
        """
        serve, listed = self._experiment.served_at, self._list
        earlier = 0 if listed is None else listed.addresses[0][1]
        starts = partial(progress, "starting processes")
        made = self._make(0, 0, starts)
        if saved is not None:
            send_saved(made.actor, saved, *_range_of(saved, 0, serve.holders))
        self._server = self._listening(made, serve.port or earlier)
        self._ports[0] = self._server.port
        self._publish(self._term + 1)
        for number in range(1, serve.holders):
            self._holders.append(self._start_holder(number, self._server, saved, starts))

    def _start_holder(
        self, number: int, server: _Process, saved: SavedRun | None, progress: PhaseProgress
    ) -> Handle:
        """Start a process that holds the slices of one part of the model."""
        serve, cpus = self._experiment.served_at, self._experiment.regions[0].cpus_per_server
        transport = self._experiment.transport.model_dump_json()
        arguments = (self._terms.model_dump_json(), transport, serve.host, number, cpus)
        self._attempt += 1
        strategy = self._placed.strategy("bridge", number)
        spec = ProcessSpec("holder", arguments, cpus, 0.0, strategy, None, self._attempt)
        (actor,) = self._launcher.make([spec])
        name = process_words(number)
        host, public = collect({name: actor.introduce.remote()}, _START_S, progress)[name]
        if saved is not None:
            send_saved(actor, saved, *_range_of(saved, number, serve.holders))
        sealed = seal_secret(self._texts[SERVER].encode(), public, JOIN_KEY)
        here = _Process(actor, number, host, public, 0)
        port = serve.port and serve.port + number
        advertised = self._listed(here)[0]
        call = actor.listen.remote(sealed, self._inner(server), advertised, port)
        bound = collect({name: call}, _START_S)[name]
        self._holder_addresses.append(address_text((advertised, bound)))
        return actor

    @property
    def holders(self) -> Sequence[Handle]:
        """The actors of other processes that hold slices, in their order."""
        return self._holders

    def ask_holder(self, holder: int, call: str, *arguments: Any) -> Any:
        """Call the actor of a process that holds slices; 0: the server.

        Raises:
            RegionLostError: the process is lost.
            GeoRayError: the call has raised it.
        """
        if holder == 0:
            return self.ask(call, *arguments)
        name, actor = process_words(holder), self._holders[holder - 1]
        return collect({name: getattr(actor, call).remote(*arguments)}, _ANSWER_S)[name]

    def links(self) -> dict[str, dict[str, int]]:
        """Return the bytes received from each region, and sent to it, by all processes.

        Those of a server that was replaced are included as of the last call before its loss.

        Raises:
            RegionLostError: a process is lost.
        """
        found: dict[str, dict[str, int]] = {}
        self._server_links = self.ask_holder(0, "links")  # before: a lost server is replaced here
        others = [self.ask_holder(1 + number, "links") for number in range(len(self._holders))]
        for links in (self._earlier_links, self._server_links, *others):
            _add(found, links)
        return found

    def fetch_model(self) -> tuple[Layout, Tensor]:
        """Return the model's layout and its final parameters, of which each holder has a range.

        Raises:
            RegionLostError: a process is lost.
        """
        layout = Layout.from_json(self.ask("model"))
        params_P, piece = torch.empty(layout.size), _PIECE_BYTES // 4
        ranges = holder_ranges(layout, self._experiment.served_at.holders)
        for holder, (first, last) in enumerate(ranges):
            for start in range(first, last, piece):
                stop = min(last, start + piece)
                data = self.ask_holder(holder, "model_piece", start - first, stop - first)
                params_P[start:stop] = torch.frombuffer(bytearray(data), dtype=torch.float32)
        return layout, params_P

    def _watch_holders(self) -> None:
        """End the run if a process that holds slices is lost; the next poll raises its error."""
        for holder in range(1, 1 + len(self._holders)):
            try:
                self.ask_holder(holder, "check")
            except RegionLostError as error:
                self.ask("lose_holder", holder, error.message)

    @property
    def actor(self) -> Handle:
        """The server's actor."""
        return None if self._server is None else self._server.actor

    @property
    def address(self) -> str:
        """Where the run is served."""
        return address_text(("", 0) if self._list is None else self._list.addresses[0])

    @property
    def holder_addresses(self) -> Sequence[str]:
        """Where ranks reach the other processes that hold slices, in their order."""
        return self._holder_addresses

    @property
    def pid(self) -> int:
        """Process id of the server, on its machine."""
        return 0 if self._server is None else self._server.pid

    def ask(self, call: str, *arguments: Any) -> Any:
        """Call the server's actor; the standby answers if the server is lost.

        Args:
            call: name of a method of `AveragerActor`.
            arguments: its arguments.

        Raises:
            RegionLostError: the server is lost, and there is no standby that can replace it.
            GeoRayError: the call has raised it.
        """
        while True:
            try:
                ref = getattr(self.actor, call).remote(*arguments)
                return collect({SERVER: ref}, _ANSWER_S)[SERVER]
            except RegionLostError as error:
                if not self._replace(error):
                    raise

    def lose(self, region: str, cause: str) -> None:
        """Continue without a region."""
        self.actor.lose.remote(region, cause)

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call, without times."""
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Wait until ranks have what was sent to them, and close all connections.

        A rank that lacks the run's end would wait for it. Processes that are lost are left out.
        The server is first: its last messages may wait for the holders.
        """
        self._finish({SERVER: self.actor})
        self._finish({process_words(1 + n): each for n, each in enumerate(self._holders)})

    def _finish(self, actors: Mapping[str, Handle]) -> None:
        calls = {name: actor.close.remote() for name, actor in actors.items()}
        for name, call in calls.items():
            try:
                collect({name: call}, _CLOSE_S)
            except GeoRayError as error:
                log.warning("regions may not have heard the end of the run: %s", error.message)

    def end(self, cause: str) -> None:
        """Tell ranks that the run ends at once; wait a few seconds until they know it."""
        try:
            collect({SERVER: self.actor.end.remote(cause, _END_S)}, _END_S + 1.0)
        except GeoRayError as error:
            log.warning("regions may not have heard the end of the run: %s", error.message)

    def close(self) -> None:
        """Start no further standby; the processes end with their places."""
        self._starter.shutdown(wait=False, cancel_futures=True)

    def _replace(self, cause: GeoRayError) -> bool:
        """Let the standby replace the lost server; return whether it does."""
        lost, standby, began_s = self._server, self._standby, time.monotonic()
        if standby is None:
            return False
        if lost is not None:
            kill(lost.actor)  # if it lives, it has no standby and cannot continue
        self._standby, term = None, self._term + 1
        try:
            sealed = seal_secret(self._texts[SERVER].encode(), standby.public, JOIN_KEY)
            collect({STANDBY: standby.actor.promote.remote(sealed, term)}, _START_S)
        except GeoRayError as error:
            log.warning("the standby cannot replace the server: %s", error.message)
            kill(standby.actor)
            return False
        self._server = standby
        _add(self._earlier_links, self._server_links)
        self._server_links = {}
        self._publish(term)
        took_s = time.monotonic() - began_s
        self._events.append(
            {
                "kind": "server_replaced",
                "address": self.address,
                "pid": self.pid,
                "term": term,
                "took_s": took_s,
                "cause": cause.message,
            }
        )
        return True

    # ------------------------------------------------------------------ the standby

    def watch(self, stalled_s: float) -> None:
        """Start the standby, or replace one that is lost; notice lost holders.

        Args:
            stalled_s: time for which the server has waited for its standby.
        """
        self._watch_holders()
        if self._experiment.averager.standby is None:
            return
        if self._starting is not None:
            if self._starting.done():
                self._take_started(self._starting)
            return
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LOOK_S
        self._server_links = self.ask_holder(0, "links")  # its counts end with it
        if self._standby is None:
            self._starting = self._starter.submit(self._start_standby)
            return
        try:
            if stalled_s > self._experiment.served_at.lost_after_s / 2:
                raise RegionLostError(f"it has confirmed nothing for {stalled_s:.0f} s")
            collect({STANDBY: self._standby.actor.is_standby_ready.remote()}, _ANSWER_S)
        except GeoRayError as error:
            self._drop(self._standby, error)

    def _take_started(self, starting: Future[_Process]) -> None:
        self._starting, error = None, starting.exception()
        self._next_s = time.monotonic() + (_LOOK_S if error is None else _RETRY_S)
        if error is not None:
            log.warning("the standby could not be started: %s", error)
            return
        self._standby = starting.result()
        self._publish(self._term)
        found = {
            "address": address_text(self._listed(self._standby)),
            "pid": self._standby.pid,
            "term": self._term,
        }
        self._events.append({"kind": "server_standby_ready", **found})

    def _drop(self, standby: _Process, cause: GeoRayError) -> None:
        """Continue without a standby, which is never promoted after that."""
        self._standby = None
        kill(standby.actor)
        self.ask("release_standby")
        self._publish(self._term)
        found = {"address": address_text(self._listed(standby)), "cause": cause.message}
        self._events.append({"kind": "server_standby_lost", **found})

    def _start_standby(self) -> _Process:
        """Start a standby and wait until it is ready; in another thread.

        Raises:
            GeoRayError: the server or the standby was lost meanwhile.
        """
        server = self._server
        if server is None:
            raise RegionLostError("there is no server")
        serve = self._experiment.served_at
        port, slot = serve.port, 0 if server.slot else serve.holders  # others have those between
        another = port if server.port != port else port + serve.holders
        made = self._make(slot, another if port else self._ports.get(slot, 0))
        self._ports[slot] = made.port
        try:
            sealed = seal_secret(self._texts[STANDBY].encode(), made.public, JOIN_KEY)
            call = made.actor.follow.remote(sealed, self._inner(server))
            collect({STANDBY: call}, _START_S)
            snapshot = server.actor.take_snapshot.remote()  # from process to process
            collect({STANDBY: made.actor.restore.remote(snapshot)}, _START_S)
            until_s = time.monotonic() + _START_S
            while not collect({STANDBY: made.actor.is_standby_ready.remote()}, _START_S)[STANDBY]:
                if time.monotonic() > until_s:
                    raise RegionLostError(f"the standby was not ready within {_START_S:g} s")
                time.sleep(_LOOK_S / 10)
        except BaseException:
            kill(made.actor)
            server.actor.release_standby.remote()
            raise
        return made

    # ------------------------------------------------------------------ processes

    def _make(self, slot: int, port: int, progress: PhaseProgress | None = None) -> _Process:
        """Start a process; ``port``: where it will listen if that is free, as a standby."""
        experiment, serve = self._experiment, self._experiment.served_at
        cpus = experiment.regions[0].cpus_per_server
        arguments = (
            self._terms.model_dump_json(),
            experiment.transport.model_dump_json(),
            serve.host,
            serve.lost_after_s,
            experiment.members.min or 1,
            experiment.members.wait_s,
            cpus,
            experiment.averager.standby is not None,
        )
        self._attempt += 1
        strategy = self._placed.strategy("bridge", slot)
        spec = ProcessSpec("averager", arguments, cpus, 0.0, strategy, None, self._attempt)
        (actor,) = self._launcher.make([spec])
        call = actor.introduce.remote(port)
        host, public, reserved, pid = collect({SERVER: call}, _START_S, progress)[SERVER]
        return _Process(actor, slot, host, public, reserved, pid)

    def _listening(self, made: _Process, port: int) -> _Process:
        sealed = seal_secret(self._texts[SERVER].encode(), made.public, JOIN_KEY)
        call = made.actor.listen.remote(sealed, port, self._term + 1)
        found = collect({SERVER: call}, _START_S)[SERVER]
        return replace(made, port=found)

    # ------------------------------------------------------------------ addresses

    @property
    def _term(self) -> int:
        return 0 if self._list is None else self._list.term

    def _known_list(self) -> EndpointList | None:
        """Return the list of an earlier start of the run, which its regions know."""
        path = self._folder / _LIST_FILE
        if not path.exists():
            return None
        return SignedEndpoints.load(path.read_bytes(), self._run_id, self._authority.cert_pem).list

    def _listed(self, process: _Process) -> tuple[str, int]:
        serve, here = self._experiment.served_at, self._server
        if serve.advertise is not None and (here is None or process.host == here.host):
            return serve.advertise, process.port
        return _host(serve, process.host), process.port

    def _inner(self, process: _Process) -> tuple[str, int]:
        """Return the address of a process for other processes of the run."""
        return _host(self._experiment.served_at, process.host), process.port

    def _publish(self, term: int) -> None:
        """Sign a new list, save it, and let the server send it to all ranks.

        Holders get one with the addresses within the cluster, from here: they must find a server
        that has replaced theirs.
        """
        processes = [each for each in (self._server, self._standby) if each is not None]
        self._list = EndpointList(
            run_id=self._run_id,
            version=1 if self._list is None else self._list.version + 1,
            term=term,
            addresses=tuple(self._listed(each) for each in processes),
        )
        signed = SignedEndpoints.sign(self._list, self._authority)
        write_atomic(self._folder / _LIST_FILE, signed.dump())
        write_atomic(self._folder / ADDRESS_FILE, f"{self.address}\n".encode("ascii"))
        self.actor.publish.remote(signed)
        inner = tuple(self._inner(each) for each in processes)
        own = self._list.model_copy(update={"addresses": inner})
        for holder in self._holders:
            holder.publish.remote(SignedEndpoints.sign(own, self._authority))


def _range_of(saved: SavedRun, holder: int, count: int) -> tuple[int, int]:
    """Return the range of the model that a process holds."""
    return holder_ranges(saved.layout, count)[holder]


def _add(sums: dict[str, dict[str, int]], links: Mapping[str, Mapping[str, int]]) -> None:
    for region, counts in links.items():
        known = sums.setdefault(region, dict.fromkeys(counts, 0))
        for name, count in counts.items():
            known[name] += count


def _host(server: ServeConfig, here: str) -> str:
    """Return the host of an address; ``here`` is the process's machine."""
    return here if server.host in ("0.0.0.0", "::") else server.host  # noqa: S104  (compared)
