"""A region on Ray Train that joins a run from its `train_loop_per_worker`.

python examples/own_loop/with_ray_train.py ADDRESS REGION CREDENTIALS
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import geo_ray


def new_model() -> nn.Module:
    """The model, equal in all regions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def rows_of(region: str) -> TensorDataset:
    """The rows of a region, which stay there."""
    generator = torch.Generator().manual_seed(sum(map(ord, region)))
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train_loop_per_worker(config: dict[str, Any]) -> np.ndarray:
    """Train to the end of the run, on every worker of the region; return the parameters."""
    model = ray.train.torch.prepare_model(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows, device = rows_of(config["region"]), ray.train.torch.get_device()
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
    with (
        geo_ray.join(
            config["address"],
            region=config["region"],
            credentials=config["credentials"],  # a file that every node has
            group=dist.group.WORLD,
        ) as site,
        site.training(model) as sync,
    ):
        for x, y in sync.batches(loader):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sync.step(rows=len(x), loss=loss)
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()


def train(address: str, region: str, credentials: str, storage_path: str | None = None) -> Tensor:
    """Train with two workers of the region's Ray cluster; return the model's parameters."""
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={
            "address": address,
            "region": region,
            "credentials": str(Path(credentials).resolve()),
        },
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=storage_path),
    )
    return torch.from_numpy(trainer.fit().return_value)


if __name__ == "__main__":
    print(train(*sys.argv[1:]).norm())
