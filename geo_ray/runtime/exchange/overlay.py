"""Exchange over an overlay: the updates of a round are summed on their way.

One lock covers all events of the aggregation tree nodes and the coordinator. The endpoint never
blocks; messages without capacity are kept and retried. One thread commits rounds and handles
timeouts.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
)
from geo_ray.runtime.exchange.direct import (
    AveragerOutput,
    LocalAverager,
    Routes,
    UpdateStage,
    joined,
)
from geo_ray.strategies.base import Strategy
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import Begun, ChangeInterval, ChangeMembers
from geo_ray.training.config import UNREACHABLE_S
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.wire_format import (
    as_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.overlay.build import (
    build_coordinator,
    build_node,
    build_policy,
    grid_of,
    links_of,
    tick_s,
)
from geo_ray.transport.overlay.config import AnyOverlay
from geo_ray.transport.overlay.coordinator import Coordinator
from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.messages import (
    CONTROL_MESSAGE,
    PART,
    ControlMessage,
    Ready,
    Sent,
    Starved,
    Stuck,
    Whole,
    control_message,
    part_message,
    read_control,
    read_part,
)
from geo_ray.transport.overlay.node import Finished
from geo_ray.transport.overlay.vector import Floats
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import Message

log = logging.getLogger(__name__)

Commit = Callable[[Mapping[str, Meta], Floats], tuple[Mapping[str, Meta], Floats] | None]
"""Commits a round: takes every region's metadata and the mean of all contributions; returns
metadata for every region and the result, or None if the round must not count and never ends."""

_TO_COORDINATOR: Final = (Ready, Sent, Whole, Stuck, Starved)
_RETRY_S: Final = 0.02
_LINKS_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class OverlaySetting:
    """Participants and configuration of an overlay.

    Attributes:
        region: this region.
        regions: all regions.
        leader: the region of the coordinator and the averager.
        config: the overlay's configuration.
        num_params: P.
        seed: of random decisions.
        links_mbps: goodput of ordered pairs, as measured before.
    """

    region: str
    regions: Sequence[str]
    leader: str
    config: AnyOverlay
    num_params: int
    seed: int = 0
    links_mbps: Mapping[tuple[str, str], float] | None = None


class OverlayVectors:
    """One region's end of the overlay.

    Args:
        setting: participants and configuration.
        commit: commits a round; only in the averager's region.
        endpoint: this region's endpoint, whose messages of the kinds in `routes` are handled here.
        clock: None takes the machine's.
        on_failure: receives an error in the thread; None: only waiting calls receive it.

    Attributes:
        fused: whether results are sent before the coordinator has the whole sum; see `Policy`.
    """

    def __init__(
        self,
        setting: OverlaySetting,
        commit: Commit | None,
        endpoint: Endpoint,
        clock: Clock | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._region = setting.region
        self._names = sorted(setting.regions)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        leader = self._numbers[setting.leader]
        self._me = self._numbers[setting.region]
        if (commit is not None) != (self._me == leader):
            raise InvariantError(f"region '{setting.region}': only '{setting.leader}' may commit")
        self._commit = commit
        self._on_failure = on_failure
        self._clock = clock or SystemClock()
        config, num = setting.config, len(self._names)
        grid = grid_of(config, setting.num_params)
        links = links_of(config, num)
        self._seed_links(links, setting.links_mbps or {})
        policy = build_policy(config, self._names, leader, grid, links, setting.seed)
        self._node = build_node(config, self._me, num, leader, grid, fused=policy.fused)
        self._coordinator: Coordinator | None = None
        if commit is not None:
            self._coordinator = build_coordinator(leader, policy, links, grid, setting.seed)
        self.fused = policy.fused
        self._tick_s = tick_s(config)
        self._endpoint = endpoint
        self._changed = threading.Condition()  # guards all following attributes
        self._backlog: dict[int, deque[Message]] = {}
        self._finished: dict[int, Finished] = {}
        self._committed = 0
        self._looked_s = 0.0
        self._unreachable_s: dict[str, float] = {}  # start time, by region
        self._failure: GeoRayError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="overlay", daemon=True)
        if self._coordinator is not None:
            self._coordinator.open(1)
            self._drain()
        self._thread.start()

    def routes(self) -> dict[str, Callable[[str, Message], None]]:
        """Handlers by kind of message."""
        return {CONTROL_MESSAGE: self._on_message, PART: self._on_part}

    def close(self) -> None:
        """Close, and end all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def status(self) -> dict[str, int]:
        """Counters."""
        with self._changed:
            found = {"rounds": self._node.finished, "clashes": self._node.clashes}
            if self._coordinator is not None:
                found["restarts"] = self._coordinator.restarts
            return found

    def links_mbps(self) -> dict[tuple[str, str], float]:
        """Return the known link rates, in the averager's region."""
        with self._changed:
            if self._coordinator is None:
                return {}
            known = self._coordinator.links
            pairs = [(a, b) for a in self._numbers.items() for b in self._numbers.items()]
            return {(a, b): known.mbps(i, j) for (a, i), (b, j) in pairs if known.is_known(i, j)}

    # ------------------------------------------------------------------ rounds

    def exchange(self, own_P: Floats, weight: float, about: Meta, timeout_s: float) -> Finished:
        """Take part in the next round and wait for its end.

        Args:
            own_P: this region's contribution, fp32 (P,); must stay unchanged meanwhile.
            weight: weight of the contribution in the mean.
            about: metadata for `Commit`.
            timeout_s: longest wait.

        Raises:
            DeadlineExceededError: the round was not over in time.
            LinkDownError: the path was closed.
            GeoRayError: `fail` was called with this error.
        """
        with self._changed:
            rnd = self._node.finished + 1
            self._node.contribute(rnd, own_P, weight, about, self._now_s())
            self._drain()
            over = self._changed.wait_for(
                lambda: self._closed or self._failure is not None or rnd in self._finished,
                timeout_s,
            )
            if rnd in self._finished:
                return self._finished.pop(rnd)
            if self._failure is not None:
                raise self._failure
            if over:
                raise LinkDownError(f"the bridge of region '{self._region}' is closing")
            raise DeadlineExceededError(
                f"region '{self._region}': round {rnd} of the overlay was not over within "
                f"{timeout_s:g} s"
            )

    def fail(self, error: GeoRayError) -> None:
        """End every current and later wait with ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ------------------------------------------------------------------ what arrives

    def _on_message(self, peer: str, message: Message) -> None:
        sender = self._number(peer)
        control = read_control(message, sender, self._me, len(self._names))
        with self._changed:
            self._hand_on(sender, control)
            self._drain()

    def _on_part(self, peer: str, message: Message) -> None:
        part = read_part(message)
        with self._changed:
            self._node.on_part(self._number(peer), part, self._now_s())
            self._drain()

    def _hand_on(self, sender: int, control: ControlMessage) -> None:
        if not isinstance(control, _TO_COORDINATOR):
            self._node.on_message(sender, control, self._now_s())
        elif self._coordinator is None:
            raise FrameError(f"'{self._names[sender]}' uses '{self._region}' as the coordinator")
        else:
            self._coordinator.on_message(sender, control, self._now_s())

    def _number(self, peer: str) -> int:
        if peer not in self._numbers:
            raise FrameError(f"'{peer}' is not a region of this run")
        return self._numbers[peer]

    # ------------------------------------------------------------------ what goes out

    def _drain(self) -> None:
        """Send pending messages of node and coordinator; under the lock."""
        self._push()
        self._send_parts()
        self._node.acknowledge()
        self._push()
        if self._node.done:
            self._finished |= {done.rnd: done for done in self._node.done}
            self._node.done.clear()
            self._changed.notify_all()
        if self._is_due() is not None:
            self._changed.notify_all()

    def _push(self) -> None:
        outs = [self._node.out] + ([self._coordinator.out] if self._coordinator else [])
        while any(outs):
            for out in outs:
                outgoing, out[:] = out[:], []
                for dst, control in outgoing:
                    if dst == self._me:
                        self._hand_on(self._me, control)
                    else:
                        self._send(dst, control_message(control))

    def _send_parts(self) -> None:
        """Send parts to the regions in turn, as long as there are any."""
        targets = self._node.targets()
        while targets:
            more = []
            for peer in targets:
                part = (
                    None if self._backlog.get(peer) else self._node.next_part(peer, self._now_s())
                )
                if part is not None:
                    self._send(peer, part_message(part))
                    more.append(peer)
            targets = more

    def _send(self, dst: int, message: Message) -> None:
        queue = self._backlog.setdefault(dst, deque())
        queue.append(message)
        self._flush(dst, queue)

    def _flush(self, dst: int, queue: deque[Message]) -> None:
        while queue:
            try:
                self._endpoint.send(self._names[dst], queue[0], 0.0)
            except (DeadlineExceededError, LinkDownError):
                return  # no capacity, or not connected yet: `_run` retries
            queue.popleft()

    # ------------------------------------------------------------------ time

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_due(), self._wait_s())
                if self._closed:
                    return
                due = self._is_due()
            try:
                if due is not None:
                    self._commit_round(due)
                with self._changed:
                    self._keep_time()
                    self._drain()
            except Exception as error:  # the thread has no caller that would receive it
                log.exception("the overlay of region '%s' failed", self._region)
                if self._on_failure is not None:
                    self._on_failure(error)
                self.fail(InvariantError(f"the overlay of region '{self._region}' failed: {error}"))
                return

    def _wait_s(self) -> float:
        waits = [self._tick_s]
        if any(self._backlog.values()):
            waits.append(_RETRY_S)
        if self._coordinator is not None and self._coordinator.wakes_s is not None:
            waits.append(max(0.0, self._coordinator.wakes_s - self._now_s()))
        return min(waits)

    def _keep_time(self) -> None:
        now_s = self._now_s()
        self._node.tick(now_s)
        if self._coordinator is not None:
            self._coordinator.tick(now_s)
        for dst, queue in self._backlog.items():
            self._flush(dst, queue)
        if now_s - self._looked_s >= _LINKS_EVERY_S:
            self._looked_s = now_s
            for peer, stats in self._endpoint.stats().items():
                if peer not in self._numbers:
                    continue
                self._node.set_rtt(self._numbers[peer], stats["rtt_min_s"] or 0.0)
                if self._coordinator is not None:
                    self._coordinator.on_peer(self._numbers[peer], up=stats["connected"])
                self._note_reach(peer, now_s, up=stats["connected"])

    def _note_reach(self, peer: str, now_s: float, *, up: bool) -> None:
        """Fail after a region was unreachable for too long: the round could not end without it."""
        if up:
            self._unreachable_s.pop(peer, None)
            return
        since_s = self._unreachable_s.setdefault(peer, now_s)
        if now_s - since_s > UNREACHABLE_S and self._failure is None:
            self._failure = LinkDownError(
                f"region '{self._region}': region '{peer}' has been unreachable for too long"
            )
            self._changed.notify_all()

    def _is_due(self) -> int | None:
        """Return the round that could be committed now."""
        rnd = self._committed + 1
        if self._coordinator is None or not self._coordinator.is_complete(rnd):
            return None
        has_all = self._node.is_whole(rnd) if self.fused else self._node.is_summed(rnd)
        return rnd if has_all else None

    def _commit_round(self, rnd: int) -> None:
        coordinator, commit = self._coordinator, self._commit
        if coordinator is None or commit is None:
            return
        with self._changed:
            if self._is_due() != rnd:
                return
            self._committed = rnd
            coordinator.seal(rnd)
            about = {self._names[n]: meta for n, meta in coordinator.about(rnd).items()}
            mean_P = self._node.mean(rnd)
        committed = commit(about, mean_P)
        if committed is None:
            return
        metas, result_P = committed
        with self._changed:
            if not self.fused:
                self._node.set_result(rnd, result_P)
            by_number = [(self._numbers[name], meta) for name, meta in metas.items()]
            coordinator.commit(rnd, by_number, self._now_s())
            coordinator.open(rnd + 1)
            self._drain()

    # ------------------------------------------------------------------ small things

    def _seed_links(self, links: Links, mbps: Mapping[tuple[str, str], float]) -> None:
        known = {
            (self._numbers[a], self._numbers[b]): value
            for (a, b), value in mbps.items()
            if a in self._numbers and b in self._numbers and value > 0
        }
        links.seed(known)

    def _now_s(self) -> float:
        return self._clock.now_s()


class OverlayPath:
    """Transports the updates of one region, and at the leader those of all regions.

    The averager receives every region's update with the same vector, the round's weighted mean, and
    gives the same answer as to the updates themselves, up to rounding.

    Args:
        setting: participants and configuration.
        strategy: the run's strategy; determines how updates are weighted.
        averager: the averager, if it is here.
        output: handles the averager's outputs besides answers.
        endpoint: this region's endpoint.
        timeout_s: longest wait for a round.
    """

    def __init__(
        self,
        setting: OverlaySetting,
        strategy: Strategy,
        averager: Averager | None,
        output: AveragerOutput,
        endpoint: Endpoint,
        timeout_s: float,
    ) -> None:
        self._region = setting.region
        mean = strategy.traits.averager.round_mean
        if mean is None:
            raise InvariantError(f"an overlay cannot sum the rounds of {strategy}")
        self._mean = mean
        self._local: LocalAverager | None = None
        if averager is not None:
            self._local = LocalAverager(averager, output, self._unasked)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.leader = AveragerLeader(setting.leader)
        self.stage = UpdateStage()
        commit = None if self._local is None else self._commit
        self._failure = output.failure
        self.vectors = OverlayVectors(setting, commit, endpoint, on_failure=self._failed)
        self._failure.listen(self.vectors.fail)
        if self.vectors.fused and not mean.is_answer:
            self.vectors.close()
            raise InvariantError(f"an overlay without a root does not support {strategy}")

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: UpdateMessage) -> ReplyMessage:
        """See `UpdatePath`; takes part in a round."""
        own_P = update.payload_P.detach().contiguous().cpu().numpy()
        weight = self._mean.weight_of(update.num_samples)
        done = self.vectors.exchange(own_P, weight, update_meta(update), self._timeout_s)
        reply = read_reply(done.about, as_bytes(torch.from_numpy(done.result_P)))
        if reply.to != self._region or reply.seq != update.seq:
            raise FrameError(
                f"region '{self._region}' awaits the answer to update {update.seq} and received "
                f"that of '{reply.to}' to {reply.seq}"
            )
        return reply

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """See `UpdatePath`."""
        self._here().request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """See `UpdatePath`."""
        return self._here().request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """Do nothing: an overlay has no failover."""

    def submit_command(self, op: ChangeMembers | Begun | ChangeInterval) -> None:
        """Refuse: members cannot change with an overlay."""
        raise InvariantError(f"members cannot change with an overlay: {op}")

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`."""
        version = None if self._local is None else self._local.version
        return {"version": version, "overlay": self.vectors.status()}

    def close(self) -> None:
        """See `UpdatePath`."""
        if self._local is not None:
            self._local.close()
        self.vectors.close()

    # ------------------------------------------------------------------ other regions

    def routes(self) -> Routes:
        """See `UpdatePath`."""
        return joined(self.vectors.routes(), {"refused": self._on_refused})

    def _on_refused(self, peer: str, message: Message) -> None:
        if peer == self.leader.region:
            _, error = read_refusal(message.meta)
            self.vectors.fail(error)

    # ------------------------------------------------------------------ at the leader

    def _here(self) -> LocalAverager:
        if self._local is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        return self._local

    def _commit(
        self, about: Mapping[str, Meta], mean_P: Floats
    ) -> tuple[Mapping[str, Meta], Floats] | None:
        payload_P = torch.from_numpy(mean_P)
        updates = []
        for region, meta in sorted(about.items()):
            update = replace(read_update(meta, b""), payload_P=payload_P)
            if update.region != region:
                raise FrameError(f"'{region}' contributes an update of '{update.region}'")
            updates.append(update)
        try:
            replies = self._here().take_in_round(updates)
        except GeoRayError as error:
            log.error("a round of %s refused: %s", sorted(about), error)
            for update in updates:
                self._refuse(update, error)
            return None
        metas = {reply.to: reply_meta(reply) for reply in replies}
        if set(metas) != set(about) or len(replies) != len(metas):
            raise InvariantError(f"a round of {sorted(about)} was answered to {sorted(metas)}")
        result_P = replies[0].payload_P
        if any(reply.payload_P is not result_P for reply in replies):
            raise InvariantError("the answers to a round differ; an overlay has one for all")
        return metas, mean_P if self.vectors.fused else result_P.contiguous().numpy()

    def _failed(self, error: Exception) -> None:
        self._failure.note(error, "the overlay")

    def _unasked(self, replies: Sequence[ReplyMessage]) -> None:
        raise InvariantError("an overlay only answers whole rounds")

    def _refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        if update.region == self._region:
            self.vectors.fail(error)
            return
        meta = refusal_meta(update.seq, error)
        self._endpoint.send(update.region, Message("refused", meta, b"", "control"))
