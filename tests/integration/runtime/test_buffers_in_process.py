"""What models carry, over real sockets: the simulator's bits, replaced workers, a lost averager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import LinkDownError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.data import data_rows
from geo_ray.simulator.world import World
from geo_ray.training.parameters import digest
from geo_ray.training.worker import StatisticsCollector
from tests.support.region_support import Gate, InProcess, Site, eventually, experiment_of

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
STATEFUL = {"use": f"{TASKS}:Stateful"}
SHARDS = [
    {"name": "us-east", "workers": 2, "ps_shards": 2},
    {"name": "eu-west", "workers": 2, "ps_shards": 3},
]


def config_of(**changes: Any) -> Experiment:
    """Without statistics over all regions, which the controller puts together."""
    train = {"steps": 6, "eval_every": 3} | changes.pop("train", {})
    return experiment_of(**{"task": STATEFUL, "train": train | {"statistics_batches": 0}} | changes)


def model_buffers(site: Site) -> torch.Tensor:
    assert site.server.model_buffers is not None
    return site.server.model_buffers.final_B


def exchanged(site: Site) -> torch.Tensor:
    assert site.server.model_buffers is not None
    return model_buffers(site)[: site.server.model_buffers.layout.exchanged_bytes]


def simulated(world: InProcess) -> Any:
    return World(world.experiment, world.task, world.manifest, lambda *_, **__: None).run()


def check_as_simulated(world: InProcess, digests: list[str]) -> None:
    result = simulated(world)
    assert digests == [digest(params_P) for params_P in result.params_P.values()]
    for name, site in world.sites.items():
        assert torch.equal(model_buffers(site), result.buffers_B[name])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("regions", [SHARDS[:1], SHARDS], ids=["alone", "two"])
def test_sockets_and_simulator_give_the_same_bits(tmp_path: Path, shared: bool, regions) -> None:
    config = config_of(strategy={"kind": "bsp"}, regions=regions, emulate={"step_s": 0.01})
    with InProcess(config, tmp_path) as world:
        check_as_simulated(world, world.run(shared=shared))


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "sma", "interval": 2},
        {"kind": "diloco", "interval": 3},
        {"kind": "diloco_streaming", "interval": 8, "tau": 1},
        {"kind": "asgd"},
        {"kind": "halos", "local_steps": 2, "interval": 2},
    ],
    ids=lambda s: s["kind"],
)
def test_regions_end_with_the_same_model(tmp_path: Path, strategy: dict[str, Any]) -> None:
    regions = [{**region, "ps_shards": 1} for region in SHARDS]
    train = {"steps": 8, "eval_every": 0}
    with InProcess(config_of(strategy=strategy, regions=regions, train=train), tmp_path) as world:
        world.run()
        world.check_books()
        first, second = world.sites.values()
        if strategy["kind"] not in {"asgd"}:
            assert torch.equal(exchanged(first), exchanged(second))
        for site in (first, second):
            assert not torch.equal(model_buffers(site), world.start.buffers_B)
            assert torch.isfinite(model_buffers(site)[: 4 * 12].view(torch.float32)).all()


def test_lossy_blocks_leave_it_whole(tmp_path: Path) -> None:
    codec = {"up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}}
    config = config_of(strategy={"kind": "bsp"}, codec=codec, regions=SHARDS)
    with InProcess(config, tmp_path) as world:
        world.run()
        first, second = world.sites.values()
        assert torch.equal(exchanged(first), exchanged(second))


def test_a_replaced_worker_gets_the_model_buffers(tmp_path: Path) -> None:
    """Killed in mid-run: the run ends with the bits of the undisturbed one."""
    config = config_of(strategy={"kind": "bsp"}, regions=SHARDS, emulate={"step_s": 0.01})
    gate = Gate(4)
    with InProcess(config, tmp_path, gate=gate) as world:
        result = simulated(world)
        site = world.sites["eu-west"]
        others = [
            s.start(rank)
            for n, s in world.sites.items()
            for rank in (0, 1)
            if (n, rank) != ("eu-west", 1)
        ]
        known = set(map(id, site.clients))
        site.start(1)
        lost = [client for client in site.clients if id(client) not in known]
        eventually(lambda: site.server.version >= 3, "the third step")
        for client in lost:
            client.close()
        again = site.start(1, attempt=2)
        gate.open()
        for worker in [*others, again]:
            worker.result()
        for name, each in world.sites.items():
            assert each.digest == digest(result.params_P[name])
            assert torch.equal(exchanged(each), result.buffers_B[name][: exchanged(each).numel()])


def test_a_replaced_worker_that_finds_undeclared_state_continues(tmp_path: Path) -> None:
    """Its first step is one of the run's late ones, in which a find ends nothing."""
    late = {"use": f"{TASKS}:Late"}
    regions = [{"name": "us-east", "workers": 1}]
    train = {"steps": 16, "eval_every": 0, "state_every": 7}
    config = config_of(task=late, regions=regions, train=train)
    gate = Gate(8)
    with InProcess(config, tmp_path, gate=gate) as world:
        site = world.sites["us-east"]
        site.start(0)
        eventually(lambda: site.server.version >= 7, "the seventh step")
        for client in site.clients:
            client.close()
        again = site.start(0, attempt=2)
        gate.open()
        assert again.result() == 9


def test_a_standby_takes_over_with_the_model_buffers(tmp_path: Path) -> None:
    leader, standby, third = "us-east", "eu-west", "ap-south"
    config = config_of(
        regions=[{"name": name} for name in (leader, standby, third)],
        strategy={"kind": "sma", "interval": 2},
        train={"steps": 40, "eval_every": 0},
        averager={"region": leader, "standby": standby, "failover_s": 0.3, "rejoin_s": 0.6},
    )
    gate = Gate(20)
    with InProcess(config, tmp_path, gate=gate) as world:
        workers = {name: site.start(0) for name, site in world.sites.items()}
        primary = world.sites[third].server
        eventually(lambda: primary.seq >= 5 or third in gate.reached, "the fifth exchange")
        site = world.sites[leader]
        assert site.endpoint is not None and site.bridge is not None
        site.endpoint.close(0.0)
        site.bridge.close()
        gate.open()
        for name in (standby, third):
            assert workers[name].result() == 40
        assert torch.equal(exchanged(world.sites[standby]), exchanged(world.sites[third]))
        assert world.sites[standby].digest == world.sites[third].digest


def test_statistics_of_the_final_model_are_put_together(tmp_path: Path) -> None:
    """As the controller does: the workers wait for it, and end with what the simulator says."""
    train = {"steps": 6, "eval_every": 3, "statistics_batches": 3}
    config = experiment_of(
        task=STATEFUL,
        strategy={"kind": "bsp"},
        regions=SHARDS,
        train=train,
        emulate={"step_s": 0.01},
    )
    with InProcess(config, tmp_path) as world:
        result = simulated(world)
        workers = [site.start(rank) for site in world.sites.values() for rank in (0, 1)]
        collector = StatisticsCollector(world.start.layout, data_rows(config, world.manifest))
        events: list[dict[str, Any]] = []
        waiting: set[str] = set()

        def all_told() -> bool:
            for name, site in world.sites.items():
                for event in site.event_buffer.take():
                    events.append(event)
                    if event["kind"] == "precise":
                        waiting.add(name)
                        told = torch.frombuffer(
                            bytearray(event["model_buffers"]), dtype=torch.uint8
                        )
                        collector.add(name, told)
            return waiting == set(world.sites)

        eventually(all_told, "both regions' statistics")
        assert not [e for e in events if e["kind"] == "stats" and e["final"]]
        for name, buffers_B in collector.take(world.sites).items():
            world.sites[name].primary.use_statistics(buffers_B.numpy().tobytes())
        for worker in workers:
            worker.result()
        for name, site in world.sites.items():
            assert torch.equal(model_buffers(site), result.buffers_B[name])
            last = [e for e in site.event_buffer.take() if e["kind"] == "stats" and e["final"]]
            assert len(last) == 1


def test_a_worker_that_waits_for_statistics_receives_a_failure(tmp_path: Path) -> None:
    config = experiment_of(task=STATEFUL, regions=[{"name": "us-east"}])
    with InProcess(config, tmp_path) as world:
        site = world.sites["us-east"]
        worker = site.start(0)
        eventually(
            lambda: any(e["kind"] == "precise" for e in site.event_buffer.take()), "the statistics"
        )
        site.primary.close()
        with pytest.raises(LinkDownError):
            worker.result()
