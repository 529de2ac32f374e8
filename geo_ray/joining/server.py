"""Serves a `JoinService` over the network, and follows such a server as its standby; no Ray.

Messages of ranks are handled one at a time, in receiving threads. One thread per rank sends the
answers: a receiving thread must not wait for space in an outbox, nor one rank for another that is
slow. A further thread continues without lost regions, and wakes strategies that asked for it.

A `JoinStandby` dials the server and follows its log (`geo_ray.joining.replication`). `promote`
makes a server of it. The lost server may still live, but cannot continue: it executes nothing
without its standby, ranks refuse its term, and it ends when it hears of the promotion or has been
without its standby for too long.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Final

from geo_ray.base.errors import GeoRayError, InvariantError
from geo_ray.base.memory import trim_heap
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import SignedEndpoints
from geo_ray.joining.holder import SliceHolder
from geo_ray.joining.link import RESUME
from geo_ray.joining.protocol import (
    SERVER,
    JoinTerms,
    Outbound,
    holder_name,
    rank_of,
    region_of,
)
from geo_ray.joining.replication import (
    BeginSave,
    EndRun,
    EndSave,
    LoseHolder,
    LoseRegion,
    Op,
    Received,
    ReplicatedService,
    RequestStop,
    ServiceEntry,
    SetInterval,
    Tick,
)
from geo_ray.joining.service import Stage
from geo_ray.joining.slices import SavedRun, SavedSlice
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message, PeerStats
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

STANDBY: Final = "geo-ray-standby"
"""Name of the endpoint of a standby."""
_FOLLOW: Final = "follow"
_ACK: Final = "ack"
_FENCE: Final = "fence"
_CLOSE_S: Final = 5.0
_DRAIN_S: Final = 15.0  # for which the last messages to ranks may take
_TICK_S: Final = 0.1


class JoinServer:
    """A listening `JoinService`.

    Attributes:
        service: the run's state machine; use it under `lock`.
        lock: guards the service.
        address: where it listens.
        is_fenced: whether a standby has replaced it, or may have.

    Args:
        terms: the run.
        credentials: those of `SERVER`.
        host: where to listen.
        port: where to listen; 0 takes a free one.
        transport: settings of connections.
        lost_after_s: a region is lost if one of its ranks is not connected for so long, to this
            server or to another process that holds slices.
        resumed: the checkpoint from which the run continues; None: it begins.
        least: with fewer regions, the others wait for one that was lost to join again.
        wait_s: longest such wait, and longest time between updates of the ranks of a region.
        term: number of this server in the run; ranks refuse servers of lower ones. None: the time.
        has_standby: whether a standby may follow.
        promoted: state of the standby that becomes the server; None: the run begins or is resumed.
    """

    def __init__(
        self,
        terms: JoinTerms,
        credentials: JoinCredentials,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: TransportConfig | None = None,
        lost_after_s: float = 600.0,
        resumed: SavedRun | None = None,
        least: int = 1,
        wait_s: float = 600.0,
        term: int | None = None,
        has_standby: bool = False,
        promoted: ReplicatedService | None = None,
    ) -> None:
        if promoted is None:
            promoted = ReplicatedService.new(terms, resumed, least, keeps=has_standby)
        self._origin_s = time.monotonic() - promoted.t_s
        self._log, self.service = promoted, promoted.service
        self.lock = threading.Lock()
        self.is_fenced = False
        self._signed: SignedEndpoints | None = None
        self._reported = self._seen = promoted.reported
        self._snapshot: ReplicatedService | None = None  # for a standby that has connected
        self._ticked = 0  # number of the newest `Tick`
        self._trimmed = 0  # commits after which the heap was trimmed
        self._lost_after_s, self._wait_s = lost_after_s, wait_s
        self._absences = Absences(lost_after_s)
        self._senders: dict[str, _Sender] = {}
        self._closing = threading.Event()
        attempt = time.time_ns() // 1_000_000 if term is None else term
        identity = EndpointIdentity(credentials.run_id, SERVER, attempt, credentials.key)
        self._endpoint = Endpoint(
            identity,
            self._on_message,
            transport,
            on_peer=self._on_peer,
            certificate=credentials.certificate,
        )
        self._resuming = set(promoted.peers)  # ranks that have not connected to this server yet
        for peer in promoted.peers:  # which are lost if they do not return
            self._endpoint.expect(peer)
        self.address: Address = self._endpoint.listen(host, port)
        self._ticker = threading.Thread(target=self._tick_all, name="join-tick", daemon=True)
        self._ticker.start()

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._origin_s

    def _tick_all(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                self._tick()
            except GeoRayError:
                log.exception("the averager failed")

    def _tick(self) -> None:
        """Wake strategies; continue without regions that have been away, or hung, for too long."""
        with self.lock:
            version = self.service.version
            if self._log.executed >= self._ticked:  # not while the standby is slow
                self._offer(Tick(self._wait_s, self._reported))
                self._ticked = self._log.number
        if version != self._trimmed:
            self._trimmed = version
            trim_heap()  # of pieces of updates
        stats, now_s = self._endpoint.stats(), time.monotonic()
        with self.lock:
            awaited = {peer for peer in stats if self.service.is_awaited(peer)}
            awaited |= {STANDBY} if self._log.has_standby else set()
            unreached = self.service.unreached()
        away = {peer for peer in awaited & stats.keys() if not stats[peer]["connected"]}
        # A holder that is away itself is lost for all regions.
        apart = {key for key in unreached if holder_name(key[1]) not in away}
        for peer, holder in self._absences.late({(peer, 0) for peer in away} | apart, now_s):
            after = f"for {self._lost_after_s:g} s"
            if holder:
                cause = f"rank '{peer}' has had no connection {after} to {unreached[peer, holder]}"
                self.lose(region_of(peer), cause)
            elif peer == STANDBY:
                self._fence("its standby cannot be reached")
                return
            elif region_of(peer) == SERVER:
                self.lose_holder(rank_of(peer), f"it has been away {after}")
            else:
                self.lose(region_of(peer), f"rank '{peer}' has been away {after}")

    def lose(self, region: str, cause: str) -> None:
        """Continue without a region."""
        with self.lock:
            self._offer(LoseRegion(region, cause))

    def lose_holder(self, holder: int, cause: str) -> None:
        """End the run, because a process with a part of the averagers' state is lost."""
        with self.lock:
            self._offer(LoseHolder(holder, cause))

    def request_stop(self) -> None:
        """Ask every region to finish."""
        with self.lock:
            self._offer(RequestStop())

    def end(self, cause: str) -> None:
        """End the run at once, and tell all ranks; `close` waits until they know it."""
        with self.lock:
            self._offer(EndRun(cause))

    def set_interval(self, steps: int) -> None:
        """Change the steps between exchanges; see `JoinService.set_interval`."""
        with self.lock:
            self._offer(SetInterval(steps))

    def begin_save(
        self, checkpoint: int, keep: Sequence[int], timeout_s: float, *, halt: bool = False
    ) -> int | None:
        """Begin a checkpoint, see `JoinService.begin_save`.

        Returns:
            Its id; None: not now, or not yet, if the standby does not answer.
        """
        with self.lock:
            before = self.service.save  # whose end may wait for the standby
            self._offer(BeginSave(checkpoint, tuple(keep), timeout_s, halt))
            number = self._log.number
        until_s = time.monotonic() + _CLOSE_S
        while self._log.executed < number and time.monotonic() < until_s:
            time.sleep(_TICK_S / 10)  # until the standby has the order
        with self.lock:
            save = self.service.save
            is_begun = save is not None and (save is not before or save.halts)
            return save.id if save is not None and is_begun else None

    def end_save(self, checkpoint: int | None) -> None:
        """Forget a checkpoint that was being made; see `JoinService.end_save`."""
        with self.lock:
            self._offer(EndSave(checkpoint))

    def publish(self, signed: SignedEndpoints) -> None:
        """Send a list of the run's addresses to all ranks, and to those that connect later."""
        with self.lock:
            self._signed = signed
        for peer, each in self._endpoint.stats().items():
            if each["connected"] and _is_rank(peer):
                with self.lock:
                    self._post([Outbound(peer, signed.message())])

    @property
    def has_standby(self) -> bool:
        """Whether nothing continues without the standby, which may be promoted."""
        return self._log.has_standby

    @property
    def stalled_s(self) -> float:
        """Time for which an input has waited for the standby; under `lock`."""
        since_s = self._log.waits_since_s
        return 0.0 if since_s is None else self.now_s() - since_s

    def take_snapshot(self) -> ReplicatedService | None:
        """Return the state for a standby that has connected, once; see `JoinStandby.restore`."""
        with self.lock:
            found, self._snapshot = self._snapshot, None
            return found

    def release_standby(self) -> None:
        """Continue without the standby, which must never be promoted now."""
        with self.lock:
            self._post(self._log.release())

    def links(self) -> dict[str, PeerStats]:
        """Return the counters of all connections, by rank."""
        return self._endpoint.stats()

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        with self.lock:
            self._seen, found = self.events(self._seen)
            return found

    def events(self, start: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the next event, and the events from a number on; under `lock`.

        The caller has the events before that number: they are dropped.
        """
        self._reported = max(self._reported, start)
        found = self._log.events(start)
        return start + len(found), found

    @property
    def stage(self) -> Stage:
        """The run's progress."""
        return self.service.stage

    def close(self, drain_s: float = _DRAIN_S) -> None:
        """Wait until ranks have what was sent to them, and close all connections.

        That includes what waits for holders, which must be closed later, and what ranks will ask
        for that were connected to an earlier server. Ranks of lost regions are not waited for.

        The standby must not be promoted afterwards: inputs no longer wait for it.

        Args:
            drain_s: longest wait.
        """
        self._closing.set()
        self._ticker.join(_CLOSE_S)
        with self.lock:
            if not self.is_fenced:
                self._post(self._log.release())
        until_s = time.monotonic() + drain_s
        while not self._is_settled() and time.monotonic() < until_s:
            time.sleep(_TICK_S / 10)
        stats = self._endpoint.stats()
        with self.lock:
            senders = dict(self._senders)
            needed = {
                peer
                for peer, each in stats.items()
                if _is_rank(peer) and (each["connected"] or self.service.is_awaited(peer))
            }
        _drain(senders, self._endpoint, needed, until_s)

    def _is_settled(self) -> bool:
        """Whether all messages to ranks are in their outboxes."""
        with self.lock:
            return self.is_fenced or (
                self.service.is_settled
                and not any(
                    self.service.is_awaited(peer) and self._log.may_lack(peer)
                    for peer in self._resuming
                )
            )

    def _on_peer(self, peer: str, _: int, connected: bool) -> None:
        with self.lock:
            if connected and _is_rank(peer) and self._signed is not None:
                self._post([Outbound(peer, self._signed.message())])

    def _on_message(self, peer: str, message: Message) -> None:
        with self.lock:
            if self.is_fenced:
                return
            if peer == STANDBY:
                self._on_standby(message)
            elif message.kind == RESUME:
                self._post(self._log.resume(peer, message))
                self._resuming.discard(peer)
            else:
                self._offer(Received(peer, message))

    def _on_standby(self, message: Message) -> None:
        """Handle a message of the standby; under `lock`."""
        if message.kind == _FENCE:
            self._fence("its standby was promoted")
        elif message.kind == _FOLLOW:
            self._snapshot = self._log.begin_snapshot()
        else:
            self._advance(self._log.on_ack(fields.count(message.meta, "entry")))

    def _fence(self, cause: str) -> None:
        """Stop for good: another server may have taken over."""
        log.warning("this server ends: %s", cause)
        self.is_fenced = True
        threading.Thread(target=self._endpoint.close, args=(0.0,), daemon=True).start()

    def _offer(self, op: Op) -> None:
        """Append an input to the log; under `lock`."""
        if not self.is_fenced:
            self._advance(self._log.offer(op, self.now_s()))

    def _advance(self, found: tuple[Sequence[ServiceEntry], Sequence[Outbound]]) -> None:
        entries, outbound = found
        self._post([Outbound(STANDBY, each.to_message()) for each in entries])
        self._post(outbound)

    def _post(self, found: Sequence[Outbound]) -> None:
        """Queue messages in their order; under `lock`."""
        for each in found:
            sender = self._senders.get(each.peer)
            if sender is None:
                sender = self._senders[each.peer] = _Sender(self._endpoint, each.peer)
                sender.start()
            sender.outbox.put(each.message)


def _is_rank(peer: str) -> bool:
    """Return whether an endpoint is the rank of a region."""
    return peer != STANDBY and region_of(peer) != SERVER


class Absences:
    """Connections that are missing, and since when.

    A connection is that of an endpoint to a holder; holder 0 is the server.

    Args:
        longest_s: a connection that is missing for longer is late.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since_s: dict[tuple[str, int], float] = {}

    def late(self, missing: AbstractSet[tuple[str, int]], now_s: float) -> list[tuple[str, int]]:
        """Return the connections that are late, in their order; their time begins again.

        Args:
            missing: those that are missing now.
            now_s: present time.
        """
        since_s = {key: self._since_s.get(key, now_s) for key in sorted(missing)}
        found = [key for key, at_s in since_s.items() if now_s - at_s > self._longest_s]
        self._since_s = {key: at_s for key, at_s in since_s.items() if key not in found}
        return found


class _Sender(threading.Thread):
    """Sends the messages to one rank.

    Attributes:
        outbox: messages; None ends the thread.
    """

    def __init__(self, endpoint: Endpoint, peer: str) -> None:
        threading.Thread.__init__(self, name=f"join-send-{peer}", daemon=True)
        self.outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._endpoint, self._peer = endpoint, peer

    def run(self) -> None:
        """Send until the end."""
        while (message := self.outbox.get()) is not None:
            try:
                self._endpoint.send(self._peer, message)
            except GeoRayError as error:
                log.warning("'%s' was not sent to '%s': %s", message.kind, self._peer, error)
            del message  # not held while the next one is awaited: its payload may be a whole model


def _drain(
    senders: Mapping[str, _Sender], endpoint: Endpoint, needed: AbstractSet[str], until_s: float
) -> None:
    """Send what is queued, wait until it has arrived, and close the endpoint.

    A process that ends earlier takes the last messages with it: a rank that lacks the run's end
    waits for it.

    Args:
        senders: threads that send, by peer.
        endpoint: the endpoint.
        needed: peers that are waited for; others take nothing any longer.
        until_s: longest wait.
    """
    for peer in endpoint.stats().keys() - needed:
        endpoint.forget(peer)
    for each in senders.values():
        each.outbox.put(None)
    for peer in senders.keys() & needed:
        senders[peer].join(max(0.0, until_s - time.monotonic()))
    endpoint.close(max(0.0, until_s - time.monotonic()))


class HolderServer:
    """A listening `SliceHolder`, which dials the server of its run.

    Attributes:
        holder: the state machine; use it under `lock`.
        lock: guards it.
        address: where it listens.

    Args:
        terms: the run.
        number: number of the holder, from 1.
        credentials: those of `SERVER`.
        server: address of the server.
        host: where to listen.
        port: where to listen; 0 takes a free one.
        advertised: host for ranks; None: ``host``.
        transport: settings of connections.
        saved: slices of a checkpoint that the run continues from; see `SliceHolder`.
    """

    def __init__(
        self,
        terms: JoinTerms,
        number: int,
        credentials: JoinCredentials,
        server: Address,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str | None = None,
        transport: TransportConfig | None = None,
        saved: Sequence[SavedSlice] = (),
    ) -> None:
        self.holder = SliceHolder(terms, number, saved)
        self.lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        attempt, name = time.time_ns() // 1_000_000, holder_name(number)
        identity = EndpointIdentity(credentials.run_id, name, attempt, credentials.key)
        self._endpoint = Endpoint(
            identity, self._on_message, transport, certificate=credentials.certificate
        )
        self.address: Address = self._endpoint.listen(host, port)
        self._endpoint.connect(SERVER, server)
        about: Meta = {"host": advertised or host, "port": self.address[1]}
        self._endpoint.send(SERVER, Message("holder", about, b"", "control", CONTROL))

    def links(self) -> dict[str, PeerStats]:
        """Return the counters of the connections to ranks."""
        return {peer: each for peer, each in self._endpoint.stats().items() if peer != SERVER}

    def close(self) -> None:
        """Wait until connected ranks have what was sent to them, and close all connections."""
        needed = {peer for peer, each in self.links().items() if each["connected"]}
        with self.lock:
            senders = dict(self._senders)
        _drain(senders, self._endpoint, needed, time.monotonic() + _DRAIN_S)

    def _on_message(self, peer: str, message: Message) -> None:
        with self.lock:
            for each in self.holder.on_message(peer, message):
                sender = self._senders.get(each.peer)
                if sender is None:
                    self._endpoint.expect(each.peer)  # a rank may not have connected yet
                    sender = self._senders[each.peer] = _Sender(self._endpoint, each.peer)
                    sender.start()
                sender.outbox.put(each.message)


class JoinStandby:
    """Follows the log of a server; see the module.

    Args:
        credentials: those of `STANDBY`.
        server: address of the server.
        transport: settings of the connection.
    """

    def __init__(
        self,
        credentials: JoinCredentials,
        server: Address,
        transport: TransportConfig | None = None,
    ) -> None:
        self._entries: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replica: ReplicatedService | None = None
        self._newest = 0  # entry that has arrived
        self._is_restored = threading.Event()
        self.failure: Exception | None = None
        attempt = time.time_ns() // 1_000_000
        identity = EndpointIdentity(credentials.run_id, STANDBY, attempt, credentials.key)
        self._endpoint = Endpoint(
            identity, self._on_message, transport, certificate=credentials.certificate
        )
        self._thread = threading.Thread(target=self._follow, name="join-standby", daemon=True)
        self._thread.start()
        self._endpoint.connect(SERVER, server)
        self._endpoint.send(SERVER, Message(_FOLLOW, {}, b"", "control", CONTROL))

    def restore(self, snapshot: ReplicatedService) -> None:
        """Begin with the state that the server has copied for it."""
        self._replica = snapshot
        self._is_restored.set()
        self._confirm(max(self._newest, snapshot.number))

    @property
    def is_ready(self) -> bool:
        """Whether it has everything that the server has executed, and may replace it."""
        replica = self._replica
        return self.failure is None and replica is not None and replica.is_attached

    def promote(self) -> ReplicatedService:
        """Stop following, and return the state from which a server continues.

        Raises:
            InvariantError: it is not ready, or has failed.
        """
        with suppress(GeoRayError):
            self._endpoint.send(SERVER, Message(_FENCE, {}, b"", "control", CONTROL), 0.0)
            if self._endpoint.stats()[SERVER]["connected"]:
                self._endpoint.flush(SERVER, _TICK_S)
        self.close()  # after what has been confirmed
        if self._replica is None or not self.is_ready:
            raise InvariantError(f"the standby cannot continue the run: {self.failure}")
        self._replica.become_server()
        return self._replica

    def close(self) -> None:
        """Stop following."""
        self._endpoint.close(0.0)
        self._is_restored.set()
        self._entries.put(None)
        self._thread.join()

    def _on_message(self, _: str, message: Message) -> None:
        """Confirm what has arrived, at once; it is executed in another thread."""
        self._newest = fields.count(message.meta, "entry")
        self._entries.put(message)
        if self._is_restored.is_set() and self.failure is None:
            self._confirm(self._newest)

    def _confirm(self, entry: int) -> None:
        about: Meta = {"entry": entry}
        self._endpoint.send(SERVER, Message(_ACK, about, b"", "control", CONTROL), 0.0)

    def _follow(self) -> None:
        self._is_restored.wait()
        while (message := self._entries.get()) is not None:
            try:
                if self._replica is not None:
                    self._replica.follow(ServiceEntry.read(message))
            except Exception as error:  # it must not be promoted
                log.exception("the standby has failed")
                self.failure = error
                return
