"""The averager's bridge dies; its standby takes over, and the region gets another bridge."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.bridge import Bridge
from geo_ray.runtime.exchange.standby import StandbyPath
from geo_ray.training.failover import AveragerAnswer, LogAppend, SendMessage, StandbyEffect
from geo_ray.training.membership import AveragerLeader
from tests.support.region_support import Gate, InProcess, eventually, experiment_of

HOME, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
ROUNDS: dict[str, dict[str, Any]] = {
    "sma": {"strategy": {"kind": "sma", "interval": 2}},
    "coded": {
        "strategy": {"kind": "diloco", "interval": 2, "outer": {"kind": "nesterov", "lr": 0.7}},
        "codec": {"up": {"kind": "int8"}, "down": {"kind": "int8"}},
    },
}
WHERE = ("its own update comes", "the standby is told", "another region is answered")


def config(sections: dict[str, Any], names: tuple[str, ...] = (HOME, STANDBY, THIRD)) -> Experiment:
    # Nobody takes over, and nobody is given up, but by what the controller says.
    averager = {"region": HOME, "standby": STANDBY, "failover_s": 600.0, "rejoin_s": 600.0}
    return experiment_of(
        regions=[{"name": name} for name in names],
        train={"steps": 12, "eval_every": 0},
        averager=averager,
        **sections,
    )


class Killer:
    """Ends the bridge where the averager lives, tells the standby, and has another one started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        self.world: InProcess | None = None
        self.thread: threading.Thread | None = None
        self._dead: StandbyPath | None = None
        self._seen = 0
        handle, execute = Bridge.handle, StandbyPath._execute

        def handled(bridge: Bridge, conn: Any, meta: Any, payload: Any) -> Any:
            if where == WHERE[0] and meta["op"] == "update":
                self._strike_at(bridge.path)
            return handle(bridge, conn, meta, payload)

        def carried_out(path: StandbyPath, effects: Sequence[StandbyEffect]) -> None:
            for effect in effects:
                if isinstance(effect, SendMessage):
                    told, answered = LogAppend, AveragerAnswer
                    if where == WHERE[1] and isinstance(effect.message, told):
                        self._strike_at(path)
                    if where == WHERE[2] and isinstance(effect.message, answered):
                        self._strike_at(path)
                if path is not self._dead:
                    execute(path, [effect])

        monkeypatch.setattr(Bridge, "handle", handled)
        monkeypatch.setattr(StandbyPath, "_execute", carried_out)

    def _strike_at(self, path: Any) -> None:
        world = self.world
        assert world is not None
        if self._dead is not None or world.sites[HOME].bridge.path is not path:
            return
        self._seen += 1
        if self._seen == 5:
            self._dead = path
            self.thread = threading.Thread(target=self._strike, args=(world,))
            self.thread.start()

    @staticmethod
    def _strike(world: InProcess) -> None:
        site, standby = world.sites[HOME], world.sites[STANDBY].bridge
        site.kill_bridge()
        standby.path.report_dead(HOME, comes_back=True)
        leader = AveragerLeader(STANDBY, 2)
        eventually(lambda: standby.path.leader == leader, "the takeover")
        site.replace_bridge(leader)


@pytest.fixture
def killers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Killer] = []

    def make(where: str) -> Killer:
        made.append(Killer(monkeypatch, where))
        return made[-1]

    yield make
    for killer in made:
        assert killer.thread is not None, "it was never there"
        killer.thread.join(30.0)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_comes_out_as_if_nothing_had_happened(
    name: str, where: str, killers: Any, tmp_path: Path
) -> None:
    with InProcess(config(ROUNDS[name]), tmp_path / "quiet") as world:
        quiet = set(world.run())
    killer = killers(where)
    with InProcess(config(ROUNDS[name]), tmp_path / "disturbed") as world:
        killer.world = world
        assert set(world.run()) == quiet and len(quiet) == 1
        world.check_books()
        members = world.sites[STANDBY].bridge.path._node.averager.view.members
        assert set(members) == {HOME, STANDBY, THIRD}


@pytest.mark.parametrize("where", WHERE)
def test_regions_one_by_one_end_equal(where: str, killers: Any, tmp_path: Path) -> None:
    strategy = {"kind": "asgd_ga", "interval": 1, "wait": "always", "combine": "sum"}
    killer = killers(where)
    with InProcess(config({"strategy": strategy}), tmp_path) as world:
        killer.world = world
        world.run()
        world.check_books()
        first, *others = (site.shards[0].params_S for site in world.sites.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def test_two_regions_are_enough(killers: Any, tmp_path: Path) -> None:
    sections, names = ROUNDS["sma"], (HOME, STANDBY)
    with InProcess(config(sections, names), tmp_path / "quiet") as world:
        quiet = set(world.run())
    killer = killers(WHERE[1])
    with InProcess(config(sections, names), tmp_path / "disturbed") as world:
        killer.world = world
        assert set(world.run()) == quiet


@pytest.mark.parametrize("name", ROUNDS)
def test_bridges_of_three_leaders_in_succession(name: str, tmp_path: Path) -> None:
    """Each region gets another bridge, and may be the next to stand by: no bit is lost."""
    with InProcess(config(ROUNDS[name]), tmp_path / "quiet") as world:
        quiet = set(world.run())
    gate = Gate(6)
    with InProcess(config(ROUNDS[name]), tmp_path / "disturbed", gate=gate) as world:
        workers = [site.start(0) for site in world.sites.values()]
        leader = AveragerLeader(HOME)
        for _ in range(3):
            name = eventually(lambda: who_stands_by(world), "a standby") or ""
            dead, heir = world.sites[leader.region], world.sites[name].bridge
            dead.kill_bridge()
            assert heir is not None
            heir.path.report_dead(leader.region, comes_back=True)
            leader = AveragerLeader(name, leader.term + 1)
            eventually(partial(moved, heir, leader), "the takeover")
            dead.replace_bridge(leader)
        gate.open()
        for worker in workers:
            worker.result()
        assert {site.digest for site in world.sites.values()} == quiet
        world.check_books()
        assert leader.term == 4


def test_the_bridge_of_the_standby_is_replaced(tmp_path: Path) -> None:
    """The averager has it stand by again, or another region: no bit is lost."""
    with InProcess(config(ROUNDS["sma"]), tmp_path / "quiet") as world:
        quiet = set(world.run())
    gate = Gate(6)
    with InProcess(config(ROUNDS["sma"]), tmp_path / "disturbed", gate=gate) as world:
        workers = [site.start(0) for site in world.sites.values()]
        host = world.sites[HOME].bridge
        assert host is not None
        world.sites[STANDBY].kill_bridge()
        host.path.report_dead(STANDBY, comes_back=True)
        world.sites[STANDBY].replace_bridge()
        heir = eventually(lambda: who_stands_by(world), "a standby") or ""
        world.sites[HOME].kill_bridge()
        bridge = world.sites[heir].bridge
        assert bridge is not None
        bridge.path.report_dead(HOME, comes_back=True)
        leader = AveragerLeader(heir, 2)
        eventually(lambda: bridge.path.leader == leader, "the takeover")
        world.sites[HOME].replace_bridge(leader)
        gate.open()
        for worker in workers:
            worker.result()
        assert {site.digest for site in world.sites.values()} == quiet
        world.check_books()


def moved(bridge: Bridge, leader: AveragerLeader) -> bool:
    return bridge.path.leader == leader


def who_stands_by(world: InProcess) -> str | None:
    bridges = {name: site.bridge for name, site in world.sites.items()}
    found = (name for name, each in bridges.items() if each and each.status().get("is_standby"))
    return next(found, None)


@pytest.mark.parametrize("name", ROUNDS)
def test_the_averager_is_moved_while_its_bridge_runs(name: str, tmp_path: Path) -> None:
    """Again and again, each time to who stands by: all stay members, and no bit is lost."""
    with InProcess(config(ROUNDS[name]), tmp_path / "quiet") as world:
        quiet = set(world.run())
    gate = Gate(6)
    with InProcess(config(ROUNDS[name]), tmp_path / "moved", gate=gate) as world:
        workers = [site.start(0) for site in world.sites.values()]
        leader = AveragerLeader(HOME)
        for _ in range(4):
            to = eventually(lambda: who_stands_by(world), "a standby") or ""
            heir = world.sites[to].bridge
            assert heir is not None
            heir.path.report_dead(leader.region, comes_back=True)
            leader = AveragerLeader(to, leader.term + 1)
            for site in world.sites.values():
                assert site.bridge is not None
                eventually(partial(moved, site.bridge, leader), "all know of it")
        gate.open()
        for worker in workers:
            worker.result()
        assert {site.digest for site in world.sites.values()} == quiet
        world.check_books()
        heir = world.sites[leader.region].bridge
        assert heir is not None
        assert set(heir.path._node.averager.view.members) == {HOME, STANDBY, THIRD}
