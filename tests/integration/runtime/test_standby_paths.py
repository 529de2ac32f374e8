"""An averager with a standby, between real bridges over real sockets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import GeoRayError
from geo_ray.experiment.experiment import Experiment
from geo_ray.storage.folders import directory_of
from tests.support.region_support import (
    Gate,
    InProcess,
    Site,
    WorkerThread,
    eventually,
    experiment_of,
    parts_reported,
    transfers_of,
)

HOME, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
STEPS = 40
STRATEGIES: list[dict[str, Any]] = [
    {"kind": "sma", "interval": 2},
    {"kind": "bsp"},
    {"kind": "ama", "interval": 1},
    {"kind": "asgd_ga", "interval": 1, "wait": "always", "combine": "sum"},
]


def experiment(strategy: dict[str, Any], **changes: Any) -> Experiment:
    averager = {"region": HOME, "standby": STANDBY, "failover_s": 0.3, "rejoin_s": 0.6}
    averager |= changes.pop("averager", {})
    sections: dict[str, Any] = {
        "regions": [{"name": name} for name in (HOME, STANDBY, THIRD)],
        "strategy": strategy,
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"steps": STEPS, "eval_every": 0},
        "averager": averager,
    }
    return experiment_of(**(sections | changes))


def params_of(site: Site) -> torch.Tensor:
    return torch.cat([shard.params_S for shard in site.shards])


def start_all(world: InProcess) -> dict[str, WorkerThread]:
    return {name: site.start(0) for name, site in world.sites.items()}


def go_down(site: Site) -> None:
    """All of a region's processes at once, in the middle of whatever they do."""
    assert site.endpoint is not None and site.bridge is not None
    site.endpoint.close(0.0)
    site.bridge.close()


def check_equal(world: InProcess, names: list[str], exact: bool) -> None:
    first = params_of(world.sites[names[0]])
    for name in names:
        torch.testing.assert_close(params_of(world.sites[name]), first, rtol=1e-4, atol=1e-5)
        if exact:
            assert world.sites[name].digest == world.sites[names[0]].digest


@pytest.mark.parametrize("bound", [0.0, 0.5])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["kind"])
def test_a_standby_changes_nothing_without_a_loss(
    tmp_path: Path, strategy: dict[str, Any], bound: float
) -> None:
    rounds = strategy["kind"] in ("sma", "bsp")
    if rounds and bound:
        pytest.skip("refused by the configuration")
    asked = experiment(
        strategy, averager={"max_divergence": bound}, train={"steps": 8, "eval_every": 0}
    )
    with InProcess(asked, tmp_path / "with") as world:
        digests = world.run()
        check_equal(world, [HOME, STANDBY, THIRD], exact=strategy["kind"] != "asgd_ga")
        world.check_books()
        replica = world.sites[STANDBY].bridge.path._node.replica
        averager = world.averager
        eventually(
            lambda: replica.averager.state.version == averager.state.version, "the last entry"
        )
        assert replica.averager._registry.last == averager._registry.last
        assert replica.averager.state.memory.keys() == averager.state.memory.keys()
        for name, tensor in averager.state.memory.items():
            assert torch.equal(tensor, replica.averager.state.memory[name])
    if rounds:
        plain = experiment_of(**(asked.model_dump(mode="json") | {"averager": {"region": HOME}}))
        with InProcess(plain, tmp_path / "without") as world:
            assert world.run() == digests


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["kind"])
def test_the_averager_is_lost_in_mid_run_and_the_others_finish(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    gate = Gate(STEPS // 2)
    with InProcess(experiment(strategy), tmp_path, gate=gate) as world:
        workers = start_all(world)
        primary = world.sites[THIRD].server
        # ama waits for no answer: with few processor cycles left for the link it sends less often
        eventually(lambda: primary.seq >= 5 or THIRD in gate.reached, "the fifth exchange")
        go_down(world.sites[HOME])
        gate.open()
        for name in (STANDBY, THIRD):
            assert workers[name].result() == STEPS
        check_equal(world, [STANDBY, THIRD], exact=strategy["kind"] != "asgd_ga")
        with pytest.raises(GeoRayError):
            workers[HOME].result()
        standby = world.sites[STANDBY]
        assert standby.bridge.status()["leader"] == (STANDBY, 2)
        assert world.sites[THIRD].bridge.status()["leader"] == (STANDBY, 2)
        events = standby.event_buffer.take(100_000)
        assert [e["term"] for e in events if e["kind"] == "averager_moved"] == [2]
        assert [e["name"] for e in events if e["kind"] == "region_left"] == [HOME]


@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_nothing_acknowledged_is_lost_with_the_averager(tmp_path: Path, bound: float) -> None:
    """Everybody's own changes, and those of the averager's region that were answered, are in all.

    Under plain SGD and ``sum`` all replicas are the initial parameters less all changes.
    """
    asked = experiment(
        {"kind": "asgd_ga", "interval": 1, "wait": "always", "combine": "sum"},
        averager={"max_divergence": bound},
    )
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        changes: dict[str, dict[int, torch.Tensor]] = {name: {} for name in world.sites}
        answered: dict[str, set[int]] = {name: set() for name in world.sites}
        for name, site in world.sites.items():
            note_changes(site, changes[name], answered[name])
        workers = start_all(world)
        eventually(lambda: len(answered[HOME]) >= 5, "the fifth answer of the averager's region")
        go_down(world.sites[HOME])
        gate.open()
        for name in (STANDBY, THIRD):
            workers[name].result()
        check_equal(world, [STANDBY, THIRD], exact=False)
        expected_P = world.params_P.clone()
        for name in (STANDBY, THIRD):
            expected_P -= torch.stack(list(changes[name].values())).sum(dim=0)
        known = world.sites[STANDBY].bridge.path._node.averager.last(HOME)[1]
        for seq, change_P in changes[HOME].items():
            if seq <= known:
                expected_P -= change_P
        torch.testing.assert_close(
            params_of(world.sites[STANDBY]), expected_P, rtol=1e-3, atol=1e-4
        )
        lost = [seq for seq in answered[HOME] if seq > known]
        norm = sum(float(changes[HOME][seq].norm()) for seq in lost)
        assert norm <= bound


def note_changes(site: Site, changes: dict[int, torch.Tensor], answered: set[int]) -> None:
    """Keep a copy of what the primary shard of a region sends, and which of it was answered."""
    exchange = site.primary._exchange_one

    def noting() -> None:
        send = site.server.open_request
        assert send is not None
        changes[send.update.seq] = send.update.payload_P.clone()
        exchange()
        answered.add(send.update.seq)

    site.primary._exchange_one = noting  # type: ignore[method-assign]


def test_a_partitioned_leader_comes_back_as_an_ordinary_region(tmp_path: Path) -> None:
    asked = experiment({"kind": "sma", "interval": 2}, averager={"rejoin_s": 60.0})
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        cut = Cut(world, HOME)
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 5, "the fifth round")
        cut.begin()
        gate.open()
        eventually(
            lambda: world.sites[THIRD].bridge.status()["leader"] == (STANDBY, 2), "the takeover"
        )
        cut.end()
        for worker in workers.values():
            assert worker.result() == STEPS
        check_equal(world, [HOME, STANDBY, THIRD], exact=True)
        assert world.sites[HOME].bridge.status()["leader"] == (STANDBY, 2)


class Cut:
    """Takes a region off the network as the others see it, and puts it back."""

    def __init__(self, world: InProcess, name: str) -> None:
        self._world, self._name = world, name
        self._down = threading.Event()
        for site in world.sites.values():
            self._watch(site)

    def begin(self) -> None:
        self._down.set()

    def end(self) -> None:
        self._down.clear()

    def _hits(self, site: Site, peer: str) -> bool:
        return self._down.is_set() and self._name in (site.region.name, peer)

    def _watch(self, site: Site) -> None:
        """While it is partitioned, its messages stay queued, and no peer is seen as connected."""
        assert site.endpoint is not None
        stats, send = site.endpoint.stats, site.endpoint.send
        kept: list[tuple[str, Any]] = []

        def seen() -> dict[str, Any]:
            found = stats()
            for peer in found:
                if self._hits(site, peer):
                    found[peer]["connected"] = False
            if not self._down.is_set():
                late, kept[:] = kept[:], []
                for peer, message in late:
                    send(peer, message)
            return found

        def slow(peer: str, message: Any, deadline_s: float | None = None) -> None:
            if self._hits(site, peer) or any(to == peer for to, _ in kept):
                kept.append((peer, message))
            else:
                send(peer, message, deadline_s)

        site.endpoint.stats = seen  # type: ignore[method-assign]
        site.endpoint.send = slow  # type: ignore[method-assign]


def test_the_controller_may_say_that_a_region_is_dead(tmp_path: Path) -> None:
    """With two regions no other can confirm it, and none has to wait."""
    asked = experiment(
        {"kind": "sma", "interval": 2},
        regions=[{"name": HOME}, {"name": STANDBY}],
        averager={"failover_s": 600.0, "rejoin_s": 600.0},
    )
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        workers = start_all(world)
        eventually(lambda: world.sites[STANDBY].server.seq >= 3, "the third round")
        go_down(world.sites[HOME])
        gate.open()
        world.sites[STANDBY].bridge.path.report_dead(HOME)
        assert workers[STANDBY].result() == STEPS


def test_a_checkpoint_with_a_standby_is_of_one_moment(tmp_path: Path) -> None:
    asked = experiment({"kind": "asgd_ga", "interval": 1, "wait": "always"})
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        directory_of(world.parts, 1).mkdir(parents=True)
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 3, "the third exchange")
        assert world.sites[HOME].bridge.path.request_checkpoint(1, halt=False)
        gate.open()
        for worker in workers.values():
            worker.result()
        check_equal(world, [HOME, STANDBY, THIRD], exact=False)
        names = sorted(["averager", *[f"{name}-ps0" for name in (HOME, STANDBY, THIRD)]])
        assert parts_reported(world.sites.values(), len(names)) == names


def test_a_stop_reaches_all_through_the_log(tmp_path: Path) -> None:
    gate = Gate(STEPS // 2)
    with InProcess(experiment({"kind": "sma", "interval": 1}), tmp_path, gate=gate) as world:
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 3, "the third round")
        world.sites[HOME].bridge.path.request_stop()
        gate.open()
        steps = {worker.result() for worker in workers.values()}
        assert len(steps) == 1 and steps.pop() < STEPS
        check_equal(world, [HOME, STANDBY, THIRD], exact=True)


@pytest.mark.slow
def test_turns_and_a_standby_together(tmp_path: Path) -> None:
    asked = experiment(
        {"kind": "asgd_ga", "interval": 1, "wait": "always", "combine": "sum"},
        transfers={"small_bytes": 0, "averager_mbps": 100.0, "max_staleness": 4},
    )
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        for site in world.sites.values():
            transfers_of(site)._open = False
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 5, "the fifth exchange")
        go_down(world.sites[HOME])
        gate.open()
        for name in (STANDBY, THIRD):
            assert workers[name].result() == STEPS
        check_equal(world, [STANDBY, THIRD], exact=False)


FOURTH = "sa-east"


def is_standby(world: InProcess, name: str) -> bool:
    """Whether a region may take over now."""
    bridge = world.sites[name].bridge
    assert bridge is not None
    return bridge.status()["is_standby"]


@pytest.mark.parametrize("strategy", STRATEGIES[:1] + STRATEGIES[3:], ids=lambda s: s["kind"])
def test_successive_leaders_are_lost(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """A standby is chosen after each failover, as the configuration prefers."""
    names = (HOME, STANDBY, THIRD, FOURTH)
    asked = experiment(
        strategy,
        regions=[{"name": name} for name in names],
        averager={"next_standbys": [FOURTH]},
    )
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 5, "the fifth exchange")
        go_down(world.sites[HOME])
        eventually(lambda: is_standby(world, FOURTH), "the next standby")
        assert world.sites[STANDBY].bridge.status()["leader"] == (STANDBY, 2)
        go_down(world.sites[STANDBY])
        eventually(lambda: is_standby(world, THIRD), "the last standby")
        assert world.sites[THIRD].bridge.status()["leader"] == (FOURTH, 3)
        gate.open()
        for name in (THIRD, FOURTH):
            assert workers[name].result() == STEPS
        check_equal(world, [THIRD, FOURTH], exact=strategy["kind"] == "sma")
        events = [e for site in world.sites.values() for e in site.event_buffer.take(100_000)]
        ready = [(e["region"], e["name"]) for e in events if e["kind"] == "standby_ready"]
        assert ready == [(STANDBY, FOURTH), (FOURTH, THIRD)]


def test_another_stands_by_when_the_standby_is_lost(tmp_path: Path) -> None:
    """Then the leader may be lost as well."""
    names = (HOME, STANDBY, THIRD, FOURTH)
    asked = experiment(STRATEGIES[0], regions=[{"name": name} for name in names])
    gate = Gate(STEPS // 2)
    with InProcess(asked, tmp_path, gate=gate) as world:
        workers = start_all(world)
        eventually(lambda: world.sites[THIRD].server.seq >= 3, "the third round")
        go_down(world.sites[STANDBY])
        world.sites[HOME].bridge.path.report_dead(STANDBY)
        eventually(lambda: is_standby(world, THIRD) or is_standby(world, FOURTH), "another standby")
        go_down(world.sites[HOME])
        gate.open()
        for name in (THIRD, FOURTH):
            assert workers[name].result() == STEPS
        check_equal(world, [THIRD, FOURTH], exact=True)
