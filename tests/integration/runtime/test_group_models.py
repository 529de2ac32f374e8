"""Models of tasks in groups: running statistics, half precision and frozen parameters.

The ranks are processes of the test; plain PyTorch computes the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geo_ray
from geo_ray.base.errors import TaskStateError
from geo_ray.data.manifest import load_manifest
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.runs.model_file import module_with
from geo_ray.runtime.group_task import GroupRank, train_task
from geo_ray.runtime.serving import terms_of
from geo_ray.runtime.spec import RunSpec
from tests.support.join_support import WAIT_S, Ranks, serving

STEPS, INTERVAL, ROWS, LR, OUTER, MOMENTUM = 6, 3, 8, 0.01, 0.7, 0.5
RANKS = {"eu": 2, "us": 1}

TASKS = """
import torch
from torch import nn
from geo_ray.data.tasks.digits import Digits


class Normed(Digits):
    def model(self, seed):
        torch.manual_seed(seed)
        features = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU()
        )
        return nn.Sequential(features, nn.Linear(12, 10))


class Adapter(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Half(Digits):
    dtype = torch.bfloat16

    def model(self, seed):
        torch.manual_seed(seed)
        layers = nn.Flatten(), Adapter(nn.Linear(64, 12), 3), nn.ReLU(), nn.Linear(12, 10)
        return Cast(nn.Sequential(*layers).to(self.dtype))


class Half16(Half):
    dtype = torch.float16


class Cast(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.to(self.inner[3].weight.dtype)).float()


class Frozen(Half):
    model_buffers = {"inner.1.base.*": "mean"}
"""


def experiment_of(folder: Path, task: str, sharding: str) -> Experiment:
    (folder / "models.py").write_text(TASKS)
    group = {"cpus_per_rank": 0.5, "sharding": sharding}
    tree: dict[str, Any] = {
        "name": "models",
        "task": {"use": f"models.py:{task}"},
        "data": {"generate": {}, "batch_size": ROWS},
        "optimizer": {"kind": "adamw", "lr": LR},
        "strategy": {
            "kind": "diloco",
            "interval": INTERVAL,
            "weights": "uniform",
            "outer": {"kind": "nesterov", "lr": OUTER, "momentum": MOMENTUM},
        },
        "train": {"steps": STEPS},
        "regions": [
            {"name": name, "group": {**group, "ranks_per_node": count}}
            for name, count in RANKS.items()
        ],
        "checkpoint": {"every_s": None},
    }
    return geo_ray.load_config(tree, base_dir=folder)


def train_rank(spec: RunSpec, region: str, address: str, folder: Path, _: Any) -> None:
    """Train the task in a rank of `Ranks`."""
    own = JoinCredentials.read(folder / f"{region}.pem")
    transport = spec.experiment.transport
    checkpoints = str(folder / "checkpoints")
    rank = GroupRank(region, 0, torch.device("cpu"), address, own, transport, WAIT_S, checkpoints)
    with pytest.MonkeyPatch.context() as patch:  # there is no node of Ray with a label
        patch.setattr("geo_ray.runtime.group_task.region_here", lambda config, *_: config.name)
        train_task(rank, spec)


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[str, Ranks]]:
    pools = {name: Ranks(count) for name, count in RANKS.items()}
    yield pools
    for pool in pools.values():
        pool.close()


def in_groups(
    experiment: Experiment, ranks: dict[str, Ranks], folder: Path
) -> tuple[Task, str, Tensor, Tensor]:
    """Train; return task, manifest, parameters (P,) and model buffers, uint8 (B,)."""
    task = load_task(experiment.task, folder)
    _, manifest = prepare_manifest(experiment, task, folder, folder / "data")
    spec = RunSpec(
        experiment_json=experiment.model_dump_json(),
        base_dir=str(folder),
        working_dir=str(folder),
        manifest_address=manifest,
        run_id="run",
        run_dir=str(folder),
    )
    with serving(terms_of(experiment), folder) as (server, address):
        for name, pool in ranks.items():
            pool.start(train_rank, spec, name, address, folder)
        found = [each for pool in ranks.values() for each in pool.results()]
        failed = [each for each in found if isinstance(each, Exception)]
        if failed:
            raise failed[0]
        with server.lock:
            service = server.service
            return task, manifest, service.model_P.clone(), service.buffers_B.clone()


def plain(task: Task, experiment: Experiment, manifest: str) -> nn.Module:
    """DiLoCo in plain PyTorch, with fp32 masters and statistics of each rank."""
    pairs = {name: open_readers(experiment, load_manifest(manifest), name)[0] for name in RANKS}
    models = {name: [task.model(0) for _ in range(count)] for name, count in RANKS.items()}
    masters = {
        name: [p.detach().float().requires_grad_() for p in own[0].parameters() if p.requires_grad]
        for name, own in models.items()
    }
    optimizers = {name: torch.optim.AdamW(each, lr=LR) for name, each in masters.items()}
    outer = nn.utils.parameters_to_vector(masters["eu"]).detach()
    velocity = torch.zeros_like(outer)

    def rounded(name: str) -> None:
        for model in models[name]:
            trained = [p for p in model.parameters() if p.requires_grad]
            with torch.no_grad():
                for param, master in zip(trained, masters[name], strict=True):
                    param.copy_(master)

    for step in range(STEPS):
        for name, own in models.items():
            for master in masters[name]:
                master.grad = torch.zeros_like(master)
            for rank, model in enumerate(own):
                model.zero_grad()
                first = (step * len(own) + rank) * ROWS
                batch = task.collate(pairs[name].read(first, ROWS), torch.device("cpu"))
                nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
                trained = [p for p in model.parameters() if p.requires_grad]
                for param, master in zip(trained, masters[name], strict=True):
                    assert param.grad is not None and master.grad is not None
                    master.grad += param.grad.float() / len(own)
            optimizers[name].step()
            rounded(name)
        if (step + 1) % INTERVAL == 0:
            ends = [nn.utils.parameters_to_vector(each).detach() for each in masters.values()]
            delta = torch.stack([outer - end for end in ends]).mean(0)
            velocity = MOMENTUM * velocity + delta
            outer = outer - OUTER * (delta + MOMENTUM * velocity)
            for name, each in masters.items():
                nn.utils.vector_to_parameters(outer.clone(), each)
                rounded(name)
            mixed_statistics([model for own in models.values() for model in own])
    found = copy.deepcopy(models["eu"][0])
    with torch.no_grad():
        trained = [p for p in found.parameters() if p.requires_grad]
        for param, master in zip(trained, masters["eu"], strict=True):
            param.copy_(master)
    return found


def mixed_statistics(models: list[nn.Module]) -> None:
    """Give all models the statistics of the rows of all, which are equally many."""
    norms = [[m for m in model.modules() if isinstance(m, nn.BatchNorm1d)] for model in models]
    for each in zip(*norms, strict=True):
        means = torch.stack([n.running_mean for n in each])
        mean = means.mean(0)
        variance = torch.stack([n.running_var for n in each]).mean(0)
        variance += (means - mean).square().mean(0)
        for n in each:
            n.running_mean.copy_(mean)
            n.running_var.copy_(variance)


@pytest.mark.parametrize(
    ("name", "sharding", "atol"),
    [
        ("Normed", "fsdp", 2e-6),
        ("Normed", "ddp", 2e-6),
        ("Half", "fsdp", 3e-3),
        ("Half", "ddp", 3e-3),
        ("Half16", "ddp", 1e-3),
    ],
)
def test_as_in_plain_pytorch(
    name: str, sharding: str, atol: float, ranks: dict[str, Ranks], tmp_path: Path
) -> None:
    """Gradients of half precision are added by ranks in half precision, so those differ."""
    experiment = experiment_of(tmp_path, name, sharding)
    task, manifest, params_P, buffers_B = in_groups(experiment, ranks, tmp_path)
    expected = plain(task, experiment, manifest)
    found = module_with(task, 0, [params_P], buffers_B if len(buffers_B) else None)
    before = task.model(0).state_dict()
    state = found.state_dict()
    for key, value in expected.state_dict().items():
        if "base" in key:
            assert torch.equal(state[key], before[key])
            continue
        if value.is_floating_point():
            assert float((value - before[key]).abs().max()) > 4 * atol
        torch.testing.assert_close(state[key], value, rtol=0, atol=atol)
    trained = sum(p.numel() for p in task.model(0).parameters() if p.requires_grad)
    assert params_P.numel() == trained
    assert params_P.dtype == torch.float32


def test_small_changes_add_up_in_the_masters(ranks: dict[str, Ranks], tmp_path: Path) -> None:
    """A change of one step is below the resolution of bf16 at most values."""
    changed = experiment_of(tmp_path, "Half", "ddp")
    optimizer = changed.optimizer.model_copy(update={"lr": 1e-5})
    changed = changed.model_copy(update={"optimizer": optimizer})
    task, _, params_P, _ = in_groups(changed, ranks, tmp_path)
    trained = [p for p in task.model(0).parameters() if p.requires_grad]
    before_P = nn.utils.parameters_to_vector(trained).detach().float()
    moved = (params_P != before_P).float().mean()
    assert float(moved) > 0.5
    assert float((params_P - before_P).abs().max()) < 1e-4


def test_frozen_model_buffers_need_whole_parameters(
    ranks: dict[str, Ranks], tmp_path: Path
) -> None:
    with pytest.raises(TaskStateError, match=r"inner\.1\.base\.weight.*FSDP divides it") as found:
        in_groups(experiment_of(tmp_path, "Frozen", "fsdp"), ranks, tmp_path)
    assert "group.sharding: ddp" in (found.value.fix or "")
    in_groups(experiment_of(tmp_path, "Frozen", "ddp"), ranks, tmp_path)
