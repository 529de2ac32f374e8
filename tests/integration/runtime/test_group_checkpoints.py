"""Regions that are process groups are stopped, resumed and served by several holders.

All runs but one are on the shared cluster. The rows of every step are fixed, so that a run that was
stopped or has lost a process must end with the bits of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

import geo_ray
from geo_ray.base.errors import InterruptedRunError
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs import directory as rundir
from geo_ray.runs.model_file import save_module
from geo_ray.runs.requests import Interruption
from geo_ray.runtime.serving import module_of, terms_of
from tests.support.join_support import Ranks, served_model, serving
from tests.support.train_support import events_of, train

STEPS, INTERVAL = 40, 4
RANKS = ("eu-west-0", "eu-west-1", "us-east-0")
LOOP = """
import hashlib, time
from pathlib import Path
import torch, geo_ray
from torch import nn
from torch.distributed.fsdp import fully_shard

HERE, STEPS, HOLD = Path(__file__).parent, {steps}, {hold}
REGIONS = ("eu-west", "us-east")

def train(rank: geo_ray.GroupRank) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    seed = 2 * REGIONS.index(rank.region) + rank.rank
    rows = torch.randn(STEPS, 8, 8, generator=torch.Generator().manual_seed(seed))
    own = HERE / f"{{rank.region}}-{{rank.rank}}"
    with (
        open(own.with_suffix(".steps"), "a", buffering=1) as log,
        rank.join() as site,
        site.training(
            model,
            state={{"optimizer": optimizer, "schedule": schedule}},
            checkpoints=rank.checkpoints,
        ) as sync,
    ):
        while not sync.done:
            step = sync.steps
            while step == HOLD and rank.region == "eu-west" and not (HERE / "go").exists():
                time.sleep(0.02)
            x = rows[step]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
            loss.backward()
            optimizer.step()
            schedule.step()
            if not (HERE / "fast").exists():
                time.sleep(0.1)
            sync.step(rows=len(x), loss=loss)
            print(step, sync._exchange.averager_version, file=log)
    whole = [param.full_tensor().detach().numpy().tobytes() for param in model.parameters()]
    own.with_suffix(".digest").write_text(hashlib.sha256(b"".join(whole)).hexdigest())
"""


def experiment(folder: Path, hold: int = -1, **changes: Any) -> Experiment:
    """Two groups; region eu-west waits before step ``hold`` until the file ``go`` exists."""
    folder.mkdir(exist_ok=True)
    (folder / "my_loop.py").write_text(LOOP.format(steps=STEPS, hold=hold))
    group = {"cpus_per_rank": 0.5, "loop": "my_loop.py:train"}
    tree: dict[str, Any] = {
        "name": "tiny",
        "regions": [
            {"name": "us-east", "group": group},
            {"name": "eu-west", "group": group | {"ranks_per_node": 2}},
        ],
        "strategy": {"kind": "diloco", "interval": INTERVAL},
        "train": {"steps": STEPS},
        "serve": {"port": 0},
        "checkpoint": {"every_s": 3600.0},
        "cluster": {"kind": "existing"},
        "run": {"dir": str(folder / "runs")},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))


def logs_of(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """The steps that each rank has made, in their order, and the averager's version after each."""
    found = {}
    for name in RANKS:
        lines = (folder / f"{name}.steps").read_text().splitlines()
        found[name] = [(int(step), int(version)) for step, version in map(str.split, lines)]
    return found


def assert_made(folder: Path, steps: range) -> None:
    """Each rank has made these steps at last, in their order."""
    for name, log in logs_of(folder).items():
        assert [step for step, _ in log][-len(steps) :] == list(steps), name


def assert_ends_alike(folder: Path, model: Path) -> dict[str, Tensor]:
    """All ranks of all regions end with the model of the run, which is returned."""
    found = load_file(model)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    digest = hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in names)).hexdigest()
    for name in RANKS:
        assert (folder / f"{name}.digest").read_text() == digest, name
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def run_here(folder: Path, address: str, region: str, group: Any) -> None:
    """Run the loop of `experiment` as a rank of a process group that geo_ray has not started."""
    pem = folder / f"{region}.pem"
    join = partial(geo_ray.join, address, region=region, credentials=pem, group=group)
    saved = folder / f"saved-{region}"
    rank = SimpleNamespace(region=region, rank=group.rank(), join=join, checkpoints=saved)
    runpy.run_path(str(folder / "my_loop.py"))["train"](rank)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The final model of a run without Ray, with one holder, that is not stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "fast").touch()
    terms = terms_of(experiment(folder)).model_copy(update={"saves_at_end": False})
    groups = {"us-east": Ranks(1), "eu-west": Ranks(2)}
    try:
        with serving(terms, folder) as (server, address):
            for region, ranks in groups.items():
                ranks.start(run_here, folder, address, region)
            assert [each for ranks in groups.values() for each in ranks.results()] == [None] * 3
            layout = server.service.layout
            assert layout is not None
            save_module(module_of(layout, served_model(server)), folder / "model.safetensors", {})
    finally:
        for ranks in groups.values():
            ranks.close()
    assert_made(folder, range(STEPS))
    return assert_ends_alike(folder, folder / "model.safetensors")


@pytest.mark.parametrize("way", ["ctrl_c", "the_command"])
@pytest.mark.slow  # starts two runs
@pytest.mark.usefixtures("ray_cluster")
def test_stopped_groups_are_resumed_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Tensor], way: str
) -> None:
    """In the second round, region eu-west waits until the stop was requested."""
    changed, stop = experiment(tmp_path, INTERVAL + 1), Interruption()
    run, seen = rundir.create(changed, tmp_path), list[str]()

    def on_event(event: geo_ray.Event) -> None:
        if event.kind == "step":
            seen.append(event["region"])
            if len(seen) == 2 and way == "ctrl_c":  # both regions have ended the first round
                stop.set()
            elif len(seen) == 2:
                found = CliRunner().invoke(root, ["stop", str(run.path)])
                assert found.exit_code == 0, found.output
        if event.kind == "stop_requested":
            (tmp_path / "go").touch()

    with pytest.raises(InterruptedRunError, match="its state is saved"):
        train(changed, tmp_path, begun=run, sink=on_event, interruption=stop)
    (saved,) = [event for event in events_of(run.path) if event.kind == "checkpoint"]
    assert saved["step"] in range(2 * INTERVAL, STEPS, INTERVAL)
    assert {len(log) for log in logs_of(tmp_path).values()} == {saved["step"]}
    (tmp_path / "fast").touch()
    done = train(changed, tmp_path, begun=run, resume=True)
    assert {len(log) for log in logs_of(tmp_path).values()} == {STEPS}
    assert_made(tmp_path, range(STEPS))
    assert_same(assert_ends_alike(tmp_path, run.model), undisturbed)
    assert (done.summary.steps, done.summary.samples) == (STEPS, len(RANKS) * STEPS * 8)
    started = done.of("run_started")
    assert [event.fields.get("resumed_step") for event in started] == [None, saved["step"]]
    assert not done.of("worker_lost") and not done.of("region_lost")


def holder_of(cluster: LocalCluster) -> int:
    """The process of the only holder next to the averager."""
    found = []
    for pid in descendants(cluster._processes._supervisor.pid):
        with suppress(FileNotFoundError):
            if b"HolderActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    (pid,) = found
    return pid


@pytest.mark.slow  # starts two runs
def test_groups_continue_after_a_holder_is_lost(
    tmp_path: Path, undisturbed: dict[str, Tensor], ray_cluster: LocalCluster
) -> None:
    """Two holders compute what one does, before the loss and after it."""
    seen: list[str] = []

    def on_event(event: geo_ray.Event) -> None:
        if event.kind == "checkpoint" and "checkpoint" not in seen:
            os.kill(holder_of(ray_cluster), signal.SIGKILL)
        seen.append(event.kind)
        if seen.count("run_started") == 2:
            (tmp_path / "go").touch()
            (tmp_path / "fast").touch()

    changes = {"serve": {"port": 0, "holders": 2}, "checkpoint": {"every_s": 0.5}}
    done = train(experiment(tmp_path, STEPS - 1, **changes), tmp_path, sink=on_event)
    first, second = done.of("run_started")
    assert first.fields.get("resumed_step") is None
    assert second["resumed_step"] in range(INTERVAL, STEPS, INTERVAL)
    assert_made(tmp_path, range(second["resumed_step"], STEPS))
    assert_same(assert_ends_alike(tmp_path, done.run.model), undisturbed)
    assert done.summary.steps == STEPS


@pytest.mark.slow  # starts a run
@pytest.mark.usefixtures("ray_cluster")
def test_groups_change_an_adaptive_interval_together(tmp_path: Path) -> None:
    """Exchanges take far more than a thousandth of a step, so that the interval grows."""
    (tmp_path / "fast").touch()
    strategy = {"kind": "diloco", "interval": 2, "compute_fraction": 0.999}
    done = train(experiment(tmp_path, strategy=strategy), tmp_path)
    assert_made(tmp_path, range(STEPS))
    assert_ends_alike(tmp_path, done.run.model)
    exchanges = {
        name: [after[0] + 1 for before, after in pairwise([(-1, 0), *log]) if before[1] < after[1]]
        for name, log in logs_of(tmp_path).items()
    }
    (steps,) = set(map(tuple, exchanges.values()))
    assert steps[:2] == (2, 4) and steps[-1] == STEPS
    assert max(later - earlier for earlier, later in pairwise(steps)) > 2
    for region in ("eu-west", "us-east"):
        assert [e["step"] for e in done.of("step") if e["region"] == region] == list(steps)
