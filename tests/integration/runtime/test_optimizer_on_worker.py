"""A worker that keeps parameters and optimizer: the results are those of the parameter server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.types import StepReport
from geo_ray.runtime.remote_shard import ShardLink
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.storage.folders import LocalFolder, directory_of
from geo_ray.storage.parts import read_part
from geo_ray.training import effects, task_steps
from geo_ray.training.lazy_copy import StoredTensor
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard
from tests.support.region_support import Gate, InProcess, Site, eventually, experiment_of

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
ADAMW = {"kind": "adamw", "lr": 0.01, "schedule": {"kind": "cosine", "warmup_steps": 2}}


@pytest.fixture(autouse=True)
def states_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers store optimizers of small models as those of large ones."""
    monkeypatch.setattr(task_steps, "_STORED_FROM", 1)


@pytest.fixture
def reports_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "REPORT_EVERY_S", 0.0)


def config_of(on: str, **changes: Any) -> Any:
    sections: dict[str, Any] = {
        "regions": [{"name": "us-east"}, {"name": "eu-west"}],
        "strategy": {"kind": "diloco", "interval": 4},
        "optimizer": ADAMW,
    }
    train = {"steps": 10, "eval_every": 3, "optimizer_on": on} | changes.pop("train", {})
    return experiment_of(**sections | {"train": train} | changes)


def told(site: Site) -> list[tuple[Any, ...]]:
    """Everything that a region reports about steps and evaluations, but for times."""
    events = site.event_buffer.take(100_000)
    steps = [(e["step"], e["loss"], e["learning_rate"]) for e in events if e["kind"] == "step"]
    return steps + [(e["step"], e["stats"]) for e in events if e["kind"] == "stats"]


def result(directory: Path, on: str, *, shared: bool = True, **changes: Any) -> list[Any]:
    directory = directory / on
    directory.mkdir()
    with InProcess(config_of(on, **changes), directory) as run:
        found = run.run(shared=shared)
        run.check_books()
        return [found, *map(told, run.sites.values())]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": False},
        {"strategy": {"kind": "sma", "interval": 3}},
        {"train": {"clip_norm": 0.5, "clip_mean_norm": 0.3, "accumulate": 2}},
        {"train": {"evaluate": "live"}},
        {"regions": [{"name": "us-east", "ps_shards": 3}, {"name": "eu-west", "ps_shards": 3}]},
        {"optimizer": {"kind": "muon", "lr": 0.01}},
        {"optimizer": {"kind": "adafactor", "lr": 0.01}},
        {"regions": [{"name": "us-east"}]},
        {"train": {"state_every": 1}},
        {"task": {"use": f"{TASKS}:Stateful"}, "train": {"statistics_batches": 0}},
        {"task": {"use": f"{TASKS}:Grouped"}},
        {"task": {"use": f"{TASKS}:Experts"}},
    ],
)
def test_the_results_are_those_of_the_server(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert result(tmp_path, "worker", **changes) == result(tmp_path, "server", **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with InProcess(config_of("server"), tmp_path_factory.mktemp("undisturbed")) as world:
        return world.run()


def test_a_worker_reports_once_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps in rounds of four, with evaluations before steps 5 and 11."""
    monkeypatch.setattr(effects, "REPORT_EVERY_S", 1e9)
    pushes: list[int] = []
    push = Server.push

    def noted(server: Server, worker: int, report: StepReport, **about: Any) -> Any:
        pushes.append(server.version)
        return push(server, worker, report, **about)

    monkeypatch.setattr(Server, "push", noted)
    runs: list[int] = []
    steps = WorkerLoop._steps

    def counted(loop: WorkerLoop, *about: Any) -> Any:
        found = steps(loop, *about)
        runs.append(len(found))
        return found

    monkeypatch.setattr(WorkerLoop, "_steps", counted)
    config = config_of("worker", train={"steps": 12, "eval_every": 5})
    with InProcess(config, tmp_path) as world:
        world.run()
        world.check_books()
        reported = [told(site) for site in world.sites.values()]
    assert sorted(pushes) == sorted([*range(12), *range(12)])
    assert sorted(runs) == sorted([4, 1, 3, 2, 2] * 2)
    assert all([e[0] for e in each[:12]] == [*range(1, 13)] for each in reported)


@pytest.mark.parametrize("kind", ["stop", "drain", "checkpoint"])
def test_requests_reach_a_worker_with_its_next_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It may make all steps of the run in one go, and is in the third one."""
    gate = Gate(steps=3)
    config = config_of("worker", regions=[{"name": "us-east"}], train={"eval_every": 0})
    with InProcess(config, tmp_path, gate=gate) as world:
        site = world.sites["us-east"]
        worker = site.start(0)
        eventually(lambda: gate.reached, "it is in its third step")
        assert site.server.version == 0
        if kind == "stop":
            site.primary.stop()
        elif kind == "drain":
            site.primary.drain(0)
        else:
            directory_of(world.parts, 1).mkdir(parents=True)
            site.primary.snapshot(1, halt=True)
        monkeypatch.setattr(effects, "REPORT_EVERY_S", -1e9)
        gate.open()
        # A step that was assigned before a pause is computed and does not count.
        assert worker.result() == (4 if kind == "checkpoint" else 3)
        assert site.server.version == 3 and not site.server.ahead
        if kind == "checkpoint":
            assert part_of(world, "us-east")[1]["control"]["version"] == 3


def test_a_step_without_an_exchange_moves_no_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    ask, take = ShardLink.exchange, Shard.take_state
    monkeypatch.setattr(
        ShardLink, "exchange", lambda *a, **k: (moved.append("pull"), ask(*a, **k))[1]
    )
    monkeypatch.setattr(Shard, "take_state", lambda *a: (moved.append("state"), take(*a))[1])
    with InProcess(config_of("worker", train={"steps": 8, "eval_every": 0}), tmp_path) as world:
        world.run()
    assert moved.count("state") == 4  # two rounds of two regions
    assert moved.count("pull") == 6  # those, and the start
    for site in world.sites.values():
        moments = site.shards[0].moments(0)
        assert {name for name, each in moments.items() if isinstance(each, StoredTensor)} == {
            "exp_avg",
            "exp_avg_sq",
        }


@pytest.mark.usefixtures("reports_each_step")
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "bytes"])
def test_a_replacement_repeats_the_steps_of_a_lost_worker(
    undisturbed: list[str], tmp_path: Path, shards: int, shared: bool
) -> None:
    gate = Gate(steps=3)
    regions = [{"name": "us-east"}, {"name": "eu-west", "ps_shards": shards}]
    with InProcess(config_of("worker", regions=regions), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(0, shared=shared) for each in world.sites.values()]
        eventually(lambda: gate.reached == set(world.sites), "all are in their third step")
        assert len(site.server.ahead) == 2
        site.primary.lose(0, attempt=1)
        gate.open()
        last = site.start(0, attempt=2, shared=shared)
        workers[0].result()
        assert last.result() == 8  # without the two that it repeats
        world.check_books()
        assert [s.digest for s in world.sites.values()] == undisturbed


@pytest.mark.usefixtures("reports_each_step")
def test_a_worker_that_is_asked_to_leave_sends_its_state(
    undisturbed: list[str], tmp_path: Path
) -> None:
    gate = Gate(steps=3)
    with InProcess(config_of("worker"), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(0) for each in world.sites.values()]
        eventually(lambda: gate.reached == set(world.sites), "all are in their third step")
        site.primary.drain(0)
        gate.open()
        assert workers[1].result() == 3 and not site.server.ahead
        assert site.start(0, attempt=2).result() == 7
        workers[0].result()
        assert [s.digest for s in world.sites.values()] == undisturbed


def part_of(world: InProcess, region: str) -> tuple[dict[str, torch.Tensor], Any]:
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
    tensors, meta = read_part(LocalFolder(directory_of(world.parts, 1)), event["parts"][0])
    return dict(tensors), meta


def saved(directory: Path, on: str, *, at: int, paused: bool = False) -> Any:
    """The part of a checkpoint that begins while the worker makes step ``at``."""
    directory = directory / on
    directory.mkdir()
    gate = Gate(steps=at)
    with InProcess(config_of(on), directory, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = [each.start(0) for each in world.sites.values()]
        eventually(lambda: gate.reached == set(world.sites), f"all are in step {at}")
        if paused:
            site.primary.pause(True)
            gate.open()
            eventually(lambda: site.server.version == at, "the step is counted")
        directory_of(world.parts, 1).mkdir(parents=True)
        site.primary.snapshot(1, halt=False)
        gate.open()
        found = part_of(world, "eu-west")
        site.primary.pause(False)
        for worker in workers:
            worker.result()
        return found, [s.digest for s in world.sites.values()]


@pytest.mark.usefixtures("reports_each_step")
@pytest.mark.parametrize("paused", [False, True])
def test_a_checkpoint_has_the_state_of_the_worker(
    undisturbed: list[str], tmp_path: Path, paused: bool
) -> None:
    (own, own_meta), ends = saved(tmp_path, "worker", at=3, paused=paused)
    (servers, servers_meta), _ = saved(tmp_path, "server", at=4)
    assert ends == undisturbed
    assert own_meta["control"]["version"] == servers_meta["control"]["version"] == 3
    assert own.keys() == servers.keys() and "optimizer/exp_avg" in own
    for name, value in own.items():
        assert torch.equal(value, servers[name]), name
