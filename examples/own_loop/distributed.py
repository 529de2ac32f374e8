"""A region of several processes that joins a run, with DDP, FSDP2 or HSDP.

torchrun --nproc-per-node 4 examples/own_loop/distributed.py ADDRESS REGION CREDENTIALS hsdp
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import geo_ray

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def new_model(sharding: str) -> nn.Module:
    """The model, equal in all regions; their shardings may differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    if sharding == "ddp":
        return DistributedDataParallel(model)
    world_size = dist.get_world_size()
    shape: tuple[int, ...]
    names: tuple[str, ...]
    if sharding == "hsdp":  # two replicas
        shape, names = (2, world_size // 2), ("replicate", "shard")
    else:
        shape, names = (world_size,), ("shard",)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows_of(region: str) -> TensorDataset:
    """The rows of a region, which stay there."""
    generator = torch.Generator().manual_seed(sum(map(ord, region)))
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(address: str, region: str, credentials: str, sharding: str) -> Tensor:
    """Train to the end of the run, on every rank; return the model's parameters."""
    model = new_model(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = rows_of(region)
    loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
    group = dist.group.WORLD
    with (
        geo_ray.join(address, region=region, credentials=credentials, group=group) as site,
        site.training(model) as sync,
    ):
        for x, y in sync.batches(loader):
            loss = nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sync.step(rows=len(x), loss=loss)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


if __name__ == "__main__":
    dist.init_process_group()
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    norm = train(*sys.argv[1:]).norm()
    if dist.get_rank() == 0:
        print(norm)
    dist.destroy_process_group()
