"""Tensors that ranks really hold, against the memory model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from geo_ray.joining.layout import Layout
from geo_ray.joining.vector import ParameterVector
from geo_ray.planner.memory import ExchangeMemory, GroupLayout, MemoryModel, OptimizerSize
from geo_ray.runs.plan_inputs import sizes_of
from tests.support.join_support import Ranks


def uneven() -> nn.Module:
    """Layers whose rows do not divide evenly, one of them frozen, with a buffer."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    layers[1].requires_grad_(False)
    return nn.Sequential(nn.Linear(17, 40), layers, nn.BatchNorm1d(40), nn.Linear(40, 5))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of local tensors, each once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def held(sharding: str, dtype: str, group: Any) -> dict[str, int]:
    """Train a step on a rank; return the bytes that it holds, and the elements it exchanges."""
    model = uneven().to(getattr(torch, dtype))
    size = dist.get_world_size(group)
    inputs = torch.randn(6, 17, dtype=getattr(torch, dtype))
    if sharding == "ddp":
        trained: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shape = (size,) if sharding == "fsdp" else (2, size // 2)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model[1]:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(inputs).float().pow(2).sum().backward()
    optimizer.step()
    params = list(trained.parameters())
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return {
        "parameters": _bytes_of(params),
        "gradients": _bytes_of(p.grad for p in params if p.grad is not None),
        "optimizer": _bytes_of(states),
        "buffers": _bytes_of(trained.buffers()),
        "exchanged": ParameterVector(trained, Layout.of(trained), group).size,
    }


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "ddp"])
def test_the_largest_rank_holds_what_the_model_says(four: Ranks, sharding: Any, dtype: str) -> None:
    four.start(held, sharding, dtype)
    ranks = four.results()
    found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    with torch.device("meta"):
        module = uneven().to(getattr(torch, dtype))
    replicas = 2 if sharding == "hsdp" else 1
    layout = GroupLayout(sharding, 4, replicas=replicas, bucket_view=True)
    own = MemoryModel(
        sizes_of(module, list(module[1])),  # type: ignore[arg-type]
        OptimizerSize(2),
        layout,
        ExchangeMemory(0, 0, 0, 0),
        on_accelerator=False,
    )
    terms = own.device()
    assert terms["parameters"] == found["parameters"]
    assert terms["optimizer"] == found["optimizer"]
    assert terms["buffers"] == found["buffers"]
    # FSDP pads the gradients of a unit together, so that a rank may hold a few more rows.
    assert found["gradients"] == pytest.approx(terms["gradients"], rel=0.02)
    assert found["exchanged"] <= own.exchanged_per_rank <= found["exchanged"] * 1.02 + 1
