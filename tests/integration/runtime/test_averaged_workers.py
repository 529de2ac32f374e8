"""Regions with several workers that keep the optimizer, over real sockets and in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.runs.data import open_readers
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.storage.folders import LocalFolder, directory_of
from geo_ray.storage.parts import read_part
from geo_ray.training import server
from tests.support.averaged_workers import plain_diloco
from tests.support.region_support import Gate, InProcess, eventually, experiment_of
from tests.support.world_support import Run

ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}
STEPS, INTERVAL = 10, 4
TWO = [{"name": "us-east", "workers": 2}, {"name": "eu-west", "workers": 2}]
TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"


@pytest.fixture
def reports_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REPORT_EVERY_S", 0.0)


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is reported; then all until an evaluation or an exchange."""
    monkeypatch.setattr(server, "REPORT_EVERY_S", 1e9)


def config_of(**changes: Any) -> Any:
    sections: dict[str, Any] = {
        "regions": TWO,
        "strategy": {
            "kind": "diloco",
            "interval": INTERVAL,
            "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
        },
        "optimizer": ADAMW,
    }
    train = {"steps": STEPS, "eval_every": 3, "optimizer_on": "worker"} | changes.pop("train", {})
    return experiment_of(**sections | {"train": train} | changes)


def simulated(config: Any, directory: Path) -> list[str]:
    directory.mkdir()
    found = Run(config, directory).go().digests()
    return [found[region.name] for region in config.regions]


def test_diloco_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    with InProcess(config_of(), tmp_path) as world:
        world.run()
        world.check_books()
        ends = [torch.cat([s.params_S for s in site.shards]) for site in world.sites.values()]
        readers = {
            name: open_readers(world.experiment, world.manifest, name)[0].read
            for name in world.sites
        }
        expected_P = plain_diloco(
            world.task,
            world.experiment.seed,
            readers,
            [8, 8],
            steps=STEPS,
            interval=INTERVAL,
            outer_lr=0.7,
            momentum=0.9,
            lr=0.01,
            weight_decay=0.1,
        )
    for params_P in ends:
        torch.testing.assert_close(params_P, expected_P, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": False},
        {"strategy": {"kind": "sma", "interval": 3}},
        {"train": {"clip_norm": 0.5, "accumulate": 2}},
        {"regions": [{**each, "ps_shards": 3} for each in TWO]},
        {"regions": [{**each, "ps_shards": 3} for each in TWO], "shared": False},
        {"regions": [{"name": "us-east"}, {"name": "eu-west", "workers": 3}]},
        {"regions": [{"name": "us-east", "workers": 2, "batch_sizes": [5, 2]}, TWO[1]]},
        {"optimizer": {"kind": "muon", "lr": 0.01}},
        {"task": {"use": f"{TASKS}:Stateful"}, "train": {"statistics_batches": 0}},
    ],
)
def test_the_bits_are_those_of_the_simulator(tmp_path: Path, changes: dict[str, Any]) -> None:
    sections = {name: value for name, value in changes.items() if name != "shared"}
    config = config_of(**sections)
    with InProcess(config, tmp_path) as world:
        found = world.run(shared=changes.get("shared", True))
        world.check_books()
    assert found == simulated(config, tmp_path / "simulated")


def states_of(world: InProcess, region: str) -> dict[str, torch.Tensor]:
    """The tensors of the region's part of checkpoint 1, once it is written."""
    site = world.sites[region]
    events: list[dict[str, Any]] = []
    eventually(
        lambda: (
            events.extend(site.event_buffer.take(1000))
            or [e for e in events if e["kind"] in ("parts", "part_failed")]
        ),
        "the part is written",
    )
    (event,) = [e for e in events if e["kind"] == "parts"]
    tensors, _ = read_part(LocalFolder(directory_of(world.parts, 1)), event["parts"][0])
    return dict(tensors)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "bytes"])
def test_a_checkpoint_waits_for_the_mean_and_has_the_optimizer_of_each_worker(
    tmp_path: Path, shared: bool
) -> None:
    gate, config = Gate(steps=2), config_of()
    with InProcess(config, tmp_path, gate=gate) as world:
        workers = [s.start(rank, shared=shared) for s in world.sites.values() for rank in (0, 1)]
        eventually(lambda: gate.reached == set(world.sites), "all are in their second step")
        directory_of(world.parts, 1).mkdir(parents=True)
        world.sites["eu-west"].primary.snapshot(1, halt=False)
        gate.open()
        found = states_of(world, "eu-west")
        for worker in workers:
            worker.result()
        assert [s.digest for s in world.sites.values()] == simulated(config, tmp_path / "whole")
    own, other = found["optimizer/exp_avg"], found["optimizer/workers/1/exp_avg"]
    assert int(found["optimizer/step"]) == int(found["optimizer/workers/1/step"]) == INTERVAL
    assert own.any() and other.any() and not torch.equal(own, other)


@pytest.mark.usefixtures("reports_each_step")
def test_others_continue_without_a_lost_worker_and_its_round_is_lost(tmp_path: Path) -> None:
    """The second worker of eu-west is lost after two steps, and replaced before the end."""
    gate, regions = Gate(steps=3), TWO
    with InProcess(config_of(regions=regions), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(rank) for each in world.sites.values() for rank in (0, 1)]
        eventually(lambda: gate.reached == set(world.sites), "all are in their third step")
        eventually(lambda: site.server.version == 2, "two steps are counted")
        site.primary.lose(1, attempt=1)
        assert site.server.ledger.discarded["worker_lost"] == 16
        gate.open()
        eventually(lambda: site.server.version >= 3, "the other one goes on")
        last = site.start(1, attempt=2)
        for worker in (*workers[:3], last):
            worker.result()
        site.server.ledger.check()
        assert len({s.digest for s in world.sites.values()}) == 1


@pytest.mark.usefixtures("reports_each_step")
def test_a_worker_that_is_asked_to_leave_is_averaged_first(tmp_path: Path) -> None:
    gate = Gate(steps=3)
    with InProcess(config_of(), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(rank) for each in world.sites.values() for rank in (0, 1)]
        eventually(lambda: gate.reached == set(world.sites), "all are in their third step")
        eventually(lambda: site.server.version == 2, "two steps are counted")
        site.primary.drain(1)
        gate.open()
        assert workers[3].result() == 3
        assert int(site.shards[0].moments(1)["step"]) == 3
        last = site.start(1, attempt=2)
        for worker in (*workers[:3], last):
            worker.result()
        site.server.ledger.check()
        assert not site.server.ledger.discarded["worker_lost"]
        assert len({s.digest for s in world.sites.values()}) == 1


@pytest.mark.usefixtures("reports_each_step")
@pytest.mark.parametrize("halts", [False, True])
def test_a_pause_does_not_interrupt_a_step_that_one_worker_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halts: bool
) -> None:
    """Regions pause when the first of their workers has got the third step."""
    begin = PrimaryShard._begin_time
    paused: set[str] = set()

    def begin_and_pause(self: PrimaryShard, *about: Any) -> None:
        begin(self, *about)
        if self.server.version == 2:
            paused.add(self.server.plan.region)
            self._is_paused = True  # under the lock

    monkeypatch.setattr(PrimaryShard, "_begin_time", begin_and_pause)
    with InProcess(config_of(), tmp_path) as world:
        sites = [*world.sites.values()]
        workers = [each.start(rank) for each in sites for rank in (0, 1)]
        eventually(lambda: all(s.server.version == 3 for s in sites), "the step is made by all")
        assert paused == set(world.sites)
        if halts:
            directory_of(world.parts, 1).mkdir(parents=True)
            for site in sites:
                site.primary.snapshot(1, halt=True)
            for name in world.sites:
                assert "optimizer/workers/1/exp_avg" in states_of(world, name)
        for site in sites:
            assert site.server.version == 3
            site.primary.pause(False)
        for worker in workers:
            worker.result()


@pytest.mark.usefixtures("reports_each_step")
@pytest.mark.parametrize("paused", [False, True])
def test_a_run_that_halts_does_not_wait_for_the_exchange(tmp_path: Path, paused: bool) -> None:
    """Regions halt after step 2, or 3, of a round of four."""
    gate = Gate(steps=3)
    with InProcess(config_of(), tmp_path, gate=gate) as world:
        sites = [*world.sites.values()]
        workers = [each.start(rank) for each in sites for rank in (0, 1)]
        eventually(lambda: len(gate.workers) == len(workers), "all are in their third step")
        directory_of(world.parts, 1).mkdir(parents=True)
        for site in sites:
            site.primary.pause(paused)
        if paused:
            gate.open()
            eventually(lambda: all(s.server.version == 3 for s in sites), "the step is counted")
        for site in sites:
            site.primary.snapshot(1, halt=True)
        gate.open()
        for name in world.sites:
            found = states_of(world, name)
            assert {"optimizer/exp_avg", "optimizer/workers/1/exp_avg"} <= found.keys()
        for site in sites:
            assert site.server.version == 3 and not site.server.ahead
            site.primary.pause(False)
        for worker in workers:
            worker.result()


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_the_length_of_runs_does_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(server, "REPORT_EVERY_S", every_s)
    steps, pushes = WorkerLoop._steps, []

    def noted(loop: WorkerLoop, *about: Any) -> Any:
        found = steps(loop, *about)
        pushes.append(len(found))
        return found

    monkeypatch.setattr(WorkerLoop, "_steps", noted)
    config = config_of()
    with InProcess(config, tmp_path) as world:
        assert world.run() == simulated(config, tmp_path / "simulated")
        world.check_books()
    # Ten steps, rounds of four, and evaluations before steps 4, 7 and 10; the first step is alone.
    expected = [1, 2, 1, 2, 2, 1, 1] if every_s else [1] * STEPS
    assert sorted(pushes) == sorted(4 * expected)


@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("replaced", ["after", "before"])
def test_a_worker_that_is_lost_in_a_run_has_made_none_of_its_steps(
    tmp_path: Path, replaced: str
) -> None:
    """Lost in the run of steps 2 to 4: its step 1 and its rows of steps 2 and 3 are discarded."""
    gate = Gate(steps=3)
    with InProcess(config_of(train={"eval_every": 0}), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(rank) for each in world.sites.values() for rank in (0, 1)]
        eventually(lambda: len(gate.workers) == len(workers), "all are in their third step")
        assert site.server.version == 1
        site.primary.lose(1, attempt=1)
        assert not site.server.ledger.discarded["worker_lost"]
        if replaced == "before":
            last = site.start(1, attempt=2)
        gate.open()
        eventually(lambda: site.server.version >= 4, "the other one completes the run")
        assert site.server.ledger.discarded["worker_lost"] == 24
        if replaced == "after":
            last = site.start(1, attempt=2)
        for worker in (*workers[:3], last):
            worker.result()
        site.server.ledger.check()
        assert site.server.ledger.discarded == {"worker_lost": 24}
        assert len({s.digest for s in world.sites.values()}) == 1


@pytest.mark.usefixtures("long_runs")
def test_a_region_whose_workers_are_all_lost_in_a_run_repeats_it(tmp_path: Path) -> None:
    gate = Gate(steps=3)
    with InProcess(config_of(train={"eval_every": 0}), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(rank) for each in world.sites.values() for rank in (0, 1)]
        eventually(lambda: len(gate.workers) == len(workers), "all are in their third step")
        for rank in (0, 1):
            site.primary.lose(rank, attempt=1)
        assert site.server.version == 1
        gate.open()
        again = [site.start(rank, attempt=2) for rank in (0, 1)]
        for worker in (*workers[:2], *again):
            worker.result()
        site.server.ledger.check()
        assert site.server.ledger.discarded == {"worker_lost": 16}
        assert len({s.digest for s in world.sites.values()}) == 1


@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("kind", ["drain", "halt"])
def test_requests_reach_workers_at_the_end_of_their_run(tmp_path: Path, kind: str) -> None:
    """Workers are in the run of steps 2 and 3, which ends with neither exchange nor report."""
    gate = Gate(steps=2)
    with InProcess(config_of(), tmp_path, gate=gate) as world:
        sites = [*world.sites.values()]
        workers = [each.start(rank) for each in sites for rank in (0, 1)]
        eventually(lambda: len(gate.workers) == len(workers), "all are in their second step")
        if kind == "drain":
            sites[1].primary.drain(1)
            gate.open()
            assert workers.pop().result() == 3
            workers.append(sites[1].start(1, attempt=2))
        else:
            directory_of(world.parts, 1).mkdir(parents=True)
            for site in sites:
                site.primary.snapshot(1, halt=True)
            eventually(lambda: all(s.server.average_soon for s in sites), "the copies wait")
            gate.open()
            for site in sites:
                found = states_of(world, site.region.name)
                assert int(found["optimizer/workers/1/step"]) == 3
                assert site.server.version == 3 and not site.server.ahead
        for worker in workers:
            worker.result()
        for site in sites:
            site.server.ledger.check()
            assert not site.server.ledger.discarded["worker_lost"]


@pytest.mark.usefixtures("long_runs")
def test_a_worker_that_joins_before_a_run_begins_takes_part_in_its_second_step(
    tmp_path: Path,
) -> None:
    """The region is paused: the other worker has its rows, but has not begun the run."""
    gate = Gate(steps=3)
    with InProcess(config_of(train={"eval_every": 0}), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(rank) for each in world.sites.values() for rank in (0, 1)]
        eventually(lambda: len(gate.workers) == len(workers), "all are in their third step")
        site.primary.lose(1, attempt=1)
        site.primary.pause(True)
        gate.open()
        waits = site.primary._answers
        eventually(lambda: site.server.version == INTERVAL and 0 in waits, "it has its rows")
        last = site.start(1, attempt=2)
        eventually(lambda: 1 in site.server.work.workers.joined, "the new worker is here")
        site.primary.pause(False)
        for worker in (*workers[:3], last):
            worker.result()
        site.server.ledger.check()
        assert last.result() == STEPS - INTERVAL - 1
        assert len({s.digest for s in world.sites.values()}) == 1
