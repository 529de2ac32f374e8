"""Model buffers of joined regions: running statistics, counters and averages; declared rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import geo_ray
from geo_ray.api.data import SourceFiles
from geo_ray.base.errors import ModelMismatchError, TaskStateError
from geo_ray.data.tasks import classification
from geo_ray.joining.service import Stage
from geo_ray.joining.site import JoinedTraining, join
from geo_ray.runs.build import initial_parameters
from tests.integration.joining import recorded_task
from tests.support.join_support import (
    SEEDING,
    WAIT_S,
    Ranks,
    loss_of,
    rows_of,
    serving,
    terms,
    train_all,
    vector_of,
)

REGIONS = ("eu", "us")
STEPS, INTERVAL = 12, 4
WEIGHTS = {"eu": 6, "us": 4}  # rows of a step
DILOCO = {"kind": "diloco", "interval": INTERVAL, "outer": {"kind": "sgd", "lr": 1.0}}
RULES: Mapping[str, Any] = {"average": "mean", "own": "region", "noise": "scratch"}


class Normed(nn.Module):
    """A model with running statistics, a moving average, and values that are not exchanged."""

    own: Tensor
    average: Tensor
    noise: Tensor

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("own", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("noise", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average += x.mean().bfloat16()
            self.own += 1
            self.noise = torch.rand(4)
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def normed(seed: int) -> Normed:
    with SEEDING:
        torch.manual_seed(seed)
        return Normed()


def rows(region: str, step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """The rows of a rank in a step; those of its region are divided."""
    x, y = rows_of(region, step)
    x, y = x[: WEIGHTS[region]], y[: WEIGHTS[region]]
    own = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
    return x[own], y[own]


@dataclass(frozen=True)
class NormedLoop:
    """A training loop of a region; each region and rank begins with other values."""

    address: str
    region: str
    folder: Path
    sharding: str = "none"
    each: Callable[[JoinedTraining], None] | None = None

    def __call__(self, group: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        seed = ord(self.region[0])
        whole = normed(seed)
        nn.init.constant_(whole.norm.running_mean, seed + rank)  # type: ignore[arg-type]
        model: nn.Module = whole
        if self.sharding == "ddp":
            model = DistributedDataParallel(whole, broadcast_buffers=False)
        elif self.sharding == "fsdp":
            fully_shard(whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        path = self.folder / f"{self.region}.pem"
        with (
            join(self.address, region=self.region, credentials=path, group=group) as site,
            site.training(model, buffers=RULES) as sync,
        ):
            while not sync.done:
                x, y = rows(self.region, sync.steps, rank, world_size)
                optimizer.zero_grad()
                loss_of(model, (x, y)).backward()
                optimizer.step()
                sync.step(rows=len(x))
                if self.each is not None:
                    self.each(sync)
        return vector_of(whole), {k: v.clone() for k, v in whole.named_buffers()}


def run_normed(loop: NormedLoop, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return loop(group)


def combined(parts: Sequence[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Combine buffers by rows: written from docs/guides/tasks.md, in float64."""
    total = sum(count for count, _ in parts)

    def mean(name: str) -> Tensor:
        return sum((count / total * each[name].double() for count, each in parts), torch.zeros(()))

    middle = mean("norm.running_mean")
    spread = [
        (count, each["norm.running_var"].double() + (each["norm.running_mean"] - middle) ** 2)
        for count, each in parts
    ]
    counts = torch.stack([each["norm.num_batches_tracked"] for _, each in parts])
    return {
        "norm.running_mean": middle,
        "norm.running_var": sum((n / total * v for n, v in spread), torch.zeros(())),
        "norm.num_batches_tracked": counts.max(),
        "average": mean("average"),
    }


def oracle(shards: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """DiLoCo whose outer step is the mean by rows, with one model per rank, in plain PyTorch."""
    source = normed(ord("e"))
    nn.init.constant_(source.norm.running_mean, ord("e"))  # type: ignore[arg-type]
    models = {(name, rank): normed(0) for name, count in shards.items() for rank in range(count)}
    for model in models.values():
        model.load_state_dict(source.state_dict())
    for step in range(STEPS):
        for name, count in shards.items():
            grads = []
            for rank in range(count):
                model = models[name, rank]
                model.zero_grad()
                own = rows(name, step, rank, count)
                loss_of(model, own).backward()
                grads.append([p.grad / count for p in model.parameters() if p.grad is not None])
            for rank in range(count):
                with torch.no_grad():
                    for p, *of_ranks in zip(models[name, rank].parameters(), *grads, strict=True):
                        p -= 0.1 * sum(of_ranks)
        if (step + 1) % INTERVAL:
            continue
        total = sum(WEIGHTS[name] for name in shards)
        mean = sum(WEIGHTS[n] / total * vector_of(models[n, 0]) for n in shards)
        of_regions = []
        for name, count in shards.items():
            parts = [
                (len(rows(name, 0, r, count)[0]), dict(models[name, r].named_buffers()))
                for r in range(count)
            ]
            of_regions.append((WEIGHTS[name], combined(parts)))
        agreed = combined(of_regions)
        for model in models.values():
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            for key, value in agreed.items():
                model.get_buffer(key).copy_(value)
    first = models["eu", 0]
    return vector_of(first), dict(first.named_buffers())


def check(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, Any]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)
    buffers = found[1]
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "average"):
        torch.testing.assert_close(buffers[name], expected[1][name], rtol=2e-6, atol=2e-6)
    assert int(buffers["own"]) == STEPS  # of each process


def test_the_rules_are_those_of_a_started_run(tmp_path: Path) -> None:
    run = terms(REGIONS, STEPS, strategy=DILOCO)
    with serving(run, tmp_path) as (server, address):
        found = train_all({name: NormedLoop(address, name, tmp_path) for name in REGIONS})
        for each in found.values():
            assert not isinstance(each, Exception), repr(each)
            check(each, oracle({"eu": 1, "us": 1}))
        assert server.stage is Stage.DONE
        final = normed(0)
        server.service.buffer_layout.write(server.service.buffers_B, final)
    for name in ("norm.running_mean", "norm.running_var", "average", "own"):
        assert torch.equal(final.get_buffer(name), found["eu"][1][name])
        assert torch.equal(found["us"][1][name], found["eu"][1][name])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("region", ["eu", "us"])
def test_the_ranks_of_a_region_are_combined_first(
    sharding: str, region: str, ranks: Ranks, tmp_path: Path
) -> None:
    """One of the regions has two ranks; both have the same values after every exchange."""
    (other,) = set(REGIONS) - {region}
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        ranks.start(run_normed, NormedLoop(address, region, tmp_path, sharding))
        alone = train_all({other: NormedLoop(address, other, tmp_path)})[other]
        expected = oracle({name: 2 if name == region else 1 for name in REGIONS})
        for each in (*ranks.results(), alone):
            assert not isinstance(each, Exception), repr(each)
            check(each, expected)


def test_a_region_that_joins_again_has_the_values_of_the_others(tmp_path: Path) -> None:
    steps = 40

    class KilledError(Exception):
        pass

    def fail(sync: JoinedTraining) -> None:
        if sync.steps == 5:
            raise KilledError

    def twice(loop: Callable[..., NormedLoop]) -> Any:
        with pytest.raises(KilledError):
            loop(each=fail)()
        return loop(each=first.append)()

    def wait(sync: JoinedTraining) -> None:
        """Leave steps for the region that returns."""
        until_s = time.monotonic() + WAIT_S
        while sync.steps == steps // 2 and not (first or server.service.waiting):
            assert time.monotonic() < until_s
            time.sleep(0.01)

    first: list[JoinedTraining] = []
    run = terms(REGIONS, steps, strategy={"kind": "one_step_delay", "interval": 3})
    with serving(run, tmp_path) as (server, address):
        found = train_all(
            {
                "eu": NormedLoop(address, "eu", tmp_path, each=wait),
                "us": partial(twice, partial(NormedLoop, address, "us", tmp_path)),
            }
        )
        for each in found.values():
            assert not isinstance(each, Exception), repr(each)
    assert first[0].steps > 5
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(found["us"][1][name], found["eu"][1][name])
    assert int(found["us"][1]["norm.num_batches_tracked"]) == steps


class RecordedNorm(recorded_task.Recorded):
    """A task with running statistics, whose batches are kept."""

    def model(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def test_the_bits_of_a_run_that_geo_ray_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows and initial values end with the same parameters and statistics."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    lines = ["x,label", *(f"{i / 100},{i % 3}" for i in range(400))]
    (tmp_path / "files" / "rows.csv").write_text("\n".join(lines))
    task = "tests.integration.joining.test_join_buffers:RecordedNorm"
    geo_ray.shard_data(task, REGIONS, "data", files=SourceFiles("files"))
    recorded_task.BATCHES.clear()
    driven = geo_ray.simulate(
        {
            "name": "driven",
            "task": {"use": task},
            "data": {"manifest": "data/manifest.json", "batch_size": 8},
            "regions": [{"name": name} for name in REGIONS],
            "strategy": DILOCO,
            "optimizer": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.01},
            "train": {"steps": STEPS, "eval_every": 0, "statistics_batches": 0},
            "emulate": {"step_s": 0.05},
        }
    ).model()
    held = {
        name: {
            x
            for path in Path("data", name).glob("train-*.parquet")
            for x in parquet.read_table(path)["x"].to_pylist()
        }
        for name in REGIONS
    }
    batches: dict[str, list[Any]] = {
        name: [
            batch
            for batch in recorded_task.BATCHES
            if set(batch.inputs[:, 0].tolist()) <= held[name]
        ]
        for name in REGIONS
    }
    task_here = RecordedNorm(geo_ray.Options())
    initial = initial_parameters(task_here, seed=0)

    def loop(address: str, name: str) -> nn.Module:
        model = task_here.model(0)
        nn.utils.vector_to_parameters(initial.clone(), model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        path = tmp_path / f"{name}.pem"
        with join(address, region=name, credentials=path) as site, site.training(model) as sync:
            while not sync.done:
                batch = batches[name][sync.steps]
                optimizer.zero_grad()
                classification.classification_loss(model, batch).backward()
                optimizer.step()
                sync.step(rows=len(batch.labels))
        return model

    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        found = train_all({name: partial(loop, address, name) for name in REGIONS})
    assert [len(each) for each in batches.values()] == [STEPS, STEPS]
    for each in found.values():
        assert not isinstance(each, Exception), repr(each)
        assert torch.equal(vector_of(each), vector_of(driven))
        for (name, mine), theirs in zip(each.named_buffers(), driven.buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def test_other_buffers_are_refused_in_words(tmp_path: Path) -> None:
    def loop(name: str, rules: Any) -> None:
        path = tmp_path / f"{name}.pem"
        with (
            join(address, region=name, credentials=path, wait_s=10.0) as site,
            site.training(normed(0), buffers=rules),
        ):
            pass

    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        found = train_all({"eu": partial(loop, "eu", {}), "us": partial(loop, "us", RULES)})
        (error,) = (each for each in found.values() if isinstance(each, ModelMismatchError))
        assert "'average' first differs" in str(error)
        with pytest.raises(TaskStateError, match="buffers: 'missing' matches no buffer"):
            loop("eu", {"missing": "mean"})
