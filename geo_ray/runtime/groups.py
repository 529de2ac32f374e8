"""Regions that are process groups: starts their ranks, watches them, and starts lost groups again.

`GroupPolicy` and `root_cause` are pure and decide; `Groups` executes. The ranks of a group belong
together: if one is lost, all are ended and started again. The group then joins the run from the
state of another region, while other regions continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    LinkDownError,
    LoopFailedError,
    RankLostError,
    RankOutOfMemoryError,
    RegionLostError,
    ServerLostError,
)
from geo_ray.base.restarts import Restarts
from geo_ray.base.text import counted
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import GroupConfig, RegionConfig
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.service import Stage
from geo_ray.ray_cluster.calls import FailureKind, Handle, RayFailure, Ref, failure_of, kill
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.runtime.averagers import AveragerProcesses
from geo_ray.runtime.group_actor import JOIN_KEY, RankHost, places_of
from geo_ray.runtime.launcher import ProcessLauncher, ProcessSpec
from geo_ray.runtime.spec import RunSpec
from geo_ray.transport.security.process_keys import seal_secret

_log = logging.getLogger(__name__)

_SETTLES_S: Final = 1.0  # after the first failure of a rank, until the others have failed, too
_LOOK_S: Final = 0.1
_ENDS_S: Final = 60.0  # after the end of the run, for the rest of the loops
_ORDER: Final = (
    *(FailureKind.OUT_OF_MEMORY, FailureKind.NODE_GONE, FailureKind.PROCESS_DIED),
    *(FailureKind.NOT_STARTED, FailureKind.RAISED, FailureKind.BUG),
)
_CONSEQUENCES: Final = (LinkDownError, RegionLostError, ServerLostError)
_COLLECTIVES: Final = ("gloo", "nccl", "connection closed by peer", "connection reset", "tcpstore")


def root_cause(failures: Mapping[int, RayFailure]) -> tuple[int, RayFailure]:
    """Return the rank whose failure explains those of the others, and its failure.

    If a rank dies, collective operations of the others fail. Where several ranks failed alike, the
    lowest one counts.

    Args:
        failures: failures by rank; at least one.
    """

    def weight(item: tuple[int, RayFailure]) -> tuple[bool, int, int]:
        rank, failure = item
        order = _ORDER.index(failure.kind) if failure.kind in _ORDER else len(_ORDER)
        return is_consequence(failure), order, rank

    return min(failures.items(), key=weight)


def is_consequence(failure: RayFailure) -> bool:
    """Return whether a rank has failed because another one did."""
    text = failure.cause.lower()
    return isinstance(failure.raised, _CONSEQUENCES) or (
        failure.kind in (FailureKind.RAISED, FailureKind.BUG)
        and any(word in text for word in _COLLECTIVES)
    )


def rank_error(region: str, rank: int, failure: RayFailure, note: str = "") -> GeoRayError:
    """Return the error that names region, rank and cause.

    Args:
        region: region of the rank.
        rank: the rank.
        failure: its failure.
        note: end of the message.
    """
    text = f"rank {rank} of region '{region}': {failure.cause}{note}"
    if failure.raised is not None:
        raised = failure.raised
        if isinstance(raised, _CONSEQUENCES):
            return RankLostError(text)
        return type(raised)(text, fix=raised.fix)
    if failure.kind is FailureKind.OUT_OF_MEMORY:
        return RankOutOfMemoryError(text)
    if failure.kind is FailureKind.BUG:
        return LoopFailedError(text)
    return RankLostError(text)


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the group again.

    Attributes:
        rank: the lost rank.
        error: what happened to it.
    """

    rank: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the group again.

    Attributes:
        rank: the lost rank.
        error: what happened to it.
        ends_run: whether the run ends, too.
    """

    rank: int
    error: GeoRayError
    ends_run: bool


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """What happens when a group has lost a rank.

    Attributes:
        restarts: restarts of all groups that are allowed.
    """

    restarts: Restarts

    def lost(
        self, region: str, failures: Mapping[int, RayFailure], stage: Stage, now_s: float
    ) -> Restart | GiveUp:
        """Decide about a group that has lost ranks.

        An error of a loop before the run trains ends the run: every start would repeat it. When all
        regions have finished, nothing is started any longer.

        Args:
            region: its region.
            failures: failures by rank.
            stage: progress of the run.
            now_s: time of any clock.
        """
        rank, failure = root_cause(failures)
        if stage in (Stage.ENDING, Stage.DONE, Stage.STOPPED):
            return GiveUp(rank, rank_error(region, rank, failure), ends_run=False)
        trains = stage is Stage.TRAINING
        was_raised = failure.kind in (FailureKind.RAISED, FailureKind.BUG)
        if was_raised and not trains:
            return GiveUp(rank, rank_error(region, rank, failure), ends_run=True)
        if self.restarts.take(now_s):
            return Restart(rank, rank_error(region, rank, failure))
        note = f"; {self.restarts} is used up"
        return GiveUp(rank, rank_error(region, rank, failure, note), ends_run=not trains)


@dataclass(slots=True)
class _Group:
    """The ranks of a region.

    Attributes:
        region: its configuration.
        attempt: starts so far.
        actors: its ranks.
        hosts: call for the places of all ranks; None: they are known.
        port: call for the port of the rendezvous.
        known: places of all ranks.
        calls: the open calls of the training, by rank.
        failures: failures by rank.
        failed_s: time of the first one.
        began_s: time of its start.
        away: whether the run continues without it until it has joined again.
        over: whether all ranks have ended, or it is given up.
    """

    region: RegionConfig
    attempt: int = 0
    actors: list[Handle] = field(default_factory=list)
    hosts: dict[int, Ref] = field(default_factory=dict)
    port: Ref = None
    known: list[RankHost] = field(default_factory=list)
    calls: dict[int, Ref] = field(default_factory=dict)
    failures: dict[int, RayFailure] = field(default_factory=dict)
    failed_s: float = 0.0
    began_s: float = 0.0
    away: bool = False
    over: bool = False

    @property
    def config(self) -> GroupConfig:
        """Its section."""
        if self.region.group is None:
            raise InvariantError(f"region '{self.region.name}' is no group")
        return self.region.group


class Groups:
    """The groups of a served run.

    Args:
        experiment: the run.
        spec: the run, for its processes.
        launcher: starts them.
        placed: their places.
        averagers: where the run is served.
        checkpoints: folder of the checkpoints of ranks; see `GroupRank.checkpoints`.
        credentials: credentials by region.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: RunSpec,
        launcher: ProcessLauncher,
        placed: Mapping[str, PlacedRegion],
        averagers: AveragerProcesses,
        checkpoints: str,
        credentials: Mapping[str, JoinCredentials],
    ) -> None:
        train = experiment.train
        self._policy = GroupPolicy(Restarts(train.max_worker_restarts, train.restart_window_s))
        self._spec, self._launcher, self._placed = spec, launcher, placed
        self._averagers, self._checkpoints, self._credentials = averagers, checkpoints, credentials
        self._groups = [_Group(region) for region in experiment.groups]
        self._events: list[dict[str, Any]] = []
        self._cause: GeoRayError | None = None
        for group in self._groups:
            self._start(group)

    @property
    def starting(self) -> dict[str, str]:
        """Descriptions of the regions of which no rank has joined."""
        return {
            each.region.name: f"{counted(each.config.world_size, 'rank')} "
            + ("started, none has joined" if each.calls else "starting")
            for each in self._groups
            if not each.over
        }

    def note(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take note of events of the run: groups join again."""
        joined = {each["region"] for each in events if each["kind"] == "region_joined"}
        for group in self._groups:
            group.away = group.away and group.region.name not in joined

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call, without times."""
        events, self._events = self._events, []
        return events

    def cause_of(self, error: GeoRayError) -> GeoRayError:
        """Return the error that explains one that has ended the run.

        If the run has lost all regions, ranks have failed, of which the run loop may not know yet.
        """
        if not isinstance(error, RegionLostError):
            return error
        until_s = time.monotonic() + _SETTLES_S
        while time.monotonic() < until_s and any(group.calls for group in self._groups):
            for group in self._groups:
                self._advance(group)
            time.sleep(_LOOK_S)
        for group in self._groups:
            if group.failures:
                rank, failure = root_cause(group.failures)
                if not is_consequence(failure):
                    return rank_error(group.region.name, rank, failure, f"; {error.message}")
        return error if self._cause is None else self._cause

    def watch(self, stage: Stage) -> None:
        """Continue the start of groups, and handle lost ranks.

        Args:
            stage: progress of the run.

        Raises:
            GeoRayError: a group cannot be started.
        """
        for group in self._groups:
            if not group.over:
                self._advance(group)
                if group.failures and time.monotonic() - group.failed_s >= _SETTLES_S:
                    self._on_lost(group, stage)

    def finish(self) -> None:
        """Wait for the rest of the loops after the end of the run; others are ended at once."""
        until_s = time.monotonic() + _ENDS_S
        for group in self._groups:
            calls = list(group.calls.values())
            if calls and not group.over and not group.away:
                _, late = ray.wait(
                    calls, num_returns=len(calls), timeout=max(0.0, until_s - time.monotonic())
                )
                if late:
                    _log.warning(
                        "%d ranks of region '%s' are ended: their loops have not returned",
                        len(late),
                        group.region.name,
                    )
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for group in self._groups:
            self._end(group)
            group.over = True

    # ------------------------------------------------------------------ start

    def _start(self, group: _Group) -> None:
        """Start all ranks of a group, without waiting for them."""
        group.attempt += 1
        group.began_s = time.monotonic()
        name, config = group.region.name, group.config
        gpus = config.gpus_per_node / config.ranks_of_node
        specs = [
            ProcessSpec(
                "rank",
                (self._spec, name, rank, self._averagers.address, self._checkpoints),
                config.cpus_per_rank,
                gpus,
                self._placed[name].strategy("worker", rank),
                (name, rank),
                group.attempt,
            )
            for rank in range(config.world_size)
        ]
        group.actors = self._launcher.make(specs)
        group.hosts = {rank: actor.introduce.remote() for rank, actor in enumerate(group.actors)}
        group.port = group.actors[0].listen.remote()

    def _advance(self, group: _Group) -> None:
        """Take the answers of a group's ranks."""
        if group.hosts and not group.failures:
            hosts = self._answers(group, {**group.hosts, -1: group.port})
            if hosts is None:
                return
            group.hosts, port = {}, int(hosts.pop(-1))
            group.known = [hosts[rank] for rank in range(group.config.world_size)]
            self._train(group, port)
        calls = group.calls
        if calls:
            done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
            for rank in [rank for rank, call in calls.items() if call in done]:
                self._ended(group, rank, calls.pop(rank))
        if not group.calls and not group.hosts and not group.failures:
            group.over = True

    def _train(self, group: _Group, port: int) -> None:
        name = group.region.name
        text = self._credentials[name].text().encode()
        places = places_of(group.known)
        for rank, (actor, host) in enumerate(zip(group.actors, group.known, strict=True)):
            sealed = seal_secret(text, host.public, JOIN_KEY)
            group.calls[rank] = actor.train.remote(places[rank], group.known[0].host, port, sealed)
        if group.attempt > 1:
            took_s = time.monotonic() - group.began_s
            self._events.append({"kind": "region_started", "region": name, "took_s": took_s})

    def _answers(self, group: _Group, calls: Mapping[int, Ref]) -> dict[int, Any] | None:
        """Return the answers to several calls, if all are there."""
        done, late = ray.wait(list(calls.values()), timeout=0, num_returns=len(calls))
        found = {}
        for rank, call in calls.items():
            if call in done:
                try:
                    found[rank] = ray.get(call)
                except ray.exceptions.RayError as error:
                    self._note(group, max(rank, 0), failure_of(error))
        return None if late or group.failures else found

    def _ended(self, group: _Group, rank: int, call: Ref) -> None:
        """Take the end of a rank."""
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            self._note(group, rank, failure_of(error))

    def _note(self, group: _Group, rank: int, failure: RayFailure) -> None:
        if failure.kind is FailureKind.CLUSTER_GONE:
            raise failure.as_error()
        if not group.failures:
            group.failed_s = time.monotonic()
        group.failures.setdefault(rank, failure)

    # ------------------------------------------------------------------ loss

    def _on_lost(self, group: _Group, stage: Stage) -> None:
        """Start a group again that has lost ranks, or give it up.

        Raises:
            GeoRayError: the run cannot train without the group.
        """
        name, failures = group.region.name, group.failures
        self._end(group)
        decision = self._policy.lost(name, failures, stage, time.monotonic())
        error = decision.error
        self._events.append(
            {"kind": "worker_lost", "region": name, "worker": decision.rank, "cause": error.message}
        )
        self._cause = error
        if isinstance(decision, GiveUp):
            group.over = True
            _log.warning("region '%s' is not started again: %s", name, error.message)
            if decision.ends_run:
                raise error
        self._averagers.lose(name, error.message)
        if isinstance(decision, Restart):
            self._events.append({"kind": "region_joining", "region": name})
            group.away = stage is not Stage.GATHERING
            self._start(group)
        else:
            self._events.append({"kind": "join_failed", "region": name, "cause": error.message})

    def _end(self, group: _Group) -> None:
        """End all ranks of a group."""
        for actor in group.actors:
            kill(actor)
        group.actors, group.hosts, group.calls, group.failures = [], {}, {}, {}
